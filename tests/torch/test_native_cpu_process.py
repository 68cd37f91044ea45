"""The native kernels in other processes: forks, every instruction set, the memory they take."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from polyattn.native import module
from polyattn.registry import Available

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
