"""The picture: what a call costs beyond the function itself, over the bytes that go there and back. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire_wire.errors import UsageError

__all__ = ["check", "draw"]


def check() -> None:
    """UsageError where there is no matplotlib: before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed here: pip install matplotlib")


def draw(results: Mapping[str, Any], prefix: str) -> list[Path]:
    """Write PREFIX.png and PREFIX.svg, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = {f"{caller} caller": figures.get("sizes", {}) for caller, figures in results["callers"].items()}
    for name, sizes in lines.items():
        if sizes:
            axes.plot(
                [int(n) for n in sizes],
                [f["p50_us"] for f in sizes.values()],
                marker="o",
                markersize=3,
                label=name,
            )
    piped = results["pipe"].get("sizes", {})
    if piped:
        ys = [f["p50_us"] for f in piped.values()]
        axes.plot([int(n) for n in piped], ys, linestyle="--", color="black", label="pickle over a pipe")
    m, worker = results["machine"], results["worker"]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes there, and as many back",
        ylabel="µs of a call of the identity, median",
        title=f"{worker.get('framework')} worker · {m['processor']}, {m['processors']} processors · {m['date'][:10]}",
    )
    axes.title.set_fontsize(9)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    made = [Path(f"{prefix}.png"), Path(f"{prefix}.svg")]
    figure.savefig(made[0], dpi=110)
    figure.savefig(made[1], metadata={"Date": None})
    return made
