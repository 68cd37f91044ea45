"""DTensors in attention: on two ranks the parts are what the whole call is."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("sharded_ranks.py")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
def test_two_ranks_compute_what_one_does() -> None:
    port = _free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), "2", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = []
    try:
        told = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(told)
