"""What tests of the native kernels share: calls in tiles, the processor's own and their twin's."""

from __future__ import annotations

import pytest

from polyattn.native import module


@pytest.fixture(params=["amx", "amx_twin"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force a form that multiplies in tiles, where this build has it and the process may use it."""
    form = str(request.param)
    if form not in module.isas() or module.load().refusal(module.isas().index(form)):
        pytest.skip(f"{form} does not run here")
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", form)
    return form
