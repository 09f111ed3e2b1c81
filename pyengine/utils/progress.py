"""Progress of a batch of prompts on standard error."""

import sys
from typing import Any

_BETWEEN_LINES = 10.0  # seconds


class _Lines:
    """A file for a bar of tqdm that writes each state of it as a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(total: int) -> Any:
    """A bar of tqdm; where standard error is a file or a pipe, a line every ten seconds."""
    from tqdm import tqdm

    if sys.stderr.isatty() or "ipykernel" in sys.modules:  # notebooks draw bars, too
        return tqdm(total=total, unit="prompt", dynamic_ncols=True)
    return tqdm(
        total=total,
        file=_Lines(),
        leave=False,
        delay=_BETWEEN_LINES,
        mininterval=_BETWEEN_LINES,
        miniters=1,
        bar_format="{n_fmt} of {total_fmt} prompts{postfix}",
    )
