"""Fail where a module imports an upper part by its name, past the import contracts.

import-linter reads statements; ``importlib.import_module`` takes a text. So, in a file that calls
it, every text that names a module of polyattn is held to the layers of pyproject.toml: it names its
own part or a lower one, or the file also imports it in a statement (for types), which the contracts
then see, or it is listed below with the reason.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"

REASONS = {
    ("polyattn.selection.platforms", "polyattn.torch.api"): "a front registers its platform",
    ("polyattn.selection.platforms", "polyattn.jax.attend"): "a front registers its platform",
    ("polyattn.selection.registry", "polyattn.backends.discovery"): "kernels register themselves",
    ("polyattn.selection.registry", "polyattn.backends"): "the name of the group of entry points",
    ("polyattn.backends.declaring", "polyattn.torch.internals"): "a floor, as the contract says",
    ("polyattn.backends.declaring", "polyattn.jax.kit.devices"): "a floor, as the contract says",
    ("polyattn.cli.flags_table", "polyattn.*.flags"): "commands are above both frameworks' flags",
}


def ranks() -> dict[str, int]:
    """Return the place of each part of polyattn, the lowest layer first."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each.get("containers") == ["polyattn"])
    return {
        part.strip(" ()"): place
        for place, layer in enumerate(reversed(layers))
        for part in layer.replace("|", ":").split(":")
    }


def imported_by_text(tree: ast.Module) -> Iterator[str]:
    """Yield the names of polyattn's modules among the texts, a ``*`` for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values)
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if text.startswith("polyattn.") and all(
            part == "*" or part.isidentifier() for part in text.split(".")
        ):
            yield text


def stated(tree: ast.Module) -> set[str]:
    """Return the modules that statements import."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def calls_importlib(tree: ast.Module) -> bool:
    """Whether the file imports anything by its name."""
    return any(
        isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id)
        in ("import_module", "__import__")
        for node in ast.walk(tree)
    )


def main() -> int:
    """Check every Python file under src/."""
    places, found, used = ranks(), [], set()
    for path in sorted(SOURCES.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not module.startswith("polyattn.") or not calls_importlib(tree):
            continue
        own = module.split(".")[1]
        known = stated(tree)
        for text in imported_by_text(tree):
            part = text.split(".")[1]
            if part == own or part.startswith("_") or text in known:
                continue
            if (module, text) in REASONS:
                used.add((module, text))
            elif places.get(part, len(places)) >= places[own]:
                found.append(f"{module} imports {text} by its name, which is no lower part")
    found += [f"REASONS holds {pair}, which is not in use" for pair in REASONS.keys() - used]
    print("\n".join(found) or "no part is imported by its name that a statement could not import")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
