"""The libraries' versions, where they do otherwise than those that tests were written with.

None of them where a library is not installed.
"""

from importlib.metadata import version

from pyengine.attention.needs import torch_version
from tests.support.without_torch import MISSING

IS_TORCH_2_9 = "torch" not in MISSING and torch_version(version("torch")) == (2, 9)
IS_TRANSFORMERS_5_17 = "transformers" not in MISSING and torch_version(version("transformers")) == (
    5,
    17,
)
