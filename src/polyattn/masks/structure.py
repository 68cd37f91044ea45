"""What a mask or bias is made of, asked of a value instead of its printed form.

The printed form (``signature``) is what people read, keys hold and compiled code has as a constant;
it leaves the contents of arrays out. Here is the one parser of it. Who needs to know whether there
is a window, or how wide it is, asks the structure.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from polyattn.masks import STATIC_KINDS

__all__ = ["Structure", "is_of_ranges", "structure_of", "with_sizes"]

_SIZES = re.compile(r"\b\d+(?:x\d+)+\b")
_LEAF = re.compile(r"(\w+)\([^()]*\)")
_ALL_SIZES = re.compile(r"\d+(?:x\d+)+|(?<==)\d+(?=[,)])")
_JOINED = {ast.BitAnd: "And", ast.BitOr: "Or"}


class Structure(NamedTuple):
    """A mask or bias: its class, what is in the brackets, and the masks that it is made of.

    In `arguments` and `named` are numbers, names (of alignments and dtypes) and the sizes of
    arrays: a tuple, or a number where there is one dim.

    >>> causal, window = structure_of("Causal('top_left') & Window(left=3, right=None)").parts
    >>> causal.arguments, window.named["left"]
    (('top_left',), 3)
    """

    kind: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = {}  # noqa: RUF012 - the default of a tuple's field, never written to
    parts: tuple[Structure, ...] = ()

    def leaves(self) -> Iterator[Structure]:
        """Yield what is no And, Or or Not, in the printed order."""
        if self.parts:
            for part in self.parts:
                yield from part.leaves()
        else:
            yield self

    def of(self, kind: str) -> list[Structure]:
        """Return the leaves of one class."""
        return [leaf for leaf in self.leaves() if leaf.kind == kind]


def is_of_ranges(mask: Structure) -> bool:
    """Say whether a mask leaves each batch entry one range of keys: padding, causal or not.

    >>> texts = "Padding(q=None, kv=2)", "Causal() & Padding(q=2, kv=2)", "Causal()"
    >>> [is_of_ranges(structure_of(text)) for text in texts]
    [True, True, False]
    """
    kinds = {part.kind for part in (mask.parts if mask.kind == "And" else (mask,))}
    return kinds <= {"Padding", "LeftPadding", "Causal"} and kinds != {"Causal"}


@functools.lru_cache(maxsize=4096)
def structure_of(signature: str) -> Structure:
    """Read a signature of a mask or bias; ValueError for text that is none.

    >>> structure_of("DenseBias(1x8x128x128, float32)").arguments
    ((1, 8, 128, 128), 'float32')
    """
    quoted = _SIZES.sub(lambda sizes: repr(sizes.group()), signature)
    quoted = quoted.replace("(, ", "((), ")  # the sizes of an array without dims
    try:
        return _structure(ast.parse(quoted, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"got {signature!r}, expected the signature of a mask or bias") from error


def _structure(node: ast.expr) -> Structure:
    if isinstance(node, ast.BinOp) and (kind := _JOINED.get(type(node.op))) is not None:
        left, right = _structure(node.left), _structure(node.right)
        first = left.parts if left.kind == kind else (left,)
        return Structure(kind, parts=(*first, right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return Structure("Not", parts=(_structure(node.operand),))
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(ast.unparse(node))
    named = {str(word.arg): _value(word.value) for word in node.keywords}
    return Structure(node.func.id, tuple(map(_value, node.args)), named)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    value = ast.literal_eval(node)
    if isinstance(value, str) and _SIZES.fullmatch(value):
        return tuple(map(int, value.split("x")))
    return value


def with_sizes(signature: str, change: Callable[[str], str]) -> str:
    """Return a signature with each array's sizes, such as ``4x128``, replaced.

    >>> with_sizes("Padding(q=None, kv=8) | Dense(1x1x4x9)", lambda sizes: sizes.replace("x", "*"))
    'Padding(q=None, kv=8) | Dense(1*1*4*9)'
    """

    def leaf(found: re.Match[str]) -> str:
        if found[1] in STATIC_KINDS:  # whose numbers are no sizes
            return found[0]
        return _ALL_SIZES.sub(lambda sizes: change(sizes.group()), found[0])

    return _LEAF.sub(leaf, signature)
