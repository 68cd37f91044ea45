"""The picture of docs/how-a-call-flows.md shows what the code does: each arrow is an import."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "polyattn"
PAGE = (ROOT / "docs" / "how-a-call-flows.md").read_text(encoding="utf-8")
PICTURE = PAGE.split("```mermaid\n", 1)[1].split("```", 1)[0]
ARROW = re.compile(r'^ *([a-z_.]+)(?:\["[^"]*"\])? (-->|-\. declared in \.->) ([a-z_.]+)', re.M)
ARROWS = ARROW.findall(PICTURE)


def path_of(name):
    path = SOURCE / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports_of(name):
    """Yield each module that a module, or a folder's, imports, by its name below polyattn."""
    path = path_of(name)
    files = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polyattn"):
            module = node.module.removeprefix("polyattn").removeprefix(".")
            yield module
            yield from (f"{module}.{alias.name}".removeprefix(".") for alias in node.names)


def test_every_arrow_is_an_import():
    assert len(ARROWS) > 20
    for start, kind, end in ARROWS:
        assert path_of(end).exists(), end
        if kind == "-->":
            found = set(imports_of(start))
            assert end in found or (end == "problem.problem" and "problem" in found), (start, end)


def test_the_registry_names_where_backends_are_declared():
    assert [end for _, kind, end in ARROWS if kind != "-->"] == ["backends"]
    from polyattn.selection.registry import IN_TREE

    assert IN_TREE == ("polyattn.backends.discovery",)
