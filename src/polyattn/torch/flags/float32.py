"""The state behind torch's float32-precision knobs, read and restored exactly.

Eleven pieces of state stand behind twelve names. Nine are precisions, by backend and kind of
operator: the general one, CUDA's and oneDNN's, and for both of these convolutions, recurrent
networks and matrix products; ``none`` inherits from the level above. The getters show what is in
force, not what is stored. The other two belong to the names from before torch 2.9
(``float32_matmul_precision``, ``cudnn.allow_tf32``): their setters overwrite the precisions too,
and their getters raise once both families were used.

Source: torch 2.9 to 2.13, ``aten/src/ATen/Context.{h,cpp}``; the tests try every combination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from polyattn.flags.cells import Cells
from polyattn.torch.flags.hushed import hushed
from polyattn.torch.internals import compiled_frames
from polyattn.torch.internals.switches import (
    cublas_tf32,
    cudnn_tf32,
    matmul_precision,
    set_cudnn_tf32,
    set_matmul_precision,
)
from polyattn.torch.internals.switches import fp32_precision as _get
from polyattn.torch.internals.switches import set_fp32_precision as _set

__all__ = [
    "CELLS", "CUDNN_BOOL", "INHERITS", "MATMUL_NAME", "Float32Cells",
    "cudnn_bool", "matmul_name", "plain_cudnn_bool", "put", "put_cudnn_bool",
]  # fmt: skip

_HAS_INITIAL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

MATMUL_NAME = "float32_matmul_precision"
CUDNN_BOOL = "cudnn.allow_tf32"
INHERITS = "inherits.cuda.matmul"
"""Whether CUDA's products inherit. Dynamo, compiling, stores for them what they had inherited."""

_INITIAL = "initial"
"""tf32 that yields to the levels above: what torch 2.13 starts with for cuDNN's two precisions.

Nothing can store it again: at::Context itself refuses ("DEFAULT precision is internal"). Whoever
sets one of the two, torch's own ``cudnn.flags()`` included, ends it. What is put back instead reads
the same: tf32, or none below a level that is set, and tf32 when that level is put back in turn.
"""

_stand_ins: set[str] = set()
"""The operators of cuDNN for which none is stored until the levels above are none again."""


class Float32Cells(Cells):
    """All eleven pieces, and whether CUDA's products inherit.

    What is stored below a level that is itself set can be told only by changing that level for a
    moment, always towards more precision. :meth:`read` does so if, and only if, the getters leave
    two possibilities; a snapshot never does.
    """

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Any:
        if name == MATMUL_NAME:
            return matmul_name()
        if name == CUDNN_BOOL:
            return cudnn_bool()
        if name == INHERITS:
            return _inheritance()
        return _stored(*name.split("."))

    def write(self, values: Mapping[str, Any]) -> None:
        """Set the old names first and then, over what their setters did, the precisions."""
        level = _get("cuda", "all")
        precisions = {name: value for name, value in values.items() if name not in _NO_PRECISION}
        if MATMUL_NAME in values and values[MATMUL_NAME] != matmul_name():
            self._keep(precisions, "cuda.matmul", "mkldnn.matmul")
            _quietly(set_matmul_precision, values[MATMUL_NAME])
        if CUDNN_BOOL in values and values[CUDNN_BOOL] != cudnn_bool():
            self._keep(precisions, "cuda.conv", "cuda.rnn")
            _quietly(set_cudnn_tf32, values[CUDNN_BOOL])
        for name, value in sorted(precisions.items(), key=_level_first):
            backend, operator = name.split(".")
            put(backend, operator, value)
        if INHERITS in values:
            _inherit_again(values[INHERITS], level)

    @staticmethod
    def _keep(precisions: dict[str, Any], *names: str) -> None:
        for name in names:
            if name not in precisions:
                backend, operator = name.split(".")
                precisions[name] = _stored(backend, operator)


def _quietly(function: Callable[..., Any], *values: Any) -> Any:
    """Call what torch 2.9 warns of once: that a name is old. Who used it is told by its knob."""
    with hushed():
        return function(*values)


CELLS = Float32Cells()
_NO_PRECISION = {MATMUL_NAME, CUDNN_BOOL, INHERITS}


def _inheritance() -> tuple[bool, int]:
    return _stored("cuda", "matmul") == "none", compiled_frames()


def _inherit_again(noted: tuple[bool, int], level: str) -> None:
    """Undo what Dynamo stored, if it compiled since and what is stored is what it found."""
    inherited, compilations = noted
    changed = level == _get("cuda", "matmul") != _get("cuda", "all")
    if inherited and changed and compilations != compiled_frames():
        _set("cuda", "matmul", "none")


def put(backend: str, operator: str, value: str) -> None:
    """Set one precision; what stands in for cuDNN's initial values ends with the levels above."""
    if backend == "cuda":
        _stand_ins.discard(operator)
    if value == _INITIAL:
        value = _stand_in(operator)
    if value:
        _set(backend, operator, value)
    if operator == "all" and _stand_ins and _get("cuda", "all") == _get("generic", "all") == "none":
        for kind in list(_stand_ins):
            if _get("cuda", kind) == "none":
                _set("cuda", kind, "tf32")
        _stand_ins.clear()


def _stand_in(operator: str) -> str:
    """What to store in place of the initial value; empty where that was never ended."""
    if _raw("cuda", operator) == _INITIAL:
        return ""
    if _get("cuda", "all") == _get("generic", "all") == "none":
        return "tf32"
    _stand_ins.add(operator)
    return "none"


def put_cudnn_bool(value: bool) -> None:
    """Set the old switch, unless that would only end the initial values."""
    if value and cudnn_bool() and {_get("cuda", "conv"), _get("cuda", "rnn")} == {"tf32"}:
        return
    _quietly(set_cudnn_tf32, value)
    _stand_ins.clear()


def _level_first(item: tuple[str, Any]) -> bool:
    """Sort the levels before what inherits from them."""
    return not item[0].endswith(".all")


def _stored(backend: str, operator: str) -> str:
    """What is stored for one backend and operator, not what is inherited."""
    raw = _raw(backend, operator)
    standing = backend == "cuda" and operator in _stand_ins and raw == "none"
    return _INITIAL if standing else raw


def _raw(backend: str, operator: str) -> str:
    seen = _get(backend, operator)
    if backend == "generic":
        return seen
    general = _get("generic", "all")
    above = general if operator == "all" else _get(backend, "all")
    yields = backend == "cuda" and operator in ("conv", "rnn") and _HAS_INITIAL
    if above == general == "none":
        return _told_by_probe(backend, operator) if yields and seen == "tf32" else seen
    if seen != above and not (seen == "none" and yields):
        return seen
    return _told_by_probe(backend, operator)


def _told_by_probe(backend: str, operator: str) -> str:
    """Tell by what shows through when the levels above are ieee, and when they are empty."""
    if operator == "all":
        with _level("generic", "none"):
            return _get(backend, "all")
    with _level(backend, "ieee"):
        seen = _get(backend, operator)
    if seen != "ieee":
        return seen
    with _level("generic", "none"), _level(backend, "none"):
        seen = _get(backend, operator)
    return _INITIAL if seen == "tf32" else seen


@contextmanager
def _level(backend: str, value: str) -> Iterator[None]:
    stored = _get("generic", "all") if backend == "generic" else _stored(backend, "all")
    try:
        _set(backend, "all", value)
        yield
    finally:
        _set(backend, "all", stored)


def matmul_name() -> str:
    """The old name's value, also where torch's getter raises because both families were used.

    It raises where CUDA's products are in tf32 though the name is ``highest``, where oneDNN's are
    in tf32 though it is not ``high``, and where those are in bfloat16 though it is not ``medium``.
    CUDA's own getter raises exactly where its products disagree with the name.
    """
    with suppress(RuntimeError):
        return _quietly(matmul_precision)
    try:
        highest = not _quietly(cublas_tf32)
    except RuntimeError:
        highest = _get("cuda", "matmul") == "tf32"
    if highest:
        return "highest"
    return "high" if _get("mkldnn", "matmul") == "bf16" else "medium"


def plain_cudnn_bool() -> bool:
    """The old switch, without changing anything; torch's RuntimeError where that cannot tell it.

    Torch's getter raises where the switch disagrees with one of the precisions. Where these agree
    with each other, that tells the switch.
    """
    try:
        return _quietly(cudnn_tf32)
    except RuntimeError:
        convolutions, recurrent = (_get("cuda", kind) == "tf32" for kind in ("conv", "rnn"))
        if convolutions != recurrent:
            raise
        return not convolutions


def cudnn_bool() -> bool:
    """The old switch; where nothing else tells it, both precisions are ieee for a moment."""
    with suppress(RuntimeError):
        return plain_cudnn_bool()
    stored = {operator: _stored("cuda", operator) for operator in ("conv", "rnn")}
    try:
        for operator in stored:
            _set("cuda", operator, "ieee")
        return _quietly(cudnn_tf32)
    except RuntimeError:  # it disagrees with the two, so it is on
        return True
    finally:
        for operator, value in stored.items():
            put("cuda", operator, value)
