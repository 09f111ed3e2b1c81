"""The plots of the docs, as SVG: only those whose works were measured."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benches.peers.scaling import SIZES

COLOURS = {
    "pyengine": "#d1495b",
    "pyengine, list": "#e39aa4",
    "SGLang Rust core": "#edae49",
    "vLLM sha256": "#00798c",
    "vLLM xxhash": "#66afba",
    "nano-vllm": "#5b5f97",
}
MARKERS = dict(zip(COLOURS, "osD^vP", strict=True))
STYLE = {
    "svg.hashsalt": "pyengine",  # the same file for the same figures
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "figure.facecolor": "white",
}


def median_of(works: dict[str, Any], work: str, manager: str, part: str = "us") -> float | None:
    """Microseconds, if it was measured."""
    figure = works.get(work, {}).get(manager, {}).get(part)
    return None if figure is None else figure["median"]


def line(
    axes: Axes, points: Sequence[tuple[float, float | None]], manager: str, label: str
) -> None:
    """One manager's points, on logarithmic axes."""
    measured = [(x, y) for x, y in points if y is not None]
    if measured:
        style = "--" if label.startswith("_") else "-"
        axes.plot(
            *zip(*measured, strict=True),
            style,
            color=COLOURS[manager],
            marker=MARKERS[manager],
            markersize=4,
            label=label,
        )


def finish(axes: Axes, title: str, x: str, ticks: tuple[int, ...]) -> None:
    """Scales and names."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    powers = len(str(ticks[-1])) > 6
    labels = [f"$10^{len(str(n)) - 1}$" if powers else f"{n:,}" for n in ticks]
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)


def name_lines(figure: Figure, axes: Axes) -> None:
    """A legend to the right of both panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="center right")


def prefill(works: dict[str, Any]) -> Figure | None:
    """Time against the length of the prompt."""
    lengths = (512, 8_192, 131_072)
    if any(f"{state}-{count}" not in works for state in ("cold", "hot") for count in lengths):
        return None
    figure, both = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axes, state in zip(both, ("cold", "hot"), strict=True):
        for name in COLOURS:
            points = [(n, median_of(works, f"{state}-{n}", name)) for n in lengths]
            line(axes, points, name, name)
        finish(axes, f"{state} prefill", "tokens of the prompt", lengths)
    both[0].set_ylabel("µs")
    name_lines(figure, both[0])
    return figure


def decode(works: dict[str, Any]) -> Figure | None:
    """Time against the size of the batch."""
    sizes = (1, 32, 256, 1024)
    if any(f"{work}-{n}" not in works for work in ("decode", "fill") for n in sizes):
        return None
    figure, both = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    wanted = (("decode", "step", "plan and commit"), ("fill", "us", "inputs of the step"))
    for axes, (work, part, title) in zip(both, wanted, strict=True):
        for name in COLOURS:
            points = [(n, median_of(works, f"{work}-{n}", name, part)) for n in sizes]
            line(axes, points, name, name)
        finish(axes, title, "sequences", sizes)
    both[0].set_ylabel("µs per step")
    name_lines(figure, both[0])
    return figure


def pools(works: dict[str, Any]) -> Figure | None:
    """Time against the size of the pool."""
    if any(key not in works for key in ("scale-hot", "scale-hot-any", "scale-cold")):
        return None
    figure, both = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    wanted = ((("scale-cold", ""),), (("scale-hot", ""), ("scale-hot-any", "_")))
    titles = ("cold prefill of 8,192 tokens", "hot; dashed: any prompt of the pool")
    for axes, parts, title in zip(both, wanted, titles, strict=True):
        for work, hidden in parts:
            sizes: dict[str, list[tuple[float, float | None]]] = {}
            for column in works[work]:
                name, _, size = column.partition(" @ ")
                sizes.setdefault(name, []).append((int(size), median_of(works, work, column)))
            for name, points in sizes.items():
                line(axes, points, name, hidden + name)
        finish(axes, title, "blocks in the pool", SIZES)
    both[0].set_ylabel("µs")
    name_lines(figure, both[0])
    return figure


def draw(results: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Writes the plots and names them."""
    folder.mkdir(parents=True, exist_ok=True)
    works = results["works"]
    with mpl.rc_context(STYLE):
        for name, figure in (
            ("peers-prefill", prefill(works)),
            ("peers-decode", decode(works)),
            ("peers-pools", pools(works)),
        ):
            if figure is None:
                continue
            described = results["machine"]
            caption = f"{described['cpu']}, {described['date']}; medians, logarithmic scales"
            figure.text(0.99, 0.005, caption, ha="right", fontsize=5, color="#777777")
            figure.tight_layout(rect=(0, 0.02, 0.84 if figure.legends else 1, 1))
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            plt.close(figure)
            yield path
