"""The process of one engine: reads lines of JSON, answers each with one.

    worker.py ENGINE THREADS

`{"do": "about"}` answers with versions; `{"do": "prepare", ...}` gets a call ready, whose arrays
are files of NumPy, and writes its result to one; `{"do": "run", "calls": n}` answers with the
seconds of n calls; `{"do": "end"}`, or the end of the input, ends it. An error is an answer too.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from polyattn_peers.call import Call, Prepared, Unable


def die_with_parent() -> None:
    """Have the system end this process with the bench, which it could not see end while stopped."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))


def prepare(engine: Any, told: dict[str, Any]) -> tuple[Prepared, dict[str, Any]]:
    """Get a call ready and write its result."""
    arrays = {name: np.load(path) for name, path in told["files"].items()}
    begin = time.perf_counter()
    ready: Prepared = engine.prepare(Call.of(arrays, told))
    ready.run()
    seconds = time.perf_counter() - begin
    np.save(told["answer"], np.ascontiguousarray(ready.answer(ready.run())))
    return ready, {"prepare_s": seconds}


def timed(ready: Prepared, calls: int) -> dict[str, Any]:
    """Return the seconds and the processor time of so many calls."""
    run, collected = ready.run, gc.isenabled()
    gc.disable()
    try:
        busy, begin = time.process_time(), time.perf_counter()
        for _ in range(calls):
            run()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "processor": time.process_time() - busy}
    finally:
        if collected:
            gc.enable()


def main() -> None:
    """Answer until there is no more to answer."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints must not be taken for an answer
    os.environ["OMP_NUM_THREADS"] = sys.argv[2]  # read when an engine is loaded
    ready: Prepared | None = None
    for line in sys.stdin:
        told = json.loads(line)
        try:  # the engine that cannot be imported is a finding too
            engine = importlib.import_module(f"polyattn_peers.engines.{sys.argv[1]}")
            match told["do"]:
                case "about":
                    answer = {"versions": engine.versions()}
                case "prepare":
                    ready = None
                    ready, answer = prepare(engine, told)
                case "run":
                    assert ready is not None, "nothing is prepared"
                    answer = timed(ready, told["calls"])
                case _:
                    return
        except Unable as error:
            answer = {"unable": str(error)}
        except Exception as error:  # what an engine cannot do is a finding
            first = (str(error).strip().splitlines() or [""])[0]
            answer = {"unable": f"{type(error).__name__}: {first}"[:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
