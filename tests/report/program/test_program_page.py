"""The page of a program as HTML: whole, with nothing from outside, and hostile text harmless."""

import re

import pytest

from polyattn import TraceError
from polyattn.report.program import page, write_page
from polyattn.report.program.program_page import check_page
from tests.report.program.records import HOSTILE, hostile, long, many, one_process

SECTIONS = ("ran", "gains", "processes", "problems", "refused", "unseen")


def sections(text):
    return re.findall(r'<section id="(\w+)">', text)


def test_a_page_needs_nothing_else():
    text = page(many())
    assert text.startswith("<!doctype html>\n<!-- polyattn run -->\n")
    assert sections(text) == list(SECTIONS)
    assert not re.search(r"(src|href)=|url\(|style=|https?:", text)
    assert text.count("<script") == 2
    assert page(many()) == text


def test_only_what_there_is_has_a_section():
    assert sections(page(one_process())) == ["ran", "problems", "refused"]


def test_hostile_text_is_text():
    text = page(hostile())
    assert "<img" not in text
    assert "\u202e" not in text
    assert text.count("</script>") == 2
    assert "&lt;/script&gt;&lt;img src=x onerror=window.hit=1&gt;" in text
    assert HOSTILE not in text


def test_many_problems_are_cut_and_said():
    text = page(long(700))
    assert "The 500 most frequent of 700" in text
    assert len(text) < 1_500_000


def test_its_file_replaces_such_a_page_and_nothing_else(tmp_path):
    path = tmp_path / "r.html"
    check_page(path)
    write_page(one_process(), path)
    check_page(path)
    write_page(many(), path)
    assert path.read_text(encoding="utf-8") == page(many())
    path.write_text("notes of somebody")
    for write in (check_page, lambda at: write_page(many(), at)):
        with pytest.raises(TraceError, match="holds something else"):
            write(path)
    assert path.read_text() == "notes of somebody"
    with pytest.raises(TraceError, match="cannot be written"):
        write_page(many(), tmp_path)
