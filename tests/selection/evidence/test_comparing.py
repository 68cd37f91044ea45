"""Two kernels by turns, on a clock of the test's own: what load does to the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyattn.selection.evidence.comparing import BUSY, SCATTERED, Compared, compare, waited_s


class Clock:
    """A clock that kernels advance; `waits`: seconds that threads waited, as they were told."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def __call__(self) -> float:
        return self.now

    def kernel(self, *seconds: float, waits: float = 0.0) -> Callable[[], None]:
        """Return a kernel that takes these times, the last of them from then on."""
        calls = iter(seconds)
        last = seconds[-1]

        def run() -> None:
            self.now += next(calls, last)
            self.waited += waits

        return run


def test_the_fastest_calls_count_and_both_halves_are_told() -> None:
    clock = Clock()
    native = clock.kernel(3e-4, 1e-4, 1.05e-4, 2e-4, 1.2e-4)
    found = compare(native, clock.kernel(9e-4, 1.5e-4), 2, clock, lambda: None)
    assert isinstance(found, Compared)
    assert found.figure.median == pytest.approx(1.5) and found.native_s == pytest.approx(1e-4)
    assert found.figure.low == pytest.approx(1.5 / 1.05)
    assert found.figure.high == pytest.approx(1.5)


def test_a_round_in_which_threads_had_to_wait_counts_for_nothing() -> None:
    clock = Clock()
    slow_at_first = clock.kernel(*[8e-3] * 3, 1e-3)

    def native() -> None:
        begin = clock.now
        slow_at_first()
        clock.waited += 7e-3 if clock.now - begin > 5e-3 else 0.0

    found = compare(native, clock.kernel(1e-3), 1, clock, lambda: clock.waited)
    assert isinstance(found, Compared) and found.figure.median == pytest.approx(1.0)
    assert found.figure.low == pytest.approx(1.0)


def test_a_machine_that_stays_busy_gives_no_result_soon() -> None:
    clock = Clock()
    busy = clock.kernel(4e-3, waits=4e-3)
    assert compare(busy, clock.kernel(1e-3), 2, clock, lambda: clock.waited) == BUSY
    assert clock.now < 0.05


def test_times_that_scatter_are_taken_again_and_then_given_up() -> None:
    def scattered(times: list[float]) -> Compared | str:
        clock = Clock()
        return compare(clock.kernel(*times), clock.kernel(1e-4), 2, clock, lambda: None)

    always = [1e-4 * (1 + 0.25 * (n % 2)) * 1.05 for n in range(100)]
    assert scattered(always) == SCATTERED
    calm = scattered([1e-4, 1.2e-4] * 3 + [1e-4])
    assert isinstance(calm, Compared) and calm.pairs > 6 and calm.figure.low > 0.9


def test_halves_may_differ_where_both_say_the_same_by_far() -> None:
    clock = Clock()
    found = compare(clock.kernel(1e-4), clock.kernel(*[3e-4, 4e-4] * 9), 2, clock, lambda: None)
    assert isinstance(found, Compared) and found.pairs == 6
    assert found.figure.low == pytest.approx(3.0) and found.figure.high == pytest.approx(4.0)


def test_a_slow_kernel_is_not_called_often() -> None:
    clock = Clock()
    found = compare(clock.kernel(1.0), clock.kernel(2.0), 2, clock, lambda: None)
    assert isinstance(found, Compared) and found.pairs == 3


def test_waiting_is_told_by_linux_or_not_at_all() -> None:
    first, second = waited_s(), waited_s()
    if first is None or second is None:
        pytest.skip("this system does not tell how long threads wait")
    assert 0 <= first <= second
