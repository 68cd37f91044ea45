"""What is made from the schema of a trace's statistics: two C++ headers, and a table of the docs.

``python scripts/statistics_schema.py`` says whether they are up to date, ``--write`` makes them so.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from polyattn.trace.recorders.torch import native_protocol as protocol
from polyattn.trace.statistics import schema

ROOT = Path(__file__).resolve().parent.parent
FIELDS = "native/src/statistics/fields.h"
PROTOCOL = "native/src/trace_protocol.h"
PAGE = "docs/trace-format.md"
BEGIN = "<!-- statistics: made by scripts/statistics_schema.py --write -->"
END = "<!-- end of statistics -->"

MADE = "// Made by scripts/statistics_schema.py --write from src/polyattn/{}."
OF_ITS_OWN = {"n": "Count", "pinf": "PlusInf", "ninf": "MinusInf", "samples": "Sample"}


def constant(name: str) -> str:
    """Return a name as C++ writes that of a constant.

    >>> constant("abs_mean"), constant("n")
    ('kAbsMean', 'kCount')
    """
    return "k" + OF_ITS_OWN.get(name, "".join(part.capitalize() for part in name.split("_")))


def fields_header() -> str:
    """Return the header of a row: its places, sizes, and the kernel's elements."""
    fields = []
    for row in schema.SCHEMA:
        if row.width:
            fields += [f"  // {row.about}", f"  {constant(row.name)} = {schema.PLACES[row.name]},"]
    lines = [
        MADE.format("trace/statistics/schema.py"), "#pragma once", "", "#include <cstdint>", "",
        "namespace polyattn {", "",
        f"constexpr int kSamples = {schema.SAMPLED};",
        f"constexpr int kBuckets = {schema.BUCKETS};", "",
        "// The places in a row: float64, from kCounts on NaN where there is no value.",
        "enum Field : int {",
        *fields, "  // all of them", f"  kFields = {schema.WIDTH},", "};", "",
        "// The first so many are counts.", f"constexpr int kCounts = {len(schema.COUNTS)};", "",
        "// What a kernel reads.",
        "enum class Element : int32_t {",
        *(f"  {name} = {code}," for code, name in enumerate(schema.ELEMENTS.values())), "};",
        f"constexpr int kElements = {len(schema.ELEMENTS)};", "",
        "// A sketch whose largest bucket is from the one to below the other has no scale.",
        f"constexpr double kLeastPlain = 0x1p{math.log2(schema.LEAST_PLAIN):.0f};",
        f"constexpr double kMostPlain = 0x1p{math.log2(schema.MOST_PLAIN):.0f};", "",
        "// Latest tensors among which an identical one is looked for.",
        f"constexpr int kRemembered = {schema.REMEMBERED};", "",
        "// Places and codes as text, which Python compares with its own.",
        *text("kLayout", schema.LAYOUT), "", "}  // namespace polyattn", "",
    ]  # fmt: skip
    return "\n".join(lines)


def protocol_header() -> str:
    """Return the header of what native code reads: tuples by place, objects by attribute."""
    lines = [
        MADE.format("trace/recorders/torch/native_protocol.py"), "#pragma once", "",
        "#include <nanobind/nanobind.h>", "", "namespace polyattn {", "",
    ]  # fmt: skip
    for name, places in protocol.TUPLES.items():
        lines.append(f"namespace trace_{name} {{")
        for place, (one, about) in enumerate(places.items()):
            lines += [f"// {about}", f"constexpr int {constant(one)} = {place};"]
        lines += ["// all of them", f"constexpr int kPlaces = {len(places)};"]
        lines += [f"}}  // namespace trace_{name}", ""]
    lines += ["// Names of attributes, as Python's own texts; made once.", "struct Attributes {"]
    for name, attributes in protocol.ATTRIBUTES.items():
        for one, about in attributes.items():
            lines.append(f"  // {name}.{one}{': ' if about else ''}{about}")
            lines.append(f'  PyObject* {one.lstrip("_")} = PyUnicode_InternFromString("{one}");')
    lines += ["};", "", "// Places and names as text, which Python compares with its own."]
    lines += [*text("kTraceProtocol", protocol.PROTOCOL), "", "}  // namespace polyattn", ""]
    return "\n".join(lines)


def text(name: str, value: str) -> Iterator[str]:
    """Yield the lines of a C++ constant that is a long text."""
    yield f"constexpr char {name}[] ="
    parts, words = [""], value.split(" ")
    for word in words:
        if len(parts[-1]) + len(word) > 90:
            parts.append("")
        parts[-1] += word + " "
    parts[-1] = parts[-1].removesuffix(" ")
    for part in parts[:-1]:
        yield f'    "{part}"'
    yield f'    "{parts[-1]}";'


def table() -> str:
    """Return what holds for several statistics, and a row for each, in Markdown."""
    asked = [f"`{row.name}`" for row in schema.SCHEMA if not row.default]
    counts, moments = schema.COUNTS, schema.MOMENTS
    said = (
        f"`{counts[0]}` to `{counts[-1]}` are counts. `{moments[0]}` to `{moments[-1]}` are of the "
        "finite elements, in float64;\nnull where there are none. Recorded only where asked for by "
        f"name: {', '.join(asked)}."
    )
    lines = [said, "", "| name | what |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{row.name}` | {row.about} |" for row in schema.SCHEMA)])


def filled(page: str) -> str:
    """Return the page with the table between its marks."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"got {PAGE} without the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def made() -> dict[str, str]:
    """Return the files as they are to be, by their paths."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return {FIELDS: fields_header(), PROTOCOL: protocol_header(), PAGE: filled(page)}


def main() -> int:
    """Write the files, or say whether they are as they would be written."""
    stale = []
    for name, wanted in made().items():
        path = ROOT / name
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        if "--write" in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
        else:
            stale.append(name)
    if stale:
        print(f"{' and '.join(stale)}: run python scripts/statistics_schema.py --write")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
