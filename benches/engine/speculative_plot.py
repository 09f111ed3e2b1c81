"""Tokens per decode with drafts, and what they gain, over the batch: the plot of the docs.

    .venv-peers/bin/python -m benches.engine.speculative_plot

from the root of the repository, of the figures that `benches.engine.speculative` has left in
`benches/results/speculative-xeon-amx.json`, to `docs/images/speculation.svg`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from benches.peers.plots import STYLE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benches/results/speculative-xeon-amx.json"
PLOT = ROOT / "docs/images/speculation.svg"
COLOURS = ["#d1495b", "#00798c", "#edae49", "#5b5f97", "#6a994e"]
LINES = {"ngram": "o-", "suffix": "s--"}


class Figures:
    """The figures of a run, looked up by work, batch and engine; one for each round."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self._found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
        for one in results["figures"]:
            key = one["work"], one["batch"], one["engine"]
            self._found.setdefault(key, []).append(one)
        self.works = list(dict.fromkeys(work for work, _, _ in self._found))
        self.batches = sorted({batch for _, batch, _ in self._found})

    def per_decode(self, work: str, batch: int, engine: str) -> float | None:
        """The median of tokens per decode with drafts."""
        found = self._found.get((work, batch, engine))
        return median([one["per_step"] for one in found]) if found else None

    def gain(self, work: str, batch: int, engine: str) -> float | None:
        """The median of how often the tokens per second without drafts, in the same rounds."""
        both = [self._found.get((work, batch, name), []) for name in (engine, "without")]
        ratios = [_rate(one) / _rate(plain) for one, plain in zip(*both, strict=True)]
        return median(ratios) if ratios else None


def _rate(figure: Mapping[str, Any]) -> float:
    return float(figure["tokens"] / figure["seconds"])


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw a run."""
    figures = Figures(results)
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
        for work, colour in zip(figures.works, COLOURS, strict=False):
            for engine, style in LINES.items():
                for axes, value in ((left, figures.per_decode), (right, figures.gain)):
                    points = [(batch, value(work, batch, engine)) for batch in figures.batches]
                    known = [point for point in points if point[1] is not None]
                    if known:
                        label = f"{work}, {engine}"
                        xs, ys = zip(*known, strict=True)
                        axes.plot(xs, ys, style, color=colour, markersize=4, label=label)
        for axes, title in ((left, "tokens per decode with drafts"), (right, "times without")):
            axes.set_xscale("log", base=2)
            axes.set_xticks(figures.batches, [str(batch) for batch in figures.batches])
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("requests at a time")
            axes.axhline(1, color="#777777", linewidth=0.8)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=7, frameon=False, loc="center right")
        about = results["about"]
        caption = f"{about['cpu']}, {about['date']}; medians"
        figure.text(0.99, 0.005, caption, ha="right", fontsize=5, color="#777777")
        figure.tight_layout(rect=(0, 0.02, 0.84, 1))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    plot(json.loads(RESULTS.read_text()), PLOT)
