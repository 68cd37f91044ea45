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

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from polyattn.knobs.cells import Cells

__all__ = [
    "CELLS", "CUDNN_BOOL", "MATMUL_NAME", "Float32Cells", "cudnn_bool", "matmul_name",
    "plain_cudnn_bool",
]  # fmt: skip

_HAS_INITIAL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_get = torch._C._get_fp32_precision_getter
_set = torch._C._set_fp32_precision_setter

MATMUL_NAME = "float32_matmul_precision"
CUDNN_BOOL = "cudnn.allow_tf32"
_INITIAL = "initial"
"""tf32 that yields to the levels above: what torch 2.13 starts with for cuDNN's two precisions.

Nothing can store it again: at::Context itself refuses ("DEFAULT precision is internal"). Whoever
sets one of the two, torch's own ``cudnn.flags()`` included, ends it; what can be put back is a
value that reads the same.
"""


class Float32Cells(Cells):
    """All eleven pieces.

    What is stored below a level that is itself set can be told only by changing that level for a
    moment, always towards more precision. :meth:`read` does so if, and only if, the getters leave
    two possibilities; a snapshot never does.
    """

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> str | bool:
        if name == MATMUL_NAME:
            return matmul_name()
        if name == CUDNN_BOOL:
            return cudnn_bool()
        return _stored(*name.split("."))

    def write(self, values: Mapping[str, Any]) -> None:
        """Set the old names first and then, over what their setters did, the precisions."""
        precisions = {
            name: value for name, value in values.items() if "." in name and name != CUDNN_BOOL
        }
        if MATMUL_NAME in values and values[MATMUL_NAME] != matmul_name():
            self._keep(precisions, "cuda.matmul", "mkldnn.matmul")
            torch._C._set_float32_matmul_precision(values[MATMUL_NAME])
        if CUDNN_BOOL in values and values[CUDNN_BOOL] != cudnn_bool():
            self._keep(precisions, "cuda.conv", "cuda.rnn")
            torch._C._set_cudnn_allow_tf32(values[CUDNN_BOOL])
        for name, value in sorted(precisions.items(), key=_level_first):
            backend, operator = name.split(".")
            _store(backend, operator, value)

    @staticmethod
    def _keep(precisions: dict[str, Any], *names: str) -> None:
        for name in names:
            if name not in precisions:
                precisions[name] = _stored(*name.split("."))


CELLS = Float32Cells()


def _level_first(item: tuple[str, Any]) -> bool:
    """Sort the levels before what inherits from them."""
    return not item[0].endswith(".all")


def _stored(backend: str, operator: str) -> str:
    """What is stored for one backend and operator, not what is inherited."""
    seen = _get(backend, operator)
    if backend == "generic":
        return seen
    general = _get("generic", "all")
    above = general if operator == "all" else _get(backend, "all")
    if above == general == "none":
        return seen
    yields = backend == "cuda" and operator in ("conv", "rnn") and _HAS_INITIAL
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


def _store(backend: str, operator: str, value: str) -> None:
    if value == _INITIAL:
        value = "tf32" if _get(backend, "all") == _get("generic", "all") == "none" else "none"
    _set(backend, operator, value)


def matmul_name() -> str:
    """The old name's value, also where torch's getter raises because both families were used.

    It raises where CUDA's products are in tf32 though the name is ``highest``, where oneDNN's are
    in tf32 though it is not ``high``, and where those are in bfloat16 though it is not ``medium``.
    CUDA's own getter raises exactly where its products disagree with the name.
    """
    with suppress(RuntimeError):
        return torch._C._get_float32_matmul_precision()
    try:
        highest = not torch._C._get_cublas_allow_tf32()
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
        return torch._C._get_cudnn_allow_tf32()
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
        return torch._C._get_cudnn_allow_tf32()
    except RuntimeError:  # it disagrees with the two, so it is on
        return True
    finally:
        for operator, value in stored.items():
            _store("cuda", operator, value)
