"""The environment: parsed once, again when it changes, and never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyattn import SettingsError, scopes, settings
from polyattn.problem import MaskFacts, Problem
from polyattn.tables import problem_class


def test_defaults_and_values() -> None:
    plain = settings.Settings.parse({"HOME": "/home/me"})
    assert plain.backend is None
    assert plain.on_unsupported == "error"
    assert plain.tuning and plain.plugins
    assert plain.cache_dir.parts[:3] == ("/", "home", "me")
    asked = settings.Settings.parse(
        {
            "POLYATTN_BACKEND": " SDPA_Math ",
            "POLYATTN_ON_UNSUPPORTED": "Fallback",
            "POLYATTN_CACHE_DIR": "/somewhere",
            "POLYATTN_TUNING": "off",
            "POLYATTN_PLUGINS": "off",
        }
    )
    assert asked == settings.Settings("sdpa_math", "fallback", Path("/somewhere"), False, False)


@pytest.mark.parametrize("variable", ["ON_UNSUPPORTED", "TUNING", "PLUGINS"])
def test_a_value_that_means_nothing_lists_the_valid_ones(variable: str) -> None:
    with pytest.raises(SettingsError, match=rf"got POLYATTN_{variable}='maybe', expected one of"):
        settings.Settings.parse({f"POLYATTN_{variable}": "maybe"})


def test_a_change_is_seen_and_forgets_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    before, epoch = settings.current(), scopes.state.epoch
    assert settings.current() is before
    monkeypatch.setenv("POLYATTN_ON_UNSUPPORTED", "fallback")
    assert settings.current().on_unsupported == "fallback"
    assert scopes.state.epoch != epoch
    epoch = scopes.state.epoch
    settings.reload()
    assert scopes.state.epoch != epoch


def test_problem_classes_round_lengths_and_keep_what_changes_the_choice() -> None:
    p = Problem(batch=5, q_len=70, kv_len=90, heads=8, kv_heads=2, head_dim=64)
    assert problem_class(p) == problem_class(p.with_(batch=8, q_len=128, kv_len=128))
    for change in ({"dtype": "float16"}, {"grad": True}, {"kv_len": 129}, {"heads": 16}):
        assert problem_class(p) != problem_class(p.with_(**change))
    dense = [
        MaskFacts.parse(f"Dense({dims})", None) for dims in ("5x1x70x90", "7x1x60x80", "1x8x70x90")
    ]
    classes = [problem_class(p.with_(mask=mask)) for mask in dense]
    assert classes[0] == classes[1] != classes[2]
    windows = [MaskFacts.parse(f"Window(left={n}, right=None)", None) for n in (16, 64)]
    assert problem_class(p.with_(mask=windows[0])) != problem_class(p.with_(mask=windows[1]))
