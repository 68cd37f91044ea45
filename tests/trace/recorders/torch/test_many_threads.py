"""One traced model that several threads call at once: every record has its own place and shape."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn.hooks import trace
from polyattn.trace import read

THREADS, CALLS = 4, 1500


class Named(torch.nn.Module):
    def forward(self, **arrays: Any) -> Any:
        return next(iter(arrays.values()))


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_each_record_has_its_own_place_and_shape(tmp_path: Path) -> None:
    model, path = Named(), tmp_path / "run.jsonl"

    def work(number: int) -> None:
        for n in range(number * CALLS + 1, (number + 1) * CALLS + 1):
            model(**{f"x{n}": torch.full((n,), float(n))})  # a name of its own: nobody knows it yet

    with trace(model, path):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    records = read(path).records
    entered = [record for record in records if record.phase == "in"]
    assert len(records) == 2 * THREADS * CALLS
    assert len(entered) == THREADS * CALLS
    for record in entered:
        named = re.search(r"x(\d+)", record.tensor)
        assert named is not None
        assert record.shape == (int(named[1]),)
    assert len({record.tensor for record in entered}) == len(entered)
