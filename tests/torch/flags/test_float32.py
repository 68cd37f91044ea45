"""The state behind the float32-precision knobs is read and restored exactly, whatever it is."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn.torch.flags import flags, snapshot
from polyattn.torch.flags.float32 import CELLS, CUDNN_BOOL, MATMUL_NAME
from tests.torch.flags.flag_programs import FLOAT32, kept

GET, SET = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
LEVELS = [name for name in FLOAT32 if name not in (MATMUL_NAME, CUDNN_BOOL)]
CUDA, ONEDNN = ("none", "ieee", "tf32"), ("none", "ieee", "tf32", "bf16")
NAMES = ("highest", "high", "medium")
REST = {MATMUL_NAME: "highest", CUDNN_BOOL: True, **dict.fromkeys(LEVELS, "none")}

State = dict[str, Any]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    with kept():
        yield


def store(state: State) -> None:
    """Make a state from nothing, without the code that is tested."""
    torch._C._set_float32_matmul_precision(state[MATMUL_NAME])
    torch._C._set_cudnn_allow_tf32(state[CUDNN_BOOL])
    for name in LEVELS:
        SET(*name.split("."), state[name])


def same(found: State, state: State) -> bool:
    """Torch 2.13's first value cannot be stored; scopes put tf32 or none there, and go on
    calling it by its name."""
    return all(
        value == state[name] or (value == "initial" and state[name] in ("tf32", "none"))
        for name, value in found.items()
    )


def view() -> tuple[Any, ...]:
    """What torch's getters say; the old ones may raise."""
    old = (
        torch._C._get_float32_matmul_precision,
        torch._C._get_cublas_allow_tf32,
        torch._C._get_cudnn_allow_tf32,
    )
    return tuple(GET(*name.split(".")) for name in LEVELS) + tuple(map(said, old))


def said(getter: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getter()
    except RuntimeError:
        return "raises"


def among(**choices: tuple[Any, ...]) -> Iterable[State]:
    """All combinations of some cells' values, the others at rest."""
    cells = {CELL.get(name, name.replace("_", ".")): values for name, values in choices.items()}
    for values in itertools.product(*cells.values()):
        yield REST | dict(zip(cells, values, strict=True))


CELL = {"name": MATMUL_NAME, "switch": CUDNN_BOOL}
FAMILIES = {
    "matmul": lambda: among(
        name=NAMES, generic_all=ONEDNN, cuda_all=CUDA, cuda_matmul=CUDA, mkldnn_matmul=ONEDNN
    ),
    "cudnn": lambda: among(
        switch=(True, False), generic_all=ONEDNN, cuda_all=CUDA, cuda_conv=CUDA, cuda_rnn=CUDA
    ),
    "onednn": lambda: among(
        generic_all=ONEDNN, mkldnn_all=ONEDNN, mkldnn_matmul=ONEDNN, mkldnn_conv=ONEDNN, name=NAMES
    ),
    "rnn": lambda: among(generic_all=ONEDNN, mkldnn_all=ONEDNN, mkldnn_rnn=ONEDNN),
}


def anything(chance: random.Random) -> State:
    state: State = {
        name: chance.choice(CUDA if name.startswith("cuda") else ONEDNN) for name in LEVELS
    }
    for level in ("generic.all", "cuda.all", "mkldnn.all"):
        if chance.random() < 0.5:
            state[level] = "none"
    return state | {MATMUL_NAME: chance.choice(NAMES), CUDNN_BOOL: chance.random() < 0.5}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_state_of_a_family_is_read_exactly_and_reading_changes_nothing(family: str) -> None:
    for state in FAMILIES[family]():
        store(state)
        seen = view()
        assert same(CELLS.read(FLOAT32), state)
        assert view() == seen
        for name in state:  # alone as well: each may have to be told by a probe
            assert same(CELLS.read([name]), state)
        assert view() == seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_state_of_a_family_is_restored_exactly_from_any_other(family: str) -> None:
    chance = random.Random(family)
    states = list(FAMILIES[family]())
    for state in states:
        store(state)
        seen = view()
        store(chance.choice(states))
        CELLS.write(state)
        assert same(CELLS.read(FLOAT32), state)
        assert view() == seen


@pytest.mark.parametrize("seed", range(4))
def test_random_states_are_read_and_restored_exactly(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(1000):
        state = anything(chance)
        store(state)
        seen = view()
        snapshot()
        assert view() == seen
        assert same(CELLS.read(FLOAT32), state)
        store(anything(chance))
        CELLS.write(state)
        assert view() == seen
        assert same(CELLS.read(FLOAT32), state)


@pytest.mark.parametrize("seed", range(4))
def test_writing_some_cells_changes_no_other(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        state, other = anything(chance), anything(chance)
        store(state)
        some = chance.sample(FLOAT32, chance.randint(1, 4))
        CELLS.write({name: other[name] for name in some})
        assert same(CELLS.read(FLOAT32), state | {name: other[name] for name in some})


def test_old_getters_raise_and_the_table_still_tells() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    found = snapshot()
    assert found["float32_matmul_precision"] == "highest"
    assert found["cuda.matmul.allow_tf32"] is False
    with flags(float32_matmul_precision="high"):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert snapshot() == found


def test_switch_of_cudnn_that_nothing_tells_is_unreadable_with_torchs_reason() -> None:
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    found = snapshot()
    assert "cudnn.allow_tf32" not in found
    assert "cuDNN" in found["polyattn.flags"]["unreadable"]["cudnn.allow_tf32"]
    with flags(**{"cudnn.allow_tf32": False}):
        assert torch.backends.cudnn.allow_tf32 is False
        assert snapshot()["cudnn.allow_tf32"] is False
    assert snapshot() == found


@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_one_name_changes_its_relatives_and_all_come_back(name: str) -> None:
    before = CELLS.read(FLOAT32)
    with flags(float32_matmul_precision=name):
        assert torch.backends.cuda.matmul.allow_tf32 is (name != "highest")
        assert (
            torch.backends.mkldnn.matmul.fp32_precision
            == {"highest": "ieee", "high": "tf32", "medium": "bf16"}[name]
        )
    assert CELLS.read(FLOAT32) == before


def test_precision_set_after_a_scope_to_what_the_scope_put_back() -> None:
    with flags(**{"cudnn.conv.fp32_precision": "ieee"}):
        pass
    SET("cuda", "conv", "tf32")
    SET("cuda", "rnn", "ieee")
    SET("cuda", "all", "ieee")
    before = snapshot()
    with flags(**{"cudnn.allow_tf32": True}):
        pass
    assert snapshot() == before


def test_matmul_assigned_inside_a_level_to_the_level_s_value_stays() -> None:
    with flags(**{"cudnn.fp32_precision": "ieee"}):
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert CELLS.read(["cuda.matmul"]) == {"cuda.matmul": "ieee"}


def test_matmul_and_level_in_overlapping_scopes() -> None:
    SET("cuda", "matmul", "ieee")
    before = CELLS.read(FLOAT32)
    first = flags({"cuda.matmul.fp32_precision": "none"})
    second = flags({"cudnn.fp32_precision": "ieee"}, on_conflict="allow")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as when two threads hold them
    second.__exit__(None, None, None)
    assert same(CELLS.read(FLOAT32), before)
