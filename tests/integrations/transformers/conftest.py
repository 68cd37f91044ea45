"""Every test here runs with the implementation registered, and leaves transformers as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from polyattn.integrations.transformers import register, unregister


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    unregister()
