"""A Ctrl-C anywhere while weights are put into files leaves no file, and the model as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import offload

_WRITE = {"_write", "_write_manifest", "rename"}
"""The functions through which a file appears."""


def interrupted(model: nn.Module, folder: Path, at: int) -> bool:
    """Begin an offload that is interrupted at a line of what writes files; whether it was."""
    seen = 0

    def tracer(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_name not in _WRITE or "offload" not in frame.f_code.co_filename:
            return None
        seen += event == "line"
        if seen == at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        handle = offload(model, device="cpu", disk=folder)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    handle.detach()
    return False


def test_no_file_is_left(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).eval().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    at = 1
    while interrupted(model, tmp_path, at):
        assert list(tmp_path.iterdir()) == [], at
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items()), at
        at += 1
    assert at > 10
