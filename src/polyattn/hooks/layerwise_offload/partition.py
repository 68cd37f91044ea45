"""Which modules of a model are units: its blocks first, and finer only where memory asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from polyattn.errors import OffloadError
from polyattn.torch.internals import children_of, own_parameters, unwrapped

__all__ = ["Candidate", "LEVELS", "candidates", "named"]

LEVELS = ("blocks", "blocks and what is outside them", "parts of blocks")
"""How finely a model may be cut, the coarsest first."""

_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""They read their children's weights themselves, without calling the children."""
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module that may be a unit, and its name in the model."""

    name: str
    module: nn.Module


def candidates(model: nn.Module, level: int) -> list[Candidate]:
    """Return the modules to move at a level of :data:`LEVELS`, in the order of the model.

    Blocks are the members of the outermost lists (``ModuleList``, ``Sequential``, ``ModuleDict``)
    of at least two modules with weights, wherever they are in the tree; experts, lists within a
    block whose members are only called when something is routed to them, are units of their own.
    """
    found = _each_once(_blocks(model, "", inside=level == 2))
    if level == 0:
        return found
    taken = {id(part) for each in found for part in each.module.modules()}
    wholes = [module for module in model.modules() if isinstance(module, _WHOLE)]
    inner = {id(part) for whole in wholes for part in whole.modules() if part is not whole}
    names = {each.name for each in found}
    outside = [
        Candidate(name, module)
        for name, module in model.named_modules()
        if id(module) not in taken
        and name not in names
        and name
        and _is_called(module)
        and id(module) not in inner
        and (_has_weights(module) if isinstance(module, _WHOLE) else _has_own(module))
        and not any(id(part) in taken for part in module.modules())
    ]
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted((*found, *outside), key=lambda each: places.get(each.name, 0))


def named(model: nn.Module, patterns: Sequence[str]) -> list[Candidate]:
    """Return the modules whose names match one of the patterns (regular expressions) wholly."""
    found: list[Candidate] = []
    for pattern in patterns:
        matched = [
            Candidate(name, module)
            for name, module in model.named_modules()
            if name and re.fullmatch(pattern, name)
        ]
        if not matched:
            raise OffloadError(
                f"got units={pattern!r}, which is the name of no module, expected a regular "
                f"expression for names such as {_examples(model)}"
            )
        found += matched
    return _each_once(found)


def _each_once(found: Iterable[Candidate]) -> list[Candidate]:
    """Return modules by their first names: one that is in two places is one."""
    first: dict[int, Candidate] = {}
    for each in found:
        first.setdefault(id(each.module), each)
    return list(first.values())


def _examples(model: nn.Module) -> str:
    names = [each.name for each in candidates(model, 0)] or [n for n, _ in model.named_modules()]
    return ", ".join(repr(name) for name in [n for n in names if n][:3])


def _blocks(module: nn.Module, path: str, *, inside: bool) -> Iterator[Candidate]:
    """Yield the blocks below a module; with `inside`, the parts of which blocks are made."""
    members = [(n, m) for n, m in children_of(module).items() if m is not None]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    weighty = {id(member) for _, member in members if _has_weights(member)}
    for name, member in members:
        where = f"{path}.{name}" if path else name
        if is_list and len(weighty) >= _FEWEST and _has_weights(member) and _is_called(member):
            parts = list(_parts(member, where)) if inside else list(_experts(member, where))
            yield from parts
            taken = {id(part) for each in parts for part in each.module.modules()}
            if _has_weights(member, but=taken) and not (inside and parts):
                yield Candidate(where, member)
        else:
            yield from _blocks(member, where, inside=inside)


def _parts(block: nn.Module, path: str) -> Iterator[Candidate]:
    """Yield what a block calls: lists within it member by member, else its children."""
    if isinstance(block, _WHOLE):
        return
    for name, child in children_of(block).items():
        if child is None or not _has_weights(child):
            continue
        where = f"{path}.{name}"
        if _is_called(child):
            yield Candidate(where, child)
        else:
            yield from _parts(child, where)


def _experts(block: nn.Module, path: str) -> Iterator[Candidate]:
    """Yield the members of lists of experts within a block."""
    for name, part in block.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(part, nn.ModuleList | nn.ModuleDict) and "expert" in last and len(part) > 1:
            for member, expert in children_of(part).items():
                if expert is not None and _is_called(expert) and _has_weights(expert):
                    yield Candidate(f"{path}.{name}.{member}", expert)


def _is_called(module: nn.Module) -> bool:
    """Whether the module itself can be called, so that its call says when it is needed."""
    return type(unwrapped(module)).forward is not nn.Module.forward


def _has_own(module: nn.Module) -> bool:
    return any(p is not None for p in own_parameters(module).values())


def _has_weights(module: nn.Module, but: frozenset[int] | set[int] = frozenset()) -> bool:
    return any(_has_own(part) for part in module.modules() if id(part) not in but)
