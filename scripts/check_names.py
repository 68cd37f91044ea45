"""Fail where a module's name says nothing, or is that of two others.

A name that three modules share has to be read with its whole path to mean anything. The names that
every kernel's folder has (``declared``, and one a framework) are its plan, and free.
"""

import sys
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "polyattn"
FREE = frozenset({"__init__", "__main__", "declared", "torch", "jax", "numpy"})
EMPTY = frozenset(
    {"common", "core", "helper", "helpers", "misc", "new", "old", "utils", "util", "v2"}
)
MOST = 2


def main() -> int:
    """Check the names of all modules and folders under src/."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        if path.stem not in FREE:
            places[path.stem].append(path.relative_to(SOURCES).as_posix())
    found = [
        f"{name}: {len(paths)} modules have this name ({', '.join(paths)}), at most {MOST}"
        for name, paths in places.items()
        if len(paths) > MOST
    ]
    found += [
        f"{paths[0]}: this name says nothing" for name, paths in places.items() if name in EMPTY
    ]
    print("\n".join(found) or f"{len(places)} names, each of {MOST} modules at most")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
