"""Knobs without a framework: scopes that end in any order, snapshots, names."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.errors import FlagsError
from polyattn.flags import ABSENT, META, Knob, check, diff, lines, make, read
from polyattn.flags.cells import Access, Single
from polyattn.flags.knob import Directory, check_value
from polyattn.flags.stack import Stack


class World:
    """Settings in a dictionary; a setter may refuse."""

    def __init__(self, names: str = "abc") -> None:
        self.state: dict[str, int] = dict.fromkeys(names, 0)
        self.stack = Stack()
        self.knobs = {name: self._access(name) for name in names}

    def _access(self, name: str) -> Access:
        def put(value: int) -> None:
            if value < 0:
                self.state[name] = value  # as torch does: it stores, and raises then
                raise RuntimeError("negative")
            self.state[name] = value

        cell = Single(lambda: self.state[name], lambda v: self.state.update({name: v})).cell(
            "value"
        )
        knob = Knob(name=name, kind="knob", type="int", about="", where=f"world.{name}")
        return Access(
            knob=knob,
            read=lambda: self.state[name],
            write=put,
            touches=(cell,),
            verify=lambda value: self.state[name] == value,
        )

    def enter(self, **changes: int) -> Any:
        return self.stack.enter([(self.knobs[n], v) for n, v in changes.items()], "allow")


@pytest.mark.parametrize("order", itertools.permutations(range(4)))
def test_scopes_that_end_in_any_order_leave_all_as_it_was(order: tuple[int, ...]) -> None:
    world = World()
    before = dict(world.state)
    entries = [
        world.enter(a=1, b=1),
        world.enter(b=2, c=2),
        world.enter(a=3),
        world.enter(c=4, b=4),
    ]
    for index in order:
        world.stack.leave(entries[index])
    assert world.state == before


changes = st.dictionaries(st.sampled_from("abc"), st.integers(-1, 3), min_size=1)


@given(st.lists(st.tuples(changes, st.integers(0, 5), st.booleans()), max_size=12))
def test_any_entering_and_leaving(steps: list[tuple[dict[str, int], int, bool]]) -> None:
    world, held = World(), []
    before = dict(world.state)
    for wanted, index, leaves in steps:
        if leaves and held:
            world.stack.leave(held.pop(index % len(held)))
            continue
        stood = dict(world.state)
        try:
            held.append(world.enter(**wanted))
        except FlagsError:
            assert min(wanted.values()) < 0
            assert world.state == stood
        else:
            assert world.state == stood | wanted
    for entry in held:
        world.stack.leave(entry)
    assert world.state == before


def test_later_scope_is_in_force_until_it_ends() -> None:
    world = World()
    first, second = world.enter(a=1), world.enter(a=2)
    world.stack.leave(first)
    assert world.state["a"] == 2
    world.stack.leave(second)
    assert world.state["a"] == 0


KNOBS = [
    Knob(
        name="cuda.flag", kind="knob", type="bool", about="", where="", aliases=("cuda.set_flag",)
    ),
    Knob(name="cudnn.flag", kind="knob", type="bool", about="", where=""),
]


@pytest.mark.parametrize("name", ["cuda.flag", "cuda.set_flag", "torch.cuda.flag"])
def test_directory_finds_names_aliases_and_paths(name: str) -> None:
    assert Directory(KNOBS, ("torch.",)).find(name) is KNOBS[0]


def test_directory_finds_what_sets_one_knob_alone() -> None:
    def knob(name: str, where: str) -> Knob:
        return Knob(name=name, kind="knob", type="bool", about="", where=where)

    alone = knob("threads", "torch.set_threads")
    several = [knob("mode", "torch.set_mode"), knob("warn_only", "torch.set_mode")]
    hidden = knob("hidden", "torch.threads")  # the name of another
    directory = Directory([alone, *several, hidden], ("torch.",))
    assert directory.find("torch.set_threads") is directory.find("set_threads") is alone
    assert directory.find("torch.threads") is alone
    with pytest.raises(FlagsError, match="which there is not"):
        directory.find("torch.set_mode")


@pytest.mark.parametrize(
    ("name", "near"), [("cuda.flags", "'cuda.flag'"), ("flag", "'cudnn.flag'"), (None, "table()")]
)
def test_directory_names_what_is_near(name: Any, near: str) -> None:
    with pytest.raises(FlagsError) as caught:
        Directory(KNOBS).find(name)
    assert near in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("bool", 1), ("bool", None), ("int", True), ("int", "1"), ("int", 0), ("str", 1)],
)
def test_value_of_the_wrong_type_is_refused(kind: Any, value: object) -> None:
    low = 1 if kind == "int" else None
    with pytest.raises(FlagsError, match="expected"):
        check_value(Knob(name="x", kind="knob", type=kind, low=low, about="", where=""), value)


values = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
names = st.text("abc.", min_size=1)


@given(st.dictionaries(names, values), st.dictionaries(names, values))
def test_diff_is_what_differs(a: dict[str, Any], b: dict[str, Any]) -> None:
    infinite = [v for v in (*a.values(), *b.values()) if v in (float("inf"), -float("inf"))]
    if infinite or META in {*a, *b}:
        return
    one, two = make("torch", a, {}), make("torch", b, {})
    found = diff(one, two)
    for name in {*a, *b}:
        pair = (a.get(name, ABSENT), b.get(name, ABSENT))
        same = type(pair[0]) is type(pair[1]) and pair[0] == pair[1]
        assert (name not in found) if same else (found[name] == pair)
    assert diff(one, one) == {}
    assert {name: pair[::-1] for name, pair in found.items()} == diff(two, one)
    assert len(lines(found)) == len(found)


def test_snapshot_is_json_and_reads_back(tmp_path: Path) -> None:
    made = make("torch", {"a": True, "b": ["x"], "c": None}, {"d": "why"})
    path = tmp_path / "s.json"
    for content in (made, {"flags": made}, {"flags": {"torch": made}, "more": 1}):
        path.write_text(json.dumps(content), encoding="utf-8")
        assert check(read(path)) == made


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "null", '{"a": 1}', "\x00", '{"flags": {}}'])
def test_file_that_is_no_snapshot_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FlagsError, match=r"s\.json"):
        read(path)
    with pytest.raises(FlagsError):
        read(tmp_path / "missing.json")
