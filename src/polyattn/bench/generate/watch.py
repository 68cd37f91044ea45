"""What is seen of the first block of a generation, which is no part of the figures."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from polyattn.bench.generate.generated import Row

__all__ = ["Watch"]


class Watch:
    """Looks at the block after the prefill: which backends ran, or how long attention took.

    `ran`: calls of each backend (of torch's own function: "torch"); `share`: of attention in a
    token's time. None where that is not to be seen: compiled code would be compiled twice for it.
    """

    def __init__(self, side: str, row: Row) -> None:
        self.ran: dict[str, int] | None = None
        self.share: float | None = None
        self._side = "" if row.compiled else side
        self._turns = 0
        self._during = ExitStack()
        self._seconds = 0.0
        self._calls = 0

    def turn_ended(self, wall: float) -> None:
        """Note that a turn has ended, which took `wall` seconds."""
        self._turns += 1
        if self._turns == 1:
            self._begin()
        elif self._turns == 2:
            self.close()
            if self._side == "again" and self._calls:
                self.share = self._seconds / wall

    def close(self) -> None:
        """Take down what watches."""
        self._during.close()

    def _begin(self) -> None:
        if self._side == "polyattn":
            self._during.callback(self._count, self._recorded())
        elif self._side == "again":
            self._time()

    def _recorded(self) -> Any:
        from polyattn.integrations.recording import Recorder
        from polyattn.integrations.sdpa_patch import route_sdpa

        recorder = Recorder()
        self._during.enter_context(route_sdpa(recorder))
        return recorder

    def _count(self, recorder: Any) -> None:
        record = recorder.record()
        self.ran = {}
        for case in record.cases:
            for ran, calls in case.ran.items():
                self.ran[ran.backend] = self.ran.get(ran.backend, 0) + calls
        if record.passed:
            self.ran["torch"] = sum(one.calls for one in record.passed)

    def _time(self) -> None:
        import torch.nn.functional as functions

        stock: Any = functions.scaled_dot_product_attention

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return stock(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - start
                self._calls += 1

        functions.scaled_dot_product_attention = timed

        def restore() -> None:
            functions.scaled_dot_product_attention = stock

        self._during.callback(restore)
