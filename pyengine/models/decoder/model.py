"""A decoder of ours as the runner calls it: tensors in, tensors out."""

from typing import Any

import torch

from pyengine.attention.dispatch import CompiledModel, PagedContext
from pyengine.attention.needs import LayerNeeds
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.spec import Attention, DecoderSpec


class DecoderModel:
    """See `Model`. A decoder over arrays gets views of the step's tensors."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder, self.device = decoder, device
        self.name = decoder.spec.family
        self.origin = f"pyengine ({decoder.spec.family})"
        self.settings = repr(decoder.spec)
        self._is_over_arrays = isinstance(decoder.kernels, CpuKernels)
        self.can_compile = not self._is_over_arrays

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        paged: PagedContext | CompiledModel,
    ) -> torch.Tensor:
        """See `Model`."""
        plan: Any = paged.plan if isinstance(paged, PagedContext) else paged
        if not self._is_over_arrays:
            logits: torch.Tensor = self._decoder(ids, positions, rows, plan)
            return logits
        arrays = ids.numpy(), positions.numpy(), rows.numpy()
        return torch.from_numpy(self._decoder(*arrays, plan))


def attending_layers(spec: DecoderSpec) -> tuple[LayerNeeds, ...]:
    """The attention of every layer that has a KV cache of its own."""
    found = []
    for number in spec.cached:
        mixer = spec.layers[number].mixer
        cache = mixer.cache(torch.float32)
        found.append(
            LayerNeeds(
                query_heads=mixer.heads,
                kv_heads=cache.num_kv_heads,
                head_dim_k=cache.head_dim_k,
                head_dim_v=cache.head_dim_v,
                window=mixer.window,
                softcap=mixer.softcap,
                sinks=isinstance(mixer, Attention) and mixer.sinks,
            )
        )
    return tuple(found)
