"""The options of a layer's attention as the CPU kernel takes them, without torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """See `AttentionOptions`; `sinks` are float32 `[query_heads]`."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: npt.NDArray[np.float32] | None = None
