"""apply(): torch stands as a snapshot says, or, on any error, as it stood."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn.errors import FlagsError
from polyattn.flags import make, read
from polyattn.torch.flags import apply, diff, flags, snapshot
from tests.torch.flags.flag_programs import difference, kept, settable, some_state, stand

META = "polyattn.flags"
VALUES = settable()


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = stand(later=True)
    with kept():
        yield
    assert stand(later=True) == before


def with_(**changes: Any) -> dict[str, Any]:
    """A snapshot of now with some values changed, as one of another machine would be."""
    return snapshot() | {name.replace("__", "."): value for name, value in changes.items()}


def states(seed: int) -> tuple[dict[str, Any], dict[str, Any], random.Random]:
    """Two snapshots of random states, torch being in the second."""
    chance = random.Random(seed)
    some_state(chance, VALUES)
    first = snapshot()
    some_state(chance, VALUES)
    return first, snapshot(), chance


def readable(found: dict[str, Any]) -> bool:
    """Whether the snapshot holds all there is: the old switch of cuDNN may be unreadable."""
    return not any(
        "allow_tf32" in name and "raises" in why for name, why in found[META]["unreadable"].items()
    )


def check(first: dict[str, Any], second: dict[str, Any]) -> None:
    done = apply(first)
    left = diff(first, snapshot())
    if not readable(first):  # what was not noted cannot be brought back
        left.pop("cudnn.allow_tf32", None)
    assert not left
    if readable(first) and readable(second):
        assert done == diff(second, first)


@pytest.mark.parametrize("seed", range(4))
def test_from_any_state_to_any_other_and_back(seed: int) -> None:
    for step in range(150):
        first, second, _ = states(1000 * seed + step)
        check(first, second)
        check(second, first)


COUPLED = ("determin", "_inductor", "fp32_precision", "tf32", "float32_matmul")


def test_from_any_state_to_any_other_and_back_over_knobs_that_are_not_coupled() -> None:
    values = {name: of for name, of in VALUES.items() if not any(c in name for c in COUPLED)}
    for seed in range(300):
        chance = random.Random(seed)
        found = []
        for _ in range(2):
            some_state(chance, values, precisions=False)
            found.append(snapshot())
        first, second = found
        check(first, second)
        check(second, first)


def test_apply_of_what_is_changes_nothing() -> None:
    for seed in range(50):
        some_state(random.Random(seed), VALUES)
        before = stand()
        assert apply(before["snapshot"]) == {}
        assert stand() == before


def test_knob_coupled_to_one_that_is_coupled() -> None:
    torch.use_deterministic_algorithms(False)  # loads Inductor's settings
    if not hasattr(torch._inductor.config, "deterministic"):
        pytest.skip("not in this version of torch")
    torch.use_deterministic_algorithms(True)
    torch._inductor.config.deterministic = False
    wanted = snapshot()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._inductor.config.deterministic = False
    apply(wanted)
    assert diff(wanted, snapshot()) == {}


def test_knob_that_read_the_same_because_it_inherited() -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    wanted = snapshot()
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "ieee"
    apply(wanted)
    assert diff(wanted, snapshot()) == {}


def test_through_a_file(tmp_path: Path) -> None:
    first, _, _ = states(5)
    (tmp_path / "a.json").write_text(json.dumps(first), encoding="utf-8")
    torch.backends.cudnn.benchmark = not first["cudnn.benchmark"]
    again = read(tmp_path / "a.json")
    assert again == first
    assert diff(first, again) == {}
    assert apply(again)["cudnn.benchmark"] == (
        not first["cudnn.benchmark"],
        first["cudnn.benchmark"],
    )


def test_knobs_of_another_build_are_no_obstacle_where_they_do_not_differ() -> None:
    wanted = with_(cudnn__benchmark=True, version="2.9.0", build="CUDA 12.8")
    wanted["cuda.is_built"] = not torch.backends.cuda.is_built()
    del wanted["cudnn.deterministic"]  # one that the other torch did not have
    torch.backends.cudnn.deterministic = True
    assert apply(wanted) == {"cudnn.benchmark": (False, True)}
    assert torch.backends.cudnn.deterministic is True


def test_knob_that_this_torch_does_not_know_is_an_error_and_nothing_is_set() -> None:
    wanted = with_(cudnn__benchmark=True) | {"some.knob.of.the.future": 3}
    before = stand()
    with pytest.raises(FlagsError, match=r"some\.knob\.of\.the\.future"):
        apply(wanted)
    assert stand() == before
    assert apply(wanted, strict=False) == {"cudnn.benchmark": (False, True)}


ABSENT = next(
    (n for n in ("cudnn.benchmark_limit", "mkldnn.allow_tf32") if n not in snapshot()), ""
)


@pytest.mark.skipif(not ABSENT, reason="this build has everything")
def test_knob_that_this_build_does_not_have_is_an_error_and_nothing_is_set() -> None:
    wanted = with_(cudnn__benchmark=True, **{ABSENT: 7})
    del wanted[META]["unreadable"][ABSENT]
    before = stand()
    with pytest.raises(FlagsError) as caught:
        apply(wanted)
    assert ABSENT in str(caught.value) and "strict=False" in str(caught.value)
    assert stand() == before
    assert apply(wanted, strict=False) == {"cudnn.benchmark": (False, True)}


def test_value_that_this_build_does_not_have_is_an_error_and_nothing_is_set() -> None:
    wanted = with_(cudnn__benchmark=True, quantized__engine="none of ours", default_dtype="int4")
    before = stand()
    with pytest.raises(FlagsError, match="2 of the snapshot's knobs"):
        apply(wanted)
    assert stand() == before
    assert apply(wanted, strict=False) == {"cudnn.benchmark": (False, True)}


def test_setter_that_fails_undoes_the_rest() -> None:
    wanted = with_(
        cudnn__benchmark=True,
        **{
            "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
            "cuda.matmul.allow_fp16_reduced_precision_reduction_split_k": False,
        },
    )
    if "cuda.matmul.allow_fp16_reduced_precision_reduction_split_k" not in snapshot():
        pytest.skip("not in this version of torch")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    before = stand()
    for strict in (True, False):
        with pytest.raises(FlagsError, match=r"fp16_reduced.* refuses"):
            apply(wanted, strict=strict)
        assert not difference(before, stand())


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (make("jax", {"jax_enable_x64": True}, {}), "snapshot of jax, expected one of torch"),
        ({}, "expected a snapshot"),
        ({"cudnn.benchmark": True}, "expected a snapshot"),
        ({META: 1, "cudnn.benchmark": True}, "expected a snapshot"),
        ({META: {"schema": 2, "framework": "torch", "unreadable": {}}}, "schema 2"),
        ({META: {"schema": True, "framework": "torch", "unreadable": {}}}, "schema True"),
        ({META: {"schema": 1, "framework": "torch"}}, "damaged"),
        ({META: {"schema": 1, "unreadable": {}}}, "damaged"),
        (None, "expected a snapshot"),
        (3, "expected a snapshot"),
        ([1], "expected a snapshot"),
    ],
    ids=str,
)
def test_what_is_no_snapshot_of_torch_is_refused(wanted: Any, says: str) -> None:
    with pytest.raises(FlagsError, match=says):
        apply(wanted)


@pytest.mark.parametrize("value", [1, "on", [True], {"a": 1}])
def test_damaged_value_is_refused(value: Any) -> None:
    before = stand()
    with pytest.raises(FlagsError, match=r"cudnn\.benchmark"):
        apply(with_(cudnn__benchmark=value, flush_denormal=True))
    assert stand() == before


def test_apply_inside_a_scope_ends_with_it() -> None:
    """What the scope names comes back at its end; the rest of the snapshot stays."""
    wanted = with_(cudnn__benchmark=True, cudnn__deterministic=True)
    with flags({"cudnn.benchmark": False}):
        assert set(apply(wanted)) == {"cudnn.benchmark", "cudnn.deterministic"}
        assert torch.backends.cudnn.benchmark is True
    assert torch.backends.cudnn.benchmark is False
    assert torch.backends.cudnn.deterministic is True


def test_a_thread_s_knobs_are_set_in_the_calling_thread() -> None:
    wanted = with_(grad_enabled=False, flush_denormal=True)
    assert apply(wanted) == {"grad_enabled": (True, False), "flush_denormal": (False, True)}
    assert not torch.is_grad_enabled()
