"""Attention over a video whose tokens see their neighbours in space and time only.

The tokens of a video, tile by tile of frames, rows and columns, attend the tiles around their own:
a block map, which is the one contract between what chooses blocks and the kernels that visit them.
Dense attention computes all of it; here nine tenths are skipped, and the result is that of the same
mask in float64. Source of the tiles: *Fast Video Generation with Sliding Tile Attention* (arXiv
2502.04507).

    python examples/video_attention.py --plot map.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

TILE = (2, 4, 8)  # frames, rows and columns of a tile: 64 tokens, one after another
NEAR = (1, 1, 1)  # tiles that are seen on each side


def block_map(tiles: tuple[int, int, int]) -> Any:
    """Return the map for a video of so many tiles along time, height and width."""
    from polyattn import BlockMap

    places = list(product(*map(range, tiles)))
    number = {place: n for n, place in enumerate(places)}
    rows = []
    for place in places:
        near = product(*(range(x - d, x + d + 1) for x, d in zip(place, NEAR, strict=True)))
        rows.append([number[one] for one in near if one in number])
    most = max(map(len, rows))
    indices = [row + [0] * (most - len(row)) for row in rows]
    tokens = TILE[0] * TILE[1] * TILE[2]
    return BlockMap(tokens, tokens, [[indices]], [[[len(row) for row in rows]]])


def timed(call: Callable[[], Any], rounds: int = 3) -> float:
    """Return the median seconds of a call, after one that warms up."""
    call()
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def run(tiles: tuple[int, int, int], heads: int, seed: int) -> dict[str, Any]:
    """Do it all; return what is printed."""
    import torch

    from polyattn.torch import attention, explain

    torch.manual_seed(seed)
    near = block_map(tiles)
    blocks = tiles[0] * tiles[1] * tiles[2]
    tokens = blocks * TILE[0] * TILE[1] * TILE[2]
    q, k, v = torch.randn(3, 1, tokens, heads, 64)
    sparse = attention(q, k, v, mask=near)
    few = slice(0, 1)  # of the heads: the definition in float64 is slow
    truth = attention(*(x[:, :, few].double() for x in (q, k, v)), mask=near, backend="reference")
    chosen = explain(q, k, v, mask=near)
    return {
        "tokens": tokens,
        "density": sum(near.counts[0][0]) / blocks**2,
        "backend": chosen.backend,
        "reason": chosen.reason,
        "error": float((sparse[:, :, few].double() - truth).abs().max()),
        "dense_s": timed(lambda: torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)))),
        "sparse_s": timed(lambda: attention(q, k, v, mask=near)),
    }  # fmt: skip


def draw(tiles: tuple[int, int, int], file: str) -> None:
    """Draw which blocks of keys each block of queries visits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    near = block_map(tiles)
    blocks = len(near.counts[0][0])
    seen = np.zeros((blocks, blocks))
    for row, (indices, count) in enumerate(zip(near.indices[0][0], near.counts[0][0], strict=True)):
        seen[row, list(indices[:count])] = 1
    figure, axes = plt.subplots(figsize=(5, 5))
    axes.imshow(seen, cmap="Greys", interpolation="nearest")
    axes.set(xlabel="block of keys", ylabel="block of queries", title="what is visited")
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> int:
    """Parse, run, print; 0 when the result is that of the definition, 1 if not."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--tiles", type=int, nargs=3, default=(6, 6, 4), metavar=("T", "H", "W"))
    made.add_argument("--heads", type=int, default=4)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--plot", metavar="FILE.png", help="draw the map (needs matplotlib)")
    made.add_argument("--json", action="store_true")
    options = made.parse_args()
    found = run(tuple(options.tiles), options.heads, options.seed)
    if options.plot:
        draw(tuple(options.tiles), options.plot)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{found['tokens']} tokens, {found['density']:.0%} of the blocks are visited")
        print(f"on {found['backend']}: {found['reason']}")
        print(
            f"dense by torch {found['dense_s']:.3f} s, near tiles {found['sparse_s']:.3f} s: "
            f"{found['dense_s'] / found['sparse_s']:.1f} x as fast"
        )
        print(f"largest difference from the same mask in float64: {found['error']:.1e}")
    return 0 if found["error"] < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
