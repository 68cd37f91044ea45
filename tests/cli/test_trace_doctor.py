"""`polyattn doctor` and the settings of the activation trace."""

import json

import pytest

from polyattn.cli import main

NAMES = ("ACTIVATIONS", "LAYERS", "STATS", "STEPS", "INPUTS", "OUTPUT", "OVERWRITE")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Without the variables of whoever runs the tests."""
    for name in NAMES:
        monkeypatch.delenv(f"POLYATTN_TRACE_{name}", raising=False)


def doctor(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    shown = {name: report["settings"].get(f"POLYATTN_TRACE_{name}") for name in NAMES}
    return code, shown, [line for line in report["amiss"] if "TRACE" in line]


def test_as_they_are_by_default(capsys):
    _, shown, amiss = doctor(capsys)
    assert shown == {
        "ACTIVATIONS": "off",
        "LAYERS": None,
        "STATS": None,
        "STEPS": None,
        "INPUTS": "on",
        "OUTPUT": "polyattn-trace.jsonl",
        "OVERWRITE": "off",
    }
    assert amiss == []
    main(["doctor"])
    assert "POLYATTN_TRACE_ACTIVATIONS" in capsys.readouterr().out


def test_what_is_set_is_shown(capsys, monkeypatch, tmp_path):
    output = str(tmp_path / "run-<pid>.jsonl")
    given = ("1", r"layers\.\d$", "abs_mean,max", "0-2,5", "no", output, "yes")
    for name, value in zip(NAMES, given, strict=True):
        monkeypatch.setenv(f"POLYATTN_TRACE_{name}", value)
    _, shown, amiss = doctor(capsys)
    assert tuple(shown.values()) == ("on", given[1], given[2], "0,1,2,5", "off", output, "on")
    assert amiss == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LAYERS", "(", "expected a regular expression"),
        ("STATS", "maxx", "Did you mean 'max'"),
        ("STEPS", "x", "POLYATTN_TRACE_STEPS"),
        ("ACTIVATIONS", "perhaps", "POLYATTN_TRACE_ACTIVATIONS"),
        ("INPUTS", "few", "POLYATTN_TRACE_INPUTS"),
        ("OVERWRITE", "2", "POLYATTN_TRACE_OVERWRITE"),
    ],
)
def test_what_no_trace_would_take_is_amiss(capsys, monkeypatch, name, value, said):
    monkeypatch.setenv(f"POLYATTN_TRACE_{name}", value)
    code, _, amiss = doctor(capsys)
    assert code == 1
    assert len(amiss) == 1
    assert said in amiss[0]
