"""Masks of allowed tokens as a Triton kernel: logits of forbidden ones become -inf."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096
"""Logits of a program."""
_WORD = 32
"""Tokens of a word."""
_WARPS = 8


@triton.jit
def _forbid_kernel(  # noqa: PLR0913, PLR0917
    logits, rows, words, stride, vocab_size, num_words, word: tl.constexpr, block: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    own = tl.load(words + row * num_words + at // word, mask=at // word < num_words, other=0)
    is_out = ((own >> (at % word)) & 1) == 0
    target = logits + tl.load(rows + row) * stride + at
    tl.store(target, tl.full((block,), -float("inf"), tl.float32), mask=is_out & (at < vocab_size))


def forbid(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    `logits`: `[B, V]` of any floating type, rows of consecutive numbers. `rows`: int64 `[R]`.
    `words`: int32 `[R, W]`; bit i of word w allows token 32 w + i, later tokens are forbidden.
    """
    vocab_size = logits.shape[1]
    _forbid_kernel[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
        logits,
        rows,
        words,
        logits.stride(0),
        vocab_size,
        words.shape[1],
        word=_WORD,
        block=_BLOCK,
        num_warps=_WARPS,
    )
