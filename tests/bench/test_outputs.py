"""What a bench is to write is tried before it measures, and nothing is left of the try."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from polyattn.bench import command, main

ASKS = [
    (["overhead", "--out"], "overhead"),
    (["cpu", "--record"], "cpu"),
    (["harm", "--plot"], "harm"),
    (["trace", "--json"], "trace"),
]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have no bench measure; which was asked to, in order."""
    asked: list[str] = []

    def note(options) -> int:
        asked.append(options.what)
        return 0

    for module, name in ((command, "_overhead"), (command, "_cpu"), (command.harm, "run"),
                         (command.trace, "run")):  # fmt: skip
        monkeypatch.setattr(module, name, note)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    return asked


@pytest.mark.parametrize(("argv", "what"), ASKS)
def test_what_cannot_be_written_is_said_first(
    argv: list[str], what: str, tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r.json", Path("/dev/null/r.json")):
        assert main([*argv, str(path)]) == 2
        assert f"{argv[1]}={path}" in "".join(capsys.readouterr().err.split("\n"))
    assert not measured and [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("argv", "what"), ASKS)
def test_the_try_leaves_everything_as_it_was(
    argv: list[str], what: str, tmp_path: Path, measured: list[str]
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    for path in (kept, tmp_path / "a" / "b" / "r.json", Path("/dev/stdout")):
        assert main([*argv, str(path)]) == 0
    assert measured == [what] * 3
    assert kept.read_text() == "kept" and [one.name for one in tmp_path.iterdir()] == ["kept.json"]


def test_a_plot_that_nothing_can_draw_is_said_first(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["overhead", "--plot", str(tmp_path / "p.png")]) == 2
    assert "matplotlib" in capsys.readouterr().err and not measured
