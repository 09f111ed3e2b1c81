"""The Triton kernel of masks against NumPy."""

from itertools import product

import numpy as np
import torch

from tests.support.kernels import LoadedBytes, in_interpreter


@in_interpreter
def test_forbidden_tokens_have_no_logit() -> None:
    """In the interpreter: forbidden tokens become -inf without reading the logits."""
    from pyengine.kernels.masks import forbid

    generator = np.random.default_rng(0)
    for width, dtype in product((5, 32, 4096, 4101), (torch.float32, torch.float16)):
        logits = torch.randn(5, width + 3).to(dtype)
        rows = torch.tensor([4, 0, 2])
        for num_words in (max(1, width // 32), -(-width // 32) + 1):
            words = generator.integers(-(2**31), 2**31, (3, num_words), dtype=np.int32)
            bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :width]
            is_in = np.pad(bits, ((0, 0), (0, width - bits.shape[1]))).astype(bool)
            expected = logits.clone()
            expected[rows, :width] = torch.where(
                torch.from_numpy(is_in), logits[rows, :width], -torch.inf
            )
            with LoadedBytes(logits) as loaded:
                forbid(logits[:, :width], rows, torch.from_numpy(words))
            assert logits.tolist() == expected.tolist()
            assert loaded.count == 0
