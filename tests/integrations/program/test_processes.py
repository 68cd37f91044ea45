"""A program's processes, really started: each is reached, counted apart, and obeys the requests."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.integrations.program.programs import GIVE_UP_S, calls, environment, ran, reported

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="forks")]

ASKS = """
import os, signal, subprocess, sys
import multiprocessing as mp
import torch, torch.nn.functional as F

def ask(count):
    q = torch.randn(1, 2, 8, 8)
    for _ in range(count):
        F.scaled_dot_product_attention(q, q, q)
    return count
"""


def test_multiprocessing_however_it_starts(tmp_path):
    text = f"""{ASKS}
if __name__ == "__main__":
    ask(1)
    for count, how in enumerate(("fork", "spawn", "forkserver"), 2):
        child = mp.get_context(how).Process(target=ask, args=(count,), name=how)
        child.start()
        child.join()
        assert child.exitcode == 0
    with mp.get_context("fork").Pool(2) as pool:  # whose workers are ended by a signal
        assert pool.map(ask, [10, 20, 30], 1) == [10, 20, 30]
    ask(1)
"""
    report = reported(tmp_path, text, options=["--backend", "sdpa_math"])
    found = calls(report)
    workers = sum(count for name, count in found.items() if name.startswith("ForkPoolWorker"))
    assert workers == 60
    named = {name: count for name, count in found.items() if not name.startswith("ForkPool")}
    assert named == {"the program": 2, "fork": 2, "spawn": 3, "forkserver": 4}
    assert ran(report) == {("sdpa_math", "SCOPE")}
    assert report["calls"] == 71
    assert len(report["classes"]) == 1
    groups = {one["group"] for one in report["processes"]}
    assert "ForkPoolWorker" in groups


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader(tmp_path, how):
    text = f"""{ASKS}
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, at):
        return ask(1)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context={how!r})
    assert sum(int(batch) for batch in loader) == 6
"""
    report = reported(tmp_path, text, options=["--never", "native_cpu"])
    assert calls(report) == {"DataLoader worker 0": 3, "DataLoader worker 1": 3}
    assert "native_cpu" not in {backend for backend, _ in ran(report)}
    workers = [one for one in report["processes"] if one["group"] == "DataLoader worker"]
    assert {one["state"] for one in workers} == {"ended"}
    assert {one["threads"] for one in workers} == {1}


def test_other_interpreters_threads_and_a_child_of_a_child(tmp_path):
    child = "import program; program.ask(3)"
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    text = f"""{ASKS}
import threading
if __name__ == "__main__":
    thread = threading.Thread(target=ask, args=(2,))
    thread.start()
    subprocess.run([sys.executable, "-c", {child!r}], check=True)
    subprocess.run([sys.executable, "-c", {grandchild!r}, {child!r}], check=True)
    subprocess.run(["sh", "-c", f"{{sys.executable}} -m program_too"], check=True)
    subprocess.run([sys.executable, "-E", "-c", {child!r}], check=True)
"""
    (tmp_path / "program_too.py").write_text("import program; program.ask(5)\n")
    report = reported(tmp_path, text)
    assert calls(report) == {"the program": 2, "python -c": 6, "python -m program_too": 5}
    (unseen,) = report["unseen"]
    assert "python -E reads no PYTHONPATH" in unseen["why"]


def test_what_a_killed_child_did_is_counted_and_said(tmp_path):
    text = f"""{ASKS}
def die(how):
    ask(4)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "error":
        raise ValueError("theirs")
    os._exit(3)

if __name__ == "__main__":
    for how in ("signal", "exit", "error"):
        child = mp.get_context("fork").Process(target=die, args=(how,), name=how)
        child.start()
        child.join()
    pid = os.fork()
    if pid == 0:
        ask(5)
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(pid, 0)
"""
    report = reported(tmp_path, text)
    states = {one["name"]: one["state"] for one in report["processes"]}
    assert states == {
        "the program": "ended", "signal": "cut short", "exit": "ended", "error": "ended",
        "program.py": "cut short",
    }  # fmt: skip
    assert calls(report) == {"signal": 4, "exit": 4, "error": 4, "program.py": 5}


def test_ranks_of_torchrun(tmp_path):
    text = """
import atexit, os
import torch, torch.distributed as dist, torch.nn.functional as F
dist.init_process_group("gloo")
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
q = layer(torch.randn(1, 2, 16, 8))
for _ in range(1 + dist.get_rank()):
    out = F.scaled_dot_product_attention(q, q, q)
out.sum().backward()
dist.barrier()
dist.destroy_process_group()
# a thread of gloo's that outlives the interpreter and drops a tensor aborts the process
# (pytorch/pytorch#179291), with polyattn or without: what runs at exit runs, the rest is left
atexit._run_exitfuncs()
os._exit(0)
"""
    (tmp_path / "train.py").write_text(text)
    launch = (
        "import sys\n"
        "from torch.distributed.run import main\n"
        "main(['--nnodes=1', '--nproc-per-node=2', '--master-addr=127.0.0.1',"
        " '--master-port=0', '--rdzv-backend=c10d', '--rdzv-endpoint=127.0.0.1:0', 'train.py'])\n"
    )
    report = reported(
        tmp_path, launch, options=["--backend", "sdpa_math"], env={"GLOO_SOCKET_IFNAME": "lo"}
    )
    assert calls(report) == {"rank 0": 1, "rank 1": 2}
    assert ran(report) == {("sdpa_math", "SCOPE")}
    ranks = [one for one in report["processes"] if one["group"] == "rank"]
    assert [one["name"] for one in sorted(ranks, key=lambda one: one["name"])] == [
        "rank 0", "rank 1",
    ]  # fmt: skip
    (one,) = report["classes"]
    assert "grad=True" in one["problem"]


def test_a_run_within_a_run(tmp_path):
    inner = "from program import ask; ask(7)"
    (tmp_path / "inner.py").write_text(inner)
    text = f"""{ASKS}
if __name__ == "__main__":
    ask(1)
    command = [sys.executable, "-m", "polyattn", "run", "--json=inner.json", "inner.py"]
    subprocess.run(command, check=True)
"""
    report = reported(tmp_path, text, options=["--backend", "sdpa_math"])
    assert calls(report) == {"the program": 1}
    assert [one["what"] for one in report["unseen"]] == ["polyattn run inner.py"]
    within = json.loads((tmp_path / "inner.json").read_text())
    assert calls(within) == {"the program": 7}
    assert ran(within) == {("sdpa_math", "SCOPE")}


def test_a_child_that_goes_on_is_counted_so_far_and_left_alone(tmp_path):
    text = f"""{ASKS}
if __name__ == "__main__":
    code = "import program, time; program.ask(2); print('asked', flush=True); time.sleep(3600)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout.readline() == b"asked\\n"
    with open("pid", "w") as file:
        file.write(str(child.pid))
    child.returncode = 0  # it is not waited for
"""
    report = reported(tmp_path, text)
    pid = int((tmp_path / "pid").read_text())
    try:
        states = {one["name"]: one["state"] for one in report["processes"]}
        assert states["python -c"] == "running"
        assert calls(report) == {"python -c": 2}
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_run_is_one_to_the_program(tmp_path, number):
    program = tmp_path / "waits.py"
    program.write_text(f"""{ASKS}
ask(3)
print("asked", flush=True)
import time
time.sleep({GIVE_UP_S})
""")
    said = tmp_path / "said.txt"
    with said.open("w") as errors, subprocess.Popen(
        [sys.executable, "-m", "polyattn", "run", program],
        stdout=subprocess.PIPE, stderr=errors, text=True,
        env=environment(TMPDIR=str(tmp_path)), start_new_session=True,
    ) as started:  # fmt: skip
        assert started.stdout.readline() == "asked\n"
        started.send_signal(number)
        code = started.wait(GIVE_UP_S)
    text = said.read_text()
    assert code == 128 + number
    assert "3 attention calls" in text
    assert ("KeyboardInterrupt" in text) == (number == signal.SIGINT)
    assert ("ended by a signal" in text) == (number == signal.SIGTERM)
    assert not list(tmp_path.glob("polyattn-run-*"))


def test_ctrl_c_at_a_terminal_reaches_the_program_once(tmp_path):
    """The terminal's signal goes to the whole group; the run must not pass on another one."""
    import pty

    program = tmp_path / "waits.py"
    program.write_text("""
import signal, time
seen = []
signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
print("ready", flush=True)
while not seen:
    time.sleep(0.05)
time.sleep(1)  # for another one, if it were sent
print("seen", len(seen), flush=True)
""")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(environment(TMPDIR=str(tmp_path)))
        os.execv(sys.executable, [sys.executable, "-m", "polyattn", "run", str(program)])
    heard = b""
    while b"ready" not in heard:
        heard += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while part := os.read(terminal, 1000):
            heard += part
    except OSError:  # its other side is gone
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"seen 1" in heard, heard
    os.close(terminal)
