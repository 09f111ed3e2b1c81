"""The plot of docs/benchmarks/replicas.md, of what `simulate` has written down.

python -m benches.cluster.plots
"""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from benches.cluster.simulate import POLICIES, RESULTS
from benches.peers.plots import STYLE

OUT = Path(__file__).parents[2] / "docs" / "images" / "cluster.svg"
COLOURS = {"ours": "#d1495b", "exact": "#5b5f97"}


def main() -> None:
    """A row for each work, hit rates beside prompts that wait."""
    written = json.loads(RESULTS.read_text())
    works = {name: found for name, found in written.items() if " replicas" in name}
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(len(works), 2, figsize=(8, 1.9 * len(works)), squeeze=False)
        for (work, found), (hits, queued) in zip(works.items(), rows, strict=True):
            policies = [policy for policy in POLICIES if policy in found]
            colours = [COLOURS.get(policy, "#66afba") for policy in policies]
            hits.barh(
                policies, [100 * found[policy]["hit_rate"] for policy in policies], color=colours
            )
            hits.axvline(100 * found[policies[0]]["bound"], color="#444444", linestyle=":")
            hits.set_title(f"{work}: prompt tokens cached, %", loc="left", fontsize=9)
            waits = [found[policy]["queued_p99"] / 1000 for policy in policies]
            queued.barh(policies, waits, color=colours)
            queued.set_title("p99 of queued prompt tokens, thousands", loc="left", fontsize=9)
            queued.set_yticklabels([])
            for axes in (hits, queued):
                axes.invert_yaxis()
                axes.grid(axis="x", alpha=0.3)
        figure.tight_layout()
        figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
