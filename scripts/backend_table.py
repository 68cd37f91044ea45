"""The table of backends in README.md, made from what the backends declare.

``python scripts/backend_table.py`` prints it, ``--write`` puts it between the marks in README.md.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from polyattn.capabilities import ALL_MASKS, Capabilities
from polyattn.registry import Backend, Registry, registry

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- backends: made by scripts/backend_table.py --write -->"
END = "<!-- end of backends -->"

FEATURES = {
    "softcap": "soft cap", "sinks": "sinks", "dropout": "dropout", "gqa": "GQA",
    "value_dim": "value dim other than head dim", "lse": "lse", "backward": "backward",
    "bias_grad": "bias gradient", "compiled": "`torch.compile`",
}  # fmt: skip
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def table(backends: Registry) -> str:
    """Return the table in Markdown, one row for each backend and device it declares."""
    lines = ["| backend | device | dtypes | refuses | what it is |", "|---|---|---|---|---|"]
    for backend in backends:
        if backend.name in IN_TREE:
            lines += [f"| {' | '.join(row)} |" for row in rows(backend)]
    return "\n".join(lines)


IN_TREE = frozenset(
    {"sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "flex", "reference"}
)


def rows(backend: Backend) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a backend's rows."""
    declared = backend.capabilities
    for can in declared if isinstance(declared, tuple) else (declared,):
        yield (
            f"`{backend.name}`", ", ".join(sorted(can.devices)), dtypes(can), refusals(can),
            backend.summary,
        )  # fmt: skip


def dtypes(can: Capabilities) -> str:
    """Return the dtypes, short."""
    return ", ".join(short for name, short in SHORT.items() if name in can.dtypes)


def refusals(can: Capabilities) -> str:
    """Return what the declaration does not allow."""
    found = [text for name, text in FEATURES.items() if not getattr(can, name)]
    if lacking := ALL_MASKS - set(can.masks) - {"Full"}:
        known = ", ".join(f"`{name}`" for name in sorted(can.masks))
        found.insert(0, f"masks but {known}" if len(lacking) > 3 else ", ".join(sorted(lacking)))
    if not can.biases:
        found.insert(1, "biases")
    return ", ".join(found) or "nothing"


def main() -> int:
    """Print the table, or write it into README.md."""
    made = table(registry)
    if "--write" not in sys.argv[1:]:
        print(made)
        return 0
    page = ROOT / "README.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"got {page} without the marks {BEGIN} and {END}", file=sys.stderr)
        return 1
    page.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
