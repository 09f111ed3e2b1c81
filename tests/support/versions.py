"""The libraries' versions, where they do otherwise than those that tests were written with."""

import torch
import transformers

from pyengine.attention.needs import torch_version

IS_TORCH_2_9 = torch_version(torch.__version__) == (2, 9)
IS_TRANSFORMERS_5_17 = torch_version(transformers.__version__) == (5, 17)
