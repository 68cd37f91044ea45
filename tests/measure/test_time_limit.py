"""The time limit of a candidate ends what takes too long, and leaves no module half imported."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from polyattn.measure import candidates
from polyattn.measure.candidates import TimeLimitExceeded, time_limit

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that interrupts")

SLOW = """
import time

end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
whole = True
"""

LIMITED = """
from polyattn.measure.candidates import TimeLimitExceeded, time_limit

try:
    with time_limit(0.02):
        while True:
            pass
except TimeLimitExceeded:
    ended = True
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Import a new module with this text."""
    monkeypatch.syspath_prepend(tmp_path)

    def of(name: str, text: str):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)  # removes it after the test too
        return importlib.import_module(name)

    return of


def test_what_takes_too_long_is_ended() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeLimitExceeded), time_limit(0.02):
        while True:
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_what_ends_in_time_is_left_alone() -> None:
    with time_limit(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_import_under_way_ends_first(imported) -> None:
    with pytest.raises(TimeLimitExceeded), time_limit(0.02):
        imported("polyattn_test_slow", SLOW)
        time.sleep(60)
    assert sys.modules["polyattn_test_slow"].whole


def test_a_module_that_limits_while_it_is_imported(imported) -> None:
    assert imported("polyattn_test_limited", LIMITED).ended


def test_another_thread_has_no_limit() -> None:
    ended = []

    def work() -> None:
        with time_limit(0.001):
            time.sleep(0.05)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


def _swallow() -> None:
    """End as compilers' callbacks do, in which an interrupt is lost."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_is_swallowed_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "INTERRUPT_AGAIN_S", 0.05)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), time_limit(60.0):
        _swallow()
        time.sleep(30)
    assert time.monotonic() - begin < 20
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_swallowed_at_the_end_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt), time_limit(60.0):
        _swallow()
    with pytest.raises(KeyboardInterrupt), time_limit(60.0):
        _swallow()
        raise ValueError("what the compiler says of it")


def test_a_handler_of_the_program_stays() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        with time_limit(60.0):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [True]
