"""10,000 random programs of scopes leave torch exactly as it was. See flag_programs.py."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.torch.flags import flag_programs

PROGRAMS, PARTS = 10_000, 10
STATES = 50  # so many programs start from the same random state


@pytest.fixture
def workers() -> Iterator[list[flag_programs.Worker]]:
    cast = [flag_programs.Worker(number) for number in range(4)]
    yield cast
    for worker in cast:
        worker.end()


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """The state before, in which the test itself put nothing."""
    with flag_programs.kept():
        yield


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_leave_everything_as_it_was(
    part: int, workers: list[flag_programs.Worker]
) -> None:
    values = flag_programs.settable()
    done = dict.fromkeys(("scopes", "refused", "raised", "assigned", "named"), 0)
    size = PROGRAMS // PARTS
    for seed in range(part * size, (part + 1) * size):
        if seed % STATES == 0 and seed:  # the first ones start from the state of the process
            flag_programs.some_state(random.Random(seed), values)
        try:
            counts = flag_programs.run(seed, values, workers)
        except BaseException as error:
            state = seed // STATES * STATES
            error.add_note(
                f"reproduce: flag_programs.some_state(Random({state})); run({seed}, ...)"
            )
            raise
        done = {name: done[name] + counts[name] for name in done}
    assert min(done.values()) > size / 10, f"the programs hardly do anything: {done}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_random_programs_from_the_state_that_torch_starts_in(seed: int, tmp_path: Path) -> None:
    """What torch 2.13 starts with cannot be stored again, so each needs a new process."""
    code = f"""
    from tests.torch.flags.flag_programs import Worker, run, settable
    workers = [Worker(number) for number in range(4)]
    values = settable()
    for seed in range({seed}, {seed} + 4):
        run(seed, values, workers)
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "\n".join(
                line.strip() if "run(seed" not in line else line[4:] for line in code.splitlines()
            ),
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
