"""A comparison's page as text: whole, escaped, allowed nothing but its own script, and bounded."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from polyattn.errors import TraceError
from polyattn.report.verdict import page
from tests.report.verdict.verdicts import HOSTILE, different, endless, hostile, long, same, unknown

VERDICTS = {
    "different": different, "same": same, "unknown": unknown, "one": lambda: unknown(1),
    "endless": endless, "hostile": hostile,
}  # fmt: skip


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.texts.append("")

    def handle_data(self, data):
        if self.found and self.found[-1][0] in ("script", "style") and self.cdata_elem:
            self.texts[-1] += data

    def of(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def embedded(text):
    """What the page's script reads."""
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(params=VERDICTS)
def text(request):
    return page(VERDICTS[request.param]())


def test_policy_allows_the_style_and_script_by_hash_and_nothing_else(text):
    read = Elements(text)
    metas = read.of("meta")
    assert metas[1]["http-equiv"] == "Content-Security-Policy"  # before all that it is about
    policy = dict(part.strip().split(" ", 1) for part in metas[1]["content"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    style, *scripts = read.texts
    run = [script for script in scripts if not script.startswith("{")]
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'"
        for one in (style, *run)
    ]
    assert policy["style-src"] == hashes[0]
    if run:
        assert [policy["script-src"]] == hashes[1:]


def test_nothing_is_loaded_from_anywhere(text):
    read = Elements(text)
    for tag, attributes in read.found:
        assert not attributes.keys() & {"src", "href", "style", "action", "srcset", "data"}, tag
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert {"img", "svg", "iframe", "link", "object"}.isdisjoint(tag for tag, _ in read.found)
    for one in read.texts:
        assert not re.search(r"https?:|url\(|@import|innerHTML|eval\(|document\.write", one)


def test_pages_of_other_verdicts_have_the_same_elements():
    """No name adds an element: what is there depends on how many, not on what they are."""
    plain = tuple(f"name{at}" for at in range(len(HOSTILE)))
    given = hostile()

    def clean(value):
        if isinstance(value, str):
            known = dict(zip(HOSTILE, plain, strict=True))
            known |= {name[::-1]: other + "r" for name, other in known.items()}
            return known.get(value, value)
        return tuple(map(clean, value)) if isinstance(value, tuple) else value

    rows = tuple(
        replace(
            row,
            **{
                name: clean(getattr(row, name))
                for name in ("module", "reference_module", "cls", "note", "how")
            },
        )
        for row in given.rows
    )
    fields = ("module", "reference_module", "at", "tensor", "after", "between", "lacking", "others")
    culprit = replace(
        given.culprit, evidence="name8", **{n: clean(getattr(given.culprit, n)) for n in fields}
    )
    harmless = replace(
        given,
        rows=rows,
        culprit=culprit,
        notes=plain,
        reasons=plain,
        guards={
            clean(name): replace(g, name=clean(name), said=clean(name))
            for name, g in given.guards.items()
        },
        coverage=replace(given.coverage, only_reference=plain, only_port=plain),
    )
    found = [[tag for tag, _ in Elements(page(one)).found] for one in (given, harmless)]
    assert found[0] == found[1]


def test_only_printable_text_outside_of_line_ends():
    text = page(hostile())
    assert {c for c in text if not c.isprintable()} == {"\n"}
    text.encode("utf-8")  # also of halves of characters
    assert r"\u202egnp.exe" in text  # shown, not obeyed
    assert "</script><img" not in text


def test_names_are_different_when_cut_and_as_long_as_a_line():
    names = embedded(page(hostile()))["names"]
    assert len(names) == len(set(names))
    assert max(map(len, names)) < 300
    assert any(name.endswith("(10000 characters) #2") for name in names)


def test_columns_hold_what_rows_do():
    verdict = different()
    data = embedded(page(verdict))
    columns = data["rows"]
    assert {len(column) for column in columns.values()} == {len(verdict.rows)}
    for at, row in enumerate(verdict.rows):
        assert data["names"][columns["module"][at]] == row.module
        assert data["words"][columns["verdict"][at]] == row.verdict
        assert data["steps"][columns["step"][at]] == str(row.step)
        assert columns["out"][at] == pytest.approx(row.error_out, rel=1e-3)
    assert verdict.rows[data["culprit"]["row"]].verdict == "culprit"
    shows = verdict.rows[data["culprit"]["shows"]]
    assert (shows.module, shows.step, data["culprit"]["side"]) == ("layers.1.act", 2, "in")
    assert data["total"] == len(verdict.rows)


def test_numbers_that_json_does_not_have():
    data = embedded(page(endless()))
    assert {"inf", "nan", None, 0} <= set(data["rows"]["in"])
    assert all(not isinstance(one, float) or one == one for one in data["rows"]["out"])


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (different(), ["different: the code of ", "<code>layers.1</code>", "1,000 times",
                       "step 2, call 2", "last that agreed", "cudnn.benchmark", "one note",
                       "a.jsonl", "only in the port"]),
        (same(), ["same: no module", "0.04 times the threshold"]),
        (unknown(), ["cannot say whether", "the first reason", "No call of any module"]),
        (replace(different(), rows=()), ["different: the code of"]),
    ],
    ids=["different", "same", "unknown", "no rows"],
)  # fmt: skip
def test_verdict_is_there_without_a_script(verdict, said):
    text = page(verdict)
    static = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    for one in said:
        assert one in static
    assert static.count("<tr") == (len(verdict.rows) + 1 if verdict.rows else 0)
    assert ("<script" in text) == bool(verdict.rows)


def test_many_rows_are_bounded_around_the_culprit_and_it_says_so():
    verdict = long(60_000)
    assert len(verdict.rows) > 60_000
    text = page(verdict)
    data = embedded(text)
    assert len(data["rows"]["module"]) == 20_000
    assert len(text) < 4_000_000
    first, total = data["first"], len(verdict.rows)
    assert f"rows {first + 1} to {first + 20_000} of {total} are here, those around" in text
    assert verdict.rows[first + data["culprit"]["row"]].verdict == "culprit"
    static = text[text.index('id="static"') : text.index('id="data"')]
    assert static.count("<tr") == 201
    assert "of the table rows" in static.lower()
    assert len(embedded(page(verdict, rows=100))["rows"]["module"]) == 100


def test_large_names_take_rows_away_and_not_the_disk():
    verdict = different()
    row = verdict.rows[0]
    many = tuple(
        replace(row, module=f"{at}" + "\U0001f600" * 9000, note="\u4e00" * 400 + str(at))
        for at in range(8_000)
    )
    text = page(replace(verdict, rows=many))
    assert len(text) < 13_000_000
    assert "left out" in text


def test_a_page_of_no_rows_is_refused():
    with pytest.raises(TraceError, match="got rows=0, expected how many"):
        page(different(), rows=0)


def test_the_same_verdict_makes_the_same_page():
    assert page(different()) == page(different())
