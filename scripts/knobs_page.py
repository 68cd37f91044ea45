"""The tables of docs/knobs.md: what is known of every knob, the same on every machine.

``python scripts/knobs_page.py`` says whether they are up to date, ``--write`` makes them so, for
the frameworks that are installed or for those that are named (``torch``, ``jax``).
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from polyattn.flags import Knob

PAGE = Path(__file__).resolve().parent.parent / "docs" / "knobs.md"
BEGIN = "<!-- {}: made by scripts/knobs_page.py --write -->"
END = "<!-- end of {} -->"

# Facts that are not the same with every torch: this attribute can be frozen in newer ones only.
NOT_FROZEN_EVERYWHERE = frozenset({"cudnn.rnn.fp32_precision"})
LANGUAGES = ("python_native.triton.", "python_native.cutedsl.")  # a build may know more


def torch_part() -> str:
    """Return the chapters of torch: the groups of names, the environment, the functions."""
    from polyattn.torch.flags import table

    knobs = list(of_every_machine(row.knob for row in table()))
    settings = [knob for knob in knobs if knob.kind != "function"]
    parts = [section(group or "Without a dot", rows) for group, rows in grouped(settings).items()]
    functions = [knob for knob in knobs if knob.kind == "function"]
    lines = ["### Functions", "", "They have no value; the table names what stands for them here."]
    lines += ["", "| function | what it does | instead |", "|---|---|---|"]
    lines += [
        f"| `{knob.name}` | {prose(knob.about)} | {prose(instead(knob))} |" for knob in functions
    ]
    return "\n\n".join([*parts, "\n".join(lines)])


def jax_part() -> str:
    """Return the chapters of JAX."""
    from polyattn.jax.flags.checks import CHECKS
    from polyattn.jax.flags.execution import EXECUTION
    from polyattn.jax.flags.results import RESULTS
    from polyattn.jax.flags.surroundings import QUERIES, VARIABLES

    chapters = {
        "What changes results": RESULTS, "Where and how fast programs run": EXECUTION,
        "Checks": CHECKS, "Environment": VARIABLES, "The installation": QUERIES,
    }  # fmt: skip
    return "\n\n".join(section(title, list(knobs)) for title, knobs in chapters.items())


PARTS: dict[str, Callable[[], str]] = {"torch": torch_part, "jax": jax_part}


def of_every_machine(knobs: Iterable[Knob]) -> Iterator[Knob]:
    """Yield one knob for those that exist once a device, and none that only some builds list."""
    seen = set()
    for knob in knobs:
        name = re.sub(r"\[\d+\]", "[i]", knob.name)
        if name != knob.name:
            about = re.sub(r"device \d+", "device i", knob.about)
            where = re.sub(r"\[\d+\]", "[i]", knob.where)
            knob = replace(knob, name=name, about=about, where=where, aliases=())
        part = name.startswith("python_native.") and name.count(".") > 1
        extra = part and not name.startswith(LANGUAGES)
        if name not in seen and not extra:
            seen.add(name)
            yield knob


def grouped(knobs: Iterable[Knob]) -> dict[str, list[Knob]]:
    """Sort knobs by the first part of their names, those of one part first."""
    found: dict[str, list[Knob]] = {"": []}
    for knob in knobs:
        first, dot, _ = knob.name.partition(".")
        found.setdefault(first if dot else "", []).append(knob)
    return found


def section(title: str, knobs: list[Knob]) -> str:
    """Return a heading, the table, and the traps below it."""
    lines = [f"### {title}", "", "| knob | values | scope | what it does |", "|---|---|---|---|"]
    lines += [f"| `{k.name}` | {values(k)} | {k.scope} | {' '.join(facts(k))} |" for k in knobs]
    traps: dict[str, list[str]] = {}
    for knob in knobs:
        if knob.trap:
            traps.setdefault(knob.trap, []).append(f"`{knob.name}`")
    if traps:
        lines += ["", "Traps:", ""]
        lines += [f"- {', '.join(names)}: {prose(trap)}" for trap, names in traps.items()]
    return "\n".join(lines)


def values(knob: Knob) -> str:
    """Return what the knob can be."""
    if knob.kind == "query":
        return f"{knob.type}, read only"
    if isinstance(knob.allowed, tuple) and knob.allowed:
        return ", ".join(f"`{value}`" for value in knob.allowed)
    least = "" if knob.low is None else f", {knob.low} or more"
    return prose(f"{knob.type}{least}" + (f": {knob.allowed}" if knob.allowed else ""))


def facts(knob: Knob) -> Iterator[str]:
    """Yield sentences: what it does and all that is known besides."""
    yield prose(knob.about)
    if knob.where not in (f"torch.backends.{knob.name}", f"jax.config.{knob.name}"):
        yield f"In {home(knob)}: `{escaped(knob.where)}`."
    if knob.since:
        yield f"Since {knob.since}."
    if knob.builds:
        yield prose(f"Needs {knob.builds}.")
    if knob.couples:
        yield f"Changes with it: {', '.join(f'`{name}`' for name in knob.couples)}."
    if knob.freezes and knob.name not in NOT_FROZEN_EVERYWHERE:
        yield "Can be frozen."
    if knob.deprecated:
        yield prose(f"Deprecated: {knob.deprecated}.")
    if instead(knob):
        yield prose(f"Instead: {instead(knob)}.")
    if knob.aliases:
        yield f"Also called {', '.join(f'`{name}`' for name in knob.aliases)}."


def instead(knob: Knob) -> str:
    """Return what replaced it; nothing for what stands for itself."""
    return "" if knob.replaced_by == "itself" else knob.replaced_by


def home(knob: Knob) -> str:
    """Return who has the name that `where` gives."""
    return {"torch": "torch", "jax": "JAX"}.get(knob.where.partition(".")[0], "the system")


NAMES = re.compile(r"(?:[\w*]+\.)*[\w*]*_[\w*]*(?:\.[\w*]+)*(?:\(\.\.\.\))?")


def prose(text: str) -> str:
    """Write names with an underscore as code, and escape what Markdown would take for markup."""
    parts = escaped(text).split("`")
    parts[1::2] = [f"`{code}`" for code in parts[1::2]]
    parts[::2] = [NAMES.sub(r"`\g<0>`", plain) for plain in parts[::2]]
    return re.sub(
        r"`[^`]*`|[*<\[\]]",
        lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}",
        "".join(parts),
    )


def escaped(text: str) -> str:
    """Escape what would end a cell."""
    return text.replace("|", "\\|")


def filled(page: str, framework: str) -> str:
    """Return the page with the framework's part between its marks."""
    begin, end = BEGIN.format(framework), END.format(framework)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"got {PAGE.name} without the marks {begin} and {end}")
    return f"{before}{begin}\n\n{PARTS[framework]()}\n\n{end}{after}"


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is as it would be written."""
    named = [name for name in arguments if name in PARTS]
    wrong = [name for name in arguments if name not in (*PARTS, "--write")]
    if wrong:
        raise SystemExit(f"got {wrong[0]!r}, expected --write or one of {', '.join(PARTS)}")
    page = made = PAGE.read_text(encoding="utf-8")
    for framework in named or PARTS:
        if named or importlib.util.find_spec(framework) is not None:
            made = filled(made, framework)
        else:
            print(f"{framework} is not installed: its part is left as it is")
    if "--write" in arguments:
        PAGE.write_text(made, encoding="utf-8")
    elif made != page:
        print(f"docs/{PAGE.name}: run python scripts/knobs_page.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
