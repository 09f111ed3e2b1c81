"""A worker that fails as a file tells it: `python -m tests.support.faulty_worker SOCKET DRIVER`.

The file is named by the environment. It holds one word: `calm`; `prepare` (fails by chance before
the forward pass); `forward` (fails in layer 1). `inject` puts the same faults into the process of
a test, so that rank 0 fails where the workers do.
"""

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from pyengine.attention import gather
from pyengine.executor.tensor_parallel import worker

VARIABLE = "PYENGINE_TEST_FAULTS"
_RANDOM = Random(1)


class InjectedError(RuntimeError):
    """What is raised."""


def asked() -> str:
    """What is to fail now."""
    return Path(os.environ[VARIABLE]).read_text()


def inject(patch: Any) -> None:
    """Let the gather backend fail; `patch` sets an attribute, as `setattr` does."""
    metadata, forward = gather.GatherBackend.metadata, gather.GatherMetadata.forward

    def faulty_metadata(self: Any, inputs: Any) -> Any:
        if asked() == "prepare" and _RANDOM.random() < 0.4:
            raise InjectedError("while preparing")
        return metadata(self, inputs)

    def faulty_forward(self: Any, layer: int, *given: Any) -> Any:
        if asked() == "forward" and layer == 1:
            raise InjectedError("in layer 1")
        return forward(self, layer, *given)

    patch(gather.GatherBackend, "metadata", faulty_metadata)
    patch(gather.GatherMetadata, "forward", faulty_forward)


if __name__ == "__main__":
    inject(setattr)
    os._exit(worker.main(sys.argv[1:]))
