"""Fail where a private name of torch stands outside of polyattn.torch.internals.

Found by the syntax tree, in src/ and examples/: imports and attributes of torch with a part that
begins with one underscore; attributes of that kind on anything else that polyattn does not define
itself (``tensor._version``, ``module._forward_hooks``); and strings that hold such a name.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from polyattn.torch.internals import ROWS, switches

ROOT = Path(__file__).resolve().parent.parent
HOME = "src/polyattn/torch/internals/"
PLACES = ("src/polyattn", "src/polyattn_pytest", "examples")

# Of Python's own library: named tuples, frames, the environment, argparse, ends, executors, locks.
STANDARD = frozenset({
    "_fields", "_replace", "_asdict", "_make", "_getframe", "_current_frames", "_data", "_actions",
    "_exit", "_threads_queues", "_at_fork_reinit",
})  # fmt: skip

# Files whose names have not been moved yet. This list only ever gets shorter.
PENDING: frozenset[str] = frozenset()

# Read in place, by the object that internals gives out: (the object there, the name).
IN_PLACE = frozenset({("dual_levels", "_current_level")})

_PATH = re.compile(r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*")


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def known_names() -> frozenset[str]:
    """The private names of torch that polyattn.torch.internals declares."""
    assert switches.ABSENT == ""  # its rows are declared when it is imported
    parts = (part for path in ROWS for part in path.split("."))
    return frozenset(part for part in parts if is_private(part))


def own_names(trees: dict[str, ast.Module]) -> frozenset[str]:
    """Names with an underscore that the checked code defines itself."""
    found: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(filter(is_private, found))


def of_plain_classes(tree: ast.Module) -> set[int]:
    """The ids of ``self._name`` in classes without bases, of names that these give themselves."""
    found: set[int] = set()
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef) and not kind.bases:
            inside = [node for node in ast.walk(kind) if _is_of_self(node)]
            given = {node.attr for node in inside if isinstance(node.ctx, ast.Store)}
            found |= {id(node) for node in inside if node.attr in given}
    return found


def _is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def torch_names(tree: ast.Module) -> dict[str, str]:
    """What names of a file stand for torch or a part of it."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of the strings that stand for themselves: documentation."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def complaints(tree: ast.Module, known: frozenset[str], own: frozenset[str]) -> Iterator[str]:
    """One line, beginning with its number, for each private name of torch in a file."""
    said, of_torch, plain = docstrings(tree), torch_names(tree), of_plain_classes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported(node):
                if name.split(".")[0] == "torch" and any(map(is_private, name.split("."))):
                    yield f"{node.lineno}: imports {name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if id(node) in plain or (getattr(node.value, "id", ""), node.attr) in IN_PLACE:
                continue
            path = _path(node, of_torch)
            if path is not None:
                yield f"{node.lineno}: {path}"
            elif node.attr in known or node.attr not in own | STANDARD:
                yield f"{node.lineno}: ....{node.attr}"
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
        ):
            hit = _PATH.search(node.value)
            if hit or (node.value in known and node.value not in own):
                yield f"{node.lineno}: the string {hit[0] if hit else node.value!r}"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []


def _path(node: ast.Attribute, of_torch: dict[str, str]) -> str | None:
    """The dotted path of an attribute of torch, None for one of anything else."""
    parts, inner = [node.attr], node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name) or inner.id not in of_torch:
        return None
    return ".".join([of_torch[inner.id], *reversed(parts)])


def main() -> int:
    """Check every Python file in the places."""
    files = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in files
    }
    trees = {name: tree for name, tree in trees.items() if not name.startswith(HOME)}
    known, own = known_names(), own_names(trees)
    found = {name: list(complaints(tree, known, own)) for name, tree in trees.items()}
    wrong = [f"{name}:{line}" for name in found if name not in PENDING for line in found[name]]
    wrong += [f"{name}: take it off PENDING" for name in sorted(PENDING) if not found.get(name)]
    print("\n".join(wrong) or f"{len(ROWS)} private names of torch, all in {HOME}")
    if wrong:
        print(f"\nPrivate names of torch belong in {HOME}, each with what is done without it.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
