"""What a process of a program is called: a rank, a worker of a pool or a data loader, a script."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from polyattn import settings
from polyattn.integrations.program.asked import Process

__all__ = ["of_this_process"]


def of_this_process(supervisor: int, threads: int | None) -> Process:
    """Return this process as it can be called now; `supervisor` started the program."""
    group, name = _called(supervisor)
    return Process(name, group, os.getpid(), os.getppid(), threads=threads)


def _called(supervisor: int) -> tuple[str, str]:
    rank = settings.variable("RANK")
    of_rank = "" if rank is None else f" of rank {rank}"
    worker = _data_worker()
    if worker is not None:
        return "DataLoader worker", f"DataLoader worker {worker}{of_rank}"
    own = _multiprocessing_name()
    if own is not None:
        return re.sub(r"[-_:\d]+$", "", own) or own, f"{own}{of_rank}"
    if rank is not None:
        return "rank", f"rank {rank}"
    if os.getppid() == supervisor:
        return "the program", "the program"
    script = script_of(sys.orig_argv)
    return script, script


def _data_worker() -> int | None:
    """The number of the data loader's worker that this process is; None for another process."""
    data = sys.modules.get("torch.utils.data")
    found = None if data is None else data.get_worker_info()
    return None if found is None else int(found.id)


def _multiprocessing_name() -> str | None:
    module = sys.modules.get("multiprocessing.process")
    if module is None or module.parent_process() is None:
        return None
    return str(module.current_process().name)


def script_of(argv: Sequence[str]) -> str:
    """Return what a command line of Python runs, in a word.

    >>> script_of(["python3", "-u", "tools/train.py", "--steps", "3"])
    'train.py'
    >>> script_of(["python3", "-Im", "pytest"]), script_of(["python3", "-c", "pass"])
    ('python -m pytest', 'python -c')
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        token = argv[at]
        if not token.startswith("--"):
            if "c" in token[1:]:
                return "python -c"
            if "m" in token[1:]:
                return " ".join(["python -m", *argv[at + 1 : at + 2]])
        at += 2 if token in ("-W", "-X", "--check-hash-based-pycs") else 1
    return os.path.basename(argv[at]) if at < len(argv) else "python"
