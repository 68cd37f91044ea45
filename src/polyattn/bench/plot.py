"""Records as pictures: the overhead table, the CPU kernel's ratios, and the bugs that are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyattn.errors import MissingDependency

__all__ = ["draw", "draw_named", "draw_ratios"]

LARGEST_US = 100.0


def draw(record: Mapping[str, Any], path: Path) -> Path:
    """Draw the extra time of each row with its quartiles and goal, and write it to `path`."""
    pyplot = _pyplot()
    measured = [row for row in reversed(record["rows"]) if row.get("extra_us")]
    # a row that costs a hundred times the goal would make all others one line
    rows = [row for row in measured if row["extra_us"]["median"] < LARGEST_US]
    medians = [row["extra_us"]["median"] for row in rows]
    spread = [
        [max(0.0, row["extra_us"]["median"] - row["extra_us"]["q1"]) for row in rows],
        [max(0.0, row["extra_us"]["q3"] - row["extra_us"]["median"]) for row in rows],
    ]
    colors = ["#2a6f97" if row["ours"] else "#adb5bd" for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(rows) + 1.6))
    axes.barh(range(len(rows)), medians, xerr=spread, color=colors, ecolor="#333333", capsize=2)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    for place, row in enumerate(rows):
        median, high = row["extra_us"]["median"], row["extra_us"]["q3"]
        axes.annotate(
            f"{median:.2f}", (max(median, high), place), (6, -3), textcoords="offset points"
        )
        if row["goal_us"] is not None:
            axes.plot([row["goal_us"]] * 2, [place - 0.4, place + 0.4], color="#d00000", lw=2)
    axes.set_xlabel("extra time over the kernel call, us (median, quartiles; red: goal)")
    axes.set_title(f"{record['shape']}, {record['machine']['cpu']}, {record['date'][:10]}")
    return _saved(figure, axes, path)


def draw_ratios(record: Mapping[str, Any], path: Path) -> Path:
    """Draw how many times faster than torch each case is, with its goal, on a log scale."""
    pyplot = _pyplot()
    rows = list(reversed(record["rows"]))
    ratios = [row["ratio"] for row in rows]
    medians = [ratio["median"] for ratio in ratios]
    spread = [
        [max(0.0, ratio["median"] - ratio["min"]) for ratio in ratios],
        [max(0.0, ratio["max"] - ratio["median"]) for ratio in ratios],
    ]
    left = 0.5 * min(1.0, *(ratio["min"] for ratio in ratios))
    figure, axes = pyplot.subplots(figsize=(9, 0.36 * len(rows) + 1.6))
    axes.barh(
        range(len(rows)),
        [median - left for median in medians],
        left=left,
        xerr=spread,
        color="#2a6f97",
        ecolor="#333333",
        capsize=2,
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(pyplot.matplotlib.ticker.NullLocator())
    axes.axvline(1.0, color="#868e96", lw=1)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    for place, row in enumerate(rows):
        high = max(row["ratio"]["max"], row["goal"] or 0.0)
        axes.annotate(f"{medians[place]:.3g}", (high, place), (6, -3), textcoords="offset points")
        if row["goal"] is not None:
            axes.plot([row["goal"]] * 2, [place - 0.4, place + 0.4], color="#d00000", lw=2)
    axes.set_xlabel("times faster than torch SDPA (median, min..max; red: goal)")
    axes.set_title(
        f"{record['backend']}, {record['threads']} threads, {record['machine']['cpu']}, "
        f"{record['date'][:10]}"
    )
    return _saved(figure, axes, path)


def draw_named(record: Mapping[str, Any], path: Path) -> Path:
    """Draw the share of each kind of bug whose culprit is named exactly, by dtype."""
    pyplot = _pyplot()
    rows = [row for row in record["rows"] if row.get("counted")]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    shares: dict[str, list[float]] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of = [
            [r["outcome"] == "exact" for r in rows if (r["kind"], r["dtype"]) == (kind, dtype)]
            for dtype in dtypes
        ]
        shares[kind] = [sum(one) / len(one) if one else 0.0 for one in of]
    kinds = sorted(shares, key=lambda kind: shares[kind], reverse=True)
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(kinds) + 1.6))
    height = 0.8 / len(dtypes)
    for at, dtype in enumerate(dtypes):
        places = [place + (at - (len(dtypes) - 1) / 2) * height for place in range(len(kinds))]
        axes.barh(
            places,
            [shares[kind][at] for kind in kinds],
            height,
            label=dtype,
            color=("#2a6f97", "#adb5bd")[at % 2],
        )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the seeded bugs whose culprit is named exactly")
    axes.legend(loc="lower left")
    axes.set_title(f"{len(rows)} bugs, {record['date'][:10]}")
    return _saved(figure, axes, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency(
            "got --plot without matplotlib, expected it installed: pip install 'polyattn[bench]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _saved(figure: Any, axes: Any, path: Path) -> Path:
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)
    return path
