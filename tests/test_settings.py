"""The environment: parsed once, again when it changes, and never ignored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from polyattn import SettingsError, settings
from polyattn.cli import main
from polyattn.problem import MaskFacts, Problem
from polyattn.selection import scopes
from polyattn.tuning import Key, Measurement, TuningTable
from polyattn.tuning.lookup import problem_class


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
    assert (asked.backend, asked.on_unsupported) == ("sdpa_math", "fallback")
    assert asked.cache_dir == Path("/somewhere")
    assert (asked.tuning, asked.plugins) == (False, False)


def test_a_setting_is_one_row() -> None:
    known = [row.name for row in dataclasses.fields(settings.Settings)]
    variables = [f"POLYATTN_{name.upper()}" for name in known]
    assert list(settings.VARIABLES) == variables
    assert [variable for variable, _, _ in settings.rows()] == variables
    assert all(said and about for _, said, about in settings.rows())
    plain = settings.Settings.parse({"HOME": "/home/me"})
    assert list(plain.shown()) == variables
    assert settings.Settings.parse({"HOME": "/home/me"} | _given(plain)) == plain


def _given(shown: settings.Settings) -> dict[str, str]:
    """What is shown of settings, set."""
    return {name: value for name, value in shown.shown().items() if value is not None}


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("BACKEND", " Flex", "flex"),
        ("CACHE_DIR", "/tmp/here", "/tmp/here"),
        ("TUNING", "OFF", "off"),
        ("TUNING", "0", "off"),
        ("CALIBRATION", "true", "on"),
        ("NATIVE_ISA", "avx2", "avx2"),
        ("TRACE_ACTIVATIONS", "yes", "on"),
        ("TRACE_STATS", "a, b,", "a,b"),
        ("TRACE_STEPS", "5,0-2", "0,1,2,5"),
        ("TRACE_LAYERS", " ", None),
        ("TRACE_OUTPUT", "", "polyattn-trace.jsonl"),
    ],
)
def test_settings_are_shown_as_they_would_be_set(
    variable: str, value: str, shown: str | None
) -> None:
    assert (
        settings.Settings.parse({f"POLYATTN_{variable}": value}).shown()[f"POLYATTN_{variable}"]
        == shown
    )


@pytest.mark.parametrize("variable", settings.VARIABLES)
def test_a_change_of_any_variable_is_seen(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    unset = settings.current()
    other = {
        "_ON_UNSUPPORTED": "fallback",
        "_TUNING": "off",
        "_PLUGINS": "off",
        "_CALIBRATION": "off",
    }
    other |= {"_NATIVE_ISA": "generic", "_TRACE_STEPS": "3", "_TRACE_INPUTS": "0"}
    monkeypatch.setenv(variable, other.get(variable.removeprefix("POLYATTN"), "1"))
    assert settings.current() != unset
    monkeypatch.delenv(variable)
    assert settings.current() == unset


@pytest.mark.parametrize("variable", ["ON_UNSUPPORTED", "TUNING", "PLUGINS", "CALIBRATION"])
def test_a_value_that_means_nothing_lists_the_valid_ones(variable: str) -> None:
    with pytest.raises(SettingsError, match=rf"got POLYATTN_{variable}='maybe', expected one of"):
        settings.Settings.parse({f"POLYATTN_{variable}": "maybe"})


@pytest.mark.parametrize("variable", ["CACHE_DIR", "TRACE_OUTPUT"])
def test_a_home_that_is_none_is_an_error_that_says_what_to_write(variable: str) -> None:
    said = rf"got POLYATTN_{variable}='~nobodyhere/x'.* without ~"
    with pytest.raises(SettingsError, match=said):
        settings.Settings.parse({f"POLYATTN_{variable}": "~nobodyhere/x"})


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    pwd = pytest.importorskip("pwd")

    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "POLYATTN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_the_table_is_in_memory_and_says_so(homeless: None) -> None:
    found = settings.Settings.parse({})
    assert found.cache_dir == settings.NO_HOME
    assert settings.Settings.parse({"XDG_CACHE_HOME": "/c"}).cache_dir == Path("/c/polyattn")
    assert settings.Settings.parse({"HOME": "/home/me"}).cache_dir.parts[2] == "me"
    with pytest.raises(SettingsError, match="without ~"):
        settings.Settings.parse({"POLYATTN_CACHE_DIR": "~/x"})
    key = Key("cpu:x86-64 avx2 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
    one = Measurement("sdpa_math", "{}", 4e-5, 3e-5, 5e-5, 20, 1e-7, 1e-6, verified=True)
    with TuningTable(found.cache_dir / "tuning.sqlite3") as table:
        assert table.best(key) == []
        table.record(key, [one])
        assert [row.backend for row in table.best(key)] == ["sdpa_math"]
        assert not table.persistent
        (said,) = table.notices
    assert "no home directory" in said and "kept in memory" in said


def test_without_a_home_calls_and_commands_run(
    homeless: None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.reload()
    try:
        assert main(["explain", "--q", "1,128,8,64", "--device", "zen4", "--causal"]) == 0
        main(["doctor"])
    finally:
        settings.reload()
    assert "no home directory" in capsys.readouterr().out


def test_a_change_is_seen_and_forgets_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    before, epoch = settings.current(), scopes.state.epoch
    assert settings.current() is before
    monkeypatch.setenv("POLYATTN_ON_UNSUPPORTED", "fallback")
    assert settings.current().on_unsupported == "fallback"
    assert scopes.state.epoch != epoch
    epoch = scopes.state.epoch
    settings.reload()
    assert scopes.state.epoch != epoch


def test_a_block_runs_under_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_TUNING", "off")
    monkeypatch.delenv("POLYATTN_CACHE_DIR", raising=False)
    settings.reload()
    before, epoch = settings.current(), scopes.state.epoch
    changes = {"POLYATTN_TUNING": "on", "POLYATTN_CACHE_DIR": "/elsewhere"}
    with pytest.raises(KeyError), settings.within(changes) as found:
        assert found == settings.current() and scopes.state.epoch != epoch
        assert found.tuning and found.cache_dir == Path("/elsewhere")
        raise KeyError
    assert settings.current() == before and not before.tuning
    with pytest.raises(SettingsError), settings.within({"POLYATTN_TUNING": "perhaps"}):
        pass
    assert settings.current() == before


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("POLYATTN_TUNNING", "POLYATTN_TUNING"),
        ("POLYATTN_CACHEDIR", "POLYATTN_CACHE_DIR"),
        ("polyattn_backend", "POLYATTN_BACKEND"),
    ],
)
def test_misspelt_variables_are_named(name: str, meant: str) -> None:
    (said,) = settings.misspelt({name: "1", meant: "x", "PATH": ""})
    assert name in said and repr(meant) in said


def test_other_variables_of_ours_are_no_misspelt_settings() -> None:
    others = ("RUN", "CXX", "SANITIZE", "TESTS", "VERSION")
    assert settings.misspelt(dict.fromkeys(settings.VARIABLES, "")) == []
    assert settings.misspelt({f"POLYATTN_{name}": "1" for name in others}) == []
