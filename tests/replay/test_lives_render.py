"""Lives as text and as a page: nothing acts on a terminal or a browser, nothing is fetched, everything is there."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from replay.lives.facts import Life, Span
from replay.lives.page import as_page, esc
from replay.lives.phrases import plain, shortened, size
from replay.lives.sheet import GOOD, WAITING, Facts, Sheet, Table, Tokens
from replay.lives.sheets import sheet_of
from replay.lives.tell import life
from replay.lives.text import MOST_SPANS, as_text
from tests.support.lives import Story, story

IDS = [
    ("sample", "0-5/0/0"),
    ("sample", "0-3/1/0"),
    ("group", "0-4"),
    ("group", "0-6"),
    ("step", "3"),
    ("version", "2"),
]
VOID_TAGS = {"meta", "link", "br", "img", "rect", "wbr"}


@pytest.fixture(scope="module")
def told() -> Story:
    return story()


def sheet(told: Story, kind: str, text: str) -> Sheet:
    return sheet_of(life(told.log, told.topics, kind, text))


class Elements(HTMLParser):
    """Checks that what is opened is closed, and collects tags, attributes and ids."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_TAGS:
            assert self.open.pop() == tag


# ---------------------------------------------------------------- both
@pytest.mark.parametrize(("kind", "text"), IDS)
def test_every_life_has_a_text_and_a_well_formed_page_that_fetches_nothing(told: Story, kind: str, text: str):
    paper = sheet(told, kind, text)
    assert paper.verdict in as_text(paper)
    page = as_page(paper)
    elements = Elements(page)
    assert not {"script", "link", "img", "iframe", "object", "form", "base"} & set(elements.tags)
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name in ("src", "style")]
    targets = [value for name, value in elements.attributes if name == "href"]
    ids = {value for name, value in elements.attributes if name == "id"}
    assert {target.removeprefix("#") for target in targets} <= ids, "every link leads to a place on this page"
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize(("kind", "text"), IDS)
def test_every_section_of_a_sheet_is_in_the_text_and_on_the_page(told: Story, kind: str, text: str):
    paper = sheet(told, kind, text)
    for section in paper.sections:
        assert f"\n{section.title}\n" in as_text(paper)
        assert f">{esc(section.title)}</h2>" in as_page(paper)


@pytest.mark.parametrize(("kind", "text"), IDS)
def test_json_holds_the_kind_and_every_field(told: Story, kind: str, text: str):
    found: Life = life(told.log, told.topics, kind, text)
    shown = msgspec.json.decode(msgspec.json.encode(found, enc_hook=repr))
    assert shown["kind"] == kind
    assert set(shown) == {"kind", *(field.name for field in msgspec.structs.fields(found))}


# ---------------------------------------------------------------- what the log may hold
NASTY = "<script>alert(1)</script> \x1b[2J\x07 \"quoted\" 'single' & \u202e \x00"


def nasty() -> Sheet:
    span = Span(begin=0, end=1, by="policy", use="trained", epoch=1, version=0, ids=[5], text=NASTY)
    sections = [
        Facts(NASTY, [(NASTY, NASTY)]),
        Table(NASTY, [NASTY], [[NASTY]]),
        Tokens(NASTY, NASTY, [span]),
    ]
    return Sheet(NASTY, NASTY, GOOD, NASTY, [NASTY], [NASTY], list(sections))


def test_what_a_model_wrote_cannot_act_on_a_browser():
    page = as_page(nasty())
    elements = Elements(page)
    assert "script" not in elements.tags
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert not re.search("[\x00\x07\x1b\u202e]", page)
    titles = [value for name, value in elements.attributes if name == "aria-label"]
    assert any('"quoted"' in title for title in titles), "quotes stay inside their attribute"


def test_what_a_model_wrote_cannot_act_on_a_terminal():
    text = as_text(nasty())
    assert not re.search("[\x00\x07\x1b\u202e]", text)
    assert r"\x1b[2J" in text


def test_lines_of_a_text_stay_lines_on_the_page_and_are_escapes_in_the_terminal():
    paper = Sheet("x", "run", WAITING, "v", [], [], [Facts("f", [("a", "one\ntwo")])])
    assert "<dd>one\ntwo</dd>" in as_page(paper)
    assert r"a  one\ntwo" in as_text(paper)


def test_looks_are_said_in_words_too(told: Story):
    page = as_page(sheet(told, "sample", "0-5/0/0"))
    for words in (
        'title="tokens 0 to 1, policy, too old, e1-v1"',
        'title="tokens 2 to 2, environment, masked, e10-v2"',
        'title="tokens 3 to 4, policy, trained, e10-v2"',
    ):
        assert words in page
    assert '<span class="tok too_old">too old</span>' in page, "the legend"


# ---------------------------------------------------------------- long things
def test_a_response_of_many_turns_is_cut_in_the_terminal_and_whole_on_the_page():
    spans = [
        Span(begin=at, end=at + 1, by="policy", use="trained", epoch=1, version=0, ids=[at])
        for at in range(200)
    ]
    paper = Sheet("x", "run", GOOD, "v", [], [], [Tokens("tokens", "p", spans)])
    assert f"… {200 - MOST_SPANS} more stretches" in as_text(paper)
    assert as_page(paper).count('<span class="tok trained v0"') == 200


def test_a_table_too_wide_for_a_line_becomes_blocks():
    paper = Sheet("x", "run", GOOD, "v", [], [], [Table("t", ["at", "why"], [["1", "w" * 200], ["2", "-"]])])
    assert f"  at   1\n  why  {'w' * 200}\n\n  at  2\n" in as_text(paper)


def test_words_for_values():
    assert (size(0), size(1023), size(216064), size(5 << 30)) == ("0 B", "1023 B", "211 KiB", "5 GiB")
    assert shortened("abcdef", 4) == "abcd … (2 more characters)"
    assert plain("a\nb", keep="\n") == "a\nb"
