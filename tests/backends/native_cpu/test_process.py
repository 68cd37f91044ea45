"""The native kernels in other processes: forks, every instruction set, the memory they take."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from polyattn.native import module
from polyattn.selection.registry import Available

if not isinstance(module.status(), Available):
    pytest.skip("the extension is not built", allow_module_level=True)


def run(script: str, timeout: float = 300.0, **environ: str) -> str:
    """Run a script in a fresh process; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("isa", module.isas())
def test_every_instruction_set(isa: str) -> None:
    """The fuzzer's cases, with the instruction set that the environment names."""
    found = run(
        """
        from polyattn.conformance.fuzz import run
        from polyattn.native import module

        report = run(250, seed=11, backend="native_cpu")
        print(module.isas()[module.isa_index()], report.tallies["native_cpu"].counts["right"] > 150)
        for failure in report.failures:
            print(failure.kind, failure.detail, failure.reproduce)
        """,
        POLYATTN_NATIVE_ISA=isa,
    )
    assert found == f"{isa} True\n", found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("threads", [1, 2])
def test_after_a_fork(threads: int) -> None:
    """Threads do not survive a fork: the child's calls must not wait for those of its parent.

    torch's own operators do wait, for ever, where they are large enough for two threads: the
    tensors here are too small for that.
    """
    run(
        f"""
        import os, torch
        from polyattn import Causal
        from polyattn.torch import attention

        torch.set_num_threads({threads})
        q = torch.randn(1, 150, 4, 32, requires_grad=True)
        heads = torch.ones(1, 150, 4, 32)

        def call():
            out = attention(q, q, q, mask=Causal(), backend="native_cpu")
            return out, *torch.autograd.grad(out, q, heads)

        wanted = call()  # the parent's threads run now
        for _ in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0 if all(map(torch.equal, call(), wanted)) else 7)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
            assert all(map(torch.equal, call(), wanted))
        """,
        timeout=300.0,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for its forks")
def test_the_first_call_is_after_a_fork() -> None:
    """Nothing of the extension saw the fork; the parent's OpenMP threads are not in the child.

    As above, torch's own operators would wait for those: the child's tensors are small.
    """
    told = run(
        """
        import os, signal, torch

        torch.set_num_threads(2)
        torch.randn(2000, 1000).exp().sum()  # torch's threads run now
        child = os.fork()
        if child == 0:
            signal.alarm(200)
            from polyattn.native import module
            from polyattn.torch import attention

            q = torch.ones(1, 150, 4, 32)
            out = attention(q, q, q, backend="native_cpu")
            os._exit(0 if bool((out - 1).abs().max() < 1e-5) and module.pool() == "own" else 7)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
        """,
        timeout=280.0,
    )
    assert told == "0\n"


@pytest.mark.parametrize("daemon", [True, False])
def test_threads_at_work_while_the_program_ends(daemon: bool) -> None:
    """Daemon threads that come back from a kernel then find no interpreter; others are waited for.

    NumPy arrays: torch's own functions end the process, those that give up the lock in between.
    """
    told = run(
        f"""
        import sys, threading
        import numpy as np
        from polyattn import numpy_attention

        q = np.ones((1, 256, 4, 64), dtype=np.float32)
        begun = threading.Barrier(4)

        def work():
            numpy_attention(q, q, q, threads=1)
            begun.wait()
            for _ in range(1_000_000 if {daemon} else 20):
                numpy_attention(q, q, q, threads=1)
            sys.stdout.write("finished\\n")

        for _ in range(3):
            threading.Thread(target=work, daemon={daemon}).start()
        begun.wait()
        """
    )
    assert told.split() == ([] if daemon else ["finished"] * 3)


@pytest.mark.parametrize("isa", module.isas())
def test_every_way_obeys_the_instruction_set_of_the_moment(isa: str) -> None:
    """The variable counts as it stands at a call, prepared or not; nonsense is refused."""
    told = run(
        """
        import os
        import torch
        from polyattn import numpy_attention
        from polyattn.errors import SettingsError
        from polyattn.torch import attention, paged_attention

        q, grad = torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 8, requires_grad=True)
        pages, table, length = torch.ones(1, 4, 2, 8), torch.tensor([[0]]), torch.tensor([3])
        options = {"backend": "native_cpu"}
        compiled = torch.compile(lambda q: attention(q, q, q, **options), backend="eager")
        ways = {
            "bare": lambda: attention(q, q, q, **options),
            "lse": lambda: attention(q, q, q, return_lse=True, **options),
            "training": lambda: attention(grad, grad, grad, **options),
            "paged": lambda: paged_attention(q, pages, pages, table, length, **options),
            "compiled": lambda: compiled(q),
            "numpy": lambda: numpy_attention(q.numpy(), q.numpy(), q.numpy()),
        }
        for way in ways.values():
            way()  # prepared, and kept
        os.environ["POLYATTN_NATIVE_ISA"] = os.environ["WANTED"]
        for way in ways.values():
            way()
        refused = []
        os.environ["POLYATTN_NATIVE_ISA"] = "nonsense"
        for name, way in ways.items():
            try:
                way()
            except SettingsError as error:
                assert "'nonsense'" in str(error), error
                refused.append(name)
        print(*refused)
        del os.environ["POLYATTN_NATIVE_ISA"]
        for way in ways.values():
            way()
        """,
        WANTED=isa,
    )
    assert told.split() == ["bare", "lse", "training", "paged", "compiled", "numpy"]


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_memory_does_not_grow_with_the_scores(grad: bool) -> None:
    """At 16k x 16k the scores of one head alone are 1 GiB; the inputs are 4 MiB each."""
    grown = run(
        f"""
        import resource, torch
        from polyattn import Causal, Window
        from polyattn.torch import attention

        def call(length):
            q, k, v = (torch.zeros(1, length, 1, 64, requires_grad={grad}) for _ in "qkv")
            out = attention(q, k, v, mask=Causal() & Window(left=2000), backend="native_cpu")
            if {grad}:
                out.sum().backward()

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # KiB on Linux

        call(512)
        before = peak()
        call(1 << 14)
        print(peak() - before)
        """
    )
    assert int(grown) < (120 if grad else 60), f"{grown.strip()} MiB"
