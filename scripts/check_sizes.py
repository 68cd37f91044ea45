"""Fail when a file passes 400 lines or a Python function 40, whose docstring is not counted.

The files: Python under src/, and all C++ under native/, kernels and tests as well. In Python,
kernel bodies are exempt: a file in a folder named ``kernels``, a file named ``triton_*.py`` or
``pallas*.py``, or a name in EXEMPT, whose reason stands beside it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40

ROOT = Path(__file__).resolve().parent.parent
EXEMPT: frozenset[str] = frozenset()

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_exempt(path: Path) -> bool:
    """Whether the file holds kernel bodies."""
    return (
        path.parent.name == "kernels"
        or path.name.startswith(("triton_", "pallas"))
        or path.relative_to(ROOT).as_posix() in EXEMPT
    )


def body_lines(function: Function) -> int:
    """Lines from the end of the signature to the end of the body, without the docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    last = body[-1].end_lineno or body[-1].lineno
    return last - body[0].lineno + 1


def complaints(path: Path) -> Iterator[str]:
    """One line for each thing in the file that is too long."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}; make it a folder or move a concern"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text, name)):
        if isinstance(node, Function) and (length := body_lines(node)) > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{node.lineno}: {node.name} has {length} lines, "
                f"at most {MAX_FUNCTION_LINES}; split it"
            )


def main() -> int:
    """Check every Python file under src/ and every C++ file under native/."""
    files = [path for path in sorted((ROOT / "src").rglob("*.py")) if not is_exempt(path)]
    files += sorted(path for kind in ("*.h", "*.cpp") for path in (ROOT / "native").rglob(kind))
    found = [line for path in files for line in complaints(path)]
    print("\n".join(found) or f"{len(files)} files within the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
