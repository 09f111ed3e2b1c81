"""Decode rates as shares of the roofline, one bar per batch, one picture per context."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.gpu_check.goals import ROOFLINE_SHARE
from benches.gpu_check.rows import Row

FILE = "decode.svg"


def draw(rows: Sequence[Row], folder: Path) -> str | None:
    """Write `FILE`; returns why there is none, or None."""
    points = [row.numbers for row in rows if row.check.startswith("decode ") and row.numbers]
    if not points:
        return "no decode rates were measured"
    try:
        import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"matplotlib is missing ({error})"
    shapes = list(dict.fromkeys(point["shape"] for point in points))
    figure, axes = pyplot.subplots(
        1, len(shapes), figsize=(4.5 * len(shapes), 3.2), sharey=True, squeeze=False
    )
    for axis, shape in zip(axes[0], shapes, strict=True):
        _bars(axis, [point for point in points if point["shape"] == shape])
        axis.set_title(shape)
        axis.axhline(ROOFLINE_SHARE, color="grey", linewidth=0.8, linestyle="--")
    axes[0, 0].set_ylabel("share of the bandwidth roofline")
    axes[0, 0].legend(title="context", fontsize="small")
    figure.tight_layout()
    figure.savefig(folder / FILE)
    pyplot.close(figure)
    return None


def _bars(axis: Any, points: Sequence[Any]) -> None:
    batches = sorted({point["batch"] for point in points})
    contexts = sorted({point["context"] for point in points})
    width = 0.8 / len(contexts)
    for at, context in enumerate(contexts):
        places = {point["batch"]: point for point in points if point["context"] == context}
        x = [batches.index(batch) + (at - (len(contexts) - 1) / 2) * width for batch in places]
        heights = [point["roofline_share"] for point in places.values()]
        bars = axis.bar(x, heights, width, label=f"{context:,}")
        labels = [f"{point['tokens_per_second']:,.0f}" for point in places.values()]
        axis.bar_label(bars, labels, fontsize=6)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_xlabel("batch (above the bars: tokens/s)")
    axis.set_ylim(0, 1.1)
