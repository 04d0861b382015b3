"""Plots of latencies; matplotlib comes with the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from services.common.errors import StartError


def require() -> None:
    """Raises StartError where matplotlib is not installed: before a run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise StartError("--plot needs matplotlib, which is not installed: pip install 'triptych[bench]'") from error


def cumulative(file: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draws one panel a latency, in it one line a system: the share of values at or below x seconds.

    `panels` is panel title to line name to values in seconds; the file's ending chooses the format (.svg, .png).
    """
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
    figure.suptitle(title)
    for axes, (name, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for line, values in lines.items():
            if values:
                axes.ecdf(values, label=f"{line} ({len(values)})")
        axes.set(xlabel=f"{name}, s", ylabel="share at or below", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="lower right", fontsize="small")
    figure.savefig(file)
