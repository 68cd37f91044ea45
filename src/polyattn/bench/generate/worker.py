"""One side of a generation: a process that decodes a block of tokens each time it is told to.

A side of its own process is what a user has: its own threads, allocator and compiled code. The
sides take turns, so only one of them works at a time. The turns lie in a logits processor, which
``generate`` calls once for each token: what is timed is all that ``generate`` does.
"""

from __future__ import annotations

import functools
import gc
import signal
import time
import traceback
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from polyattn.bench.generate.generated import Row
from polyattn.bench.generate.watch import Watch

__all__ = ["READY", "SIDES", "Answers", "Job", "Turn", "work"]

SIDES = ("stock", "polyattn", "again", "run")
"""Stock twice, whose difference is noise; `run`: routed as by ``polyattn run``, which records."""

READY = "ready"


@dataclass(frozen=True)
class Job:
    """What to generate: `tokens` in all, `block` of them at a time.

    `known`: generate once before, so that no length of the keys is new. `threads`: of torch; 0: its
    own choice. `sizes`: the model's, for tests.
    """

    row: Row
    tokens: int
    block: int
    seed: int = 0
    known: bool = False
    threads: int = 0
    sizes: Any = None


@dataclass(frozen=True)
class Turn:
    """What one block took, in seconds: of the clock, and of all threads of the process."""

    wall: float
    processor: float
    tokens: int


@dataclass(frozen=True)
class Answers:
    """What a side computed: `logits` (tokens, batch, vocabulary) float32, and greedy `tokens`.

    `threads`: torch's. `ran` and `share`: see :class:`~polyattn.bench.generate.watch.Watch`.
    """

    logits: Any
    tokens: list[list[int]]
    ran: dict[str, int] | None
    share: float | None
    threads: int


def work(side: str, pipe: Any) -> None:
    """Take jobs from `pipe` until it closes: the entry of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    try:
        with ExitStack() as routing:
            _enter(side, routing)
            while (job := pipe.recv()) is not None:
                try:
                    pipe.send(_generate(side, job, pipe))
                except _Stopped:
                    raise
                except Exception:
                    pipe.send(traceback.format_exc())
    except (EOFError, BrokenPipeError, ConnectionResetError, _Stopped):
        return


class _Stopped(BaseException):
    """The other end of the pipe is gone."""


def _enter(side: str, routing: ExitStack) -> None:
    if side == "polyattn":
        from polyattn.integrations.sdpa_patch import route_sdpa

        routing.enter_context(route_sdpa())
    elif side == "run":
        from polyattn.integrations.recording import Recorder
        from polyattn.integrations.sdpa_patch import route_sdpa

        routing.enter_context(route_sdpa(Recorder()))


def _generate(side: str, job: Job, pipe: Any) -> Answers:
    import torch
    import transformers

    from polyattn.bench.generate import models

    transformers.logging.set_verbosity_error()
    torch.compiler.reset()
    if job.threads:
        torch.set_num_threads(job.threads)
    model: Any = models.build(job.row, job.seed, job.sizes)
    inputs = models.prompt(job.row, job.seed + 1, job.sizes)
    _warm_up(model, job)
    if job.row.compiled:
        model.forward = _compiled_steps(model.forward)
    _forget(side)
    if job.known:
        _run(model, job, inputs, [])
    with closing(Watch(side, job.row)) as watch:
        turns = _Turns(pipe, job, watch, model.config.vocab_size)
        gc.collect()
        pipe.send(READY)
        turns.wait()
        _run(model, job, inputs, [turns])
    logits, threads = torch.stack(turns.logits).numpy(), torch.get_num_threads()
    return Answers(logits, turns.greedy, watch.ran, watch.share, threads)


def _warm_up(model: Any, job: Job) -> None:
    """Generate a little from a short text: threads start, and code is loaded, in no figure."""
    from polyattn.bench.generate import models

    few = replace(job, row=replace(job.row, context=16), tokens=4)
    _run(model, few, models.prompt(few.row, job.seed + 1, job.sizes), [])


def _forget(side: str) -> None:
    """Make every length of the keys new to polyattn, as in a fresh process."""
    if side in ("polyattn", "run"):
        from polyattn.selection import scopes

        scopes.invalidate()


def _run(model: Any, job: Job, inputs: dict[str, Any], processors: list[Any]) -> None:
    import torch

    options = {"cache_implementation": "static"} if job.row.cache == "static" else {}
    with torch.inference_mode() if not job.row.compiled else torch.no_grad():
        model.generate(
            **inputs,
            **options,
            max_new_tokens=job.tokens,
            do_sample=False,
            logits_processor=processors,
        )


def _compiled_steps(forward: Any) -> Any:
    """Compile the steps of one token, as transformers itself does, and leave the prefill alone."""
    import torch

    compiled = torch.compile(forward)

    @functools.wraps(forward)
    def step(*args: Any, **kwargs: Any) -> Any:
        name = "decoder_input_ids" if "decoder_input_ids" in kwargs else "input_ids"
        ids = kwargs.get(name)
        one = ids is not None and ids.shape[1] == 1
        return (compiled if one else forward)(*args, **kwargs)

    return step


class _Turns:
    """A logits processor that waits for its turn after each block of tokens."""

    def __init__(self, pipe: Any, job: Job, watch: Watch, vocabulary: int) -> None:
        import torch

        self.logits: list[Any] = []
        self.greedy: list[list[int]] = []
        self._pipe, self._watch = pipe, watch
        self._ends = set(range(0, job.tokens, job.block)) | {job.tokens - 1}
        self._since = 0
        self._forced = None
        if job.row.dtype != "float32":  # rounding may part the texts: all sides get the same one
            source = torch.Generator().manual_seed(job.seed + 2)
            shape = job.tokens, job.row.batch
            self._forced = torch.randint(4, vocabulary, shape, generator=source)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Note the scores of a token; at the end of a block give the turn away."""
        number = len(self.logits)
        self.logits.append(scores.clone())
        if number in self._ends:
            wall, processor = time.perf_counter(), time.process_time()
            self._give(Turn(wall - self._wall, processor - self._processor, number - self._since))
            self._since = number
        self.greedy.append(scores.argmax(-1).tolist())
        if self._forced is None:
            return scores
        return scores.scatter(1, self._forced[number][:, None], float("inf"))

    def _give(self, turn: Turn) -> None:
        self._watch.turn_ended(turn.wall)
        try:
            self._pipe.send(turn)
        except OSError as error:
            raise _Stopped from error
        self.wait()

    def wait(self) -> None:
        """Wait for the next turn; the first is the prefill."""
        try:
            told = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _Stopped from error
        if told != "go":
            raise _Stopped
        self._wall, self._processor = time.perf_counter(), time.process_time()
