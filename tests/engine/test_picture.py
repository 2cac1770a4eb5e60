"""Pictures: which kinds there are, and what is refused before any work is done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.picture import Panel, lines, page, require_picture
from streams.errors import ConfigError

PANELS = [
    Panel("throughput", "limit", "steps/s", [("predicted", [0, 1, 2], [0.1, 0.2, 0.3])], [(1, "knee")]),
    Panel("nothing yet", "limit", "steps/s", []),
]


def test_a_png_is_one_and_html_holds_the_drawing_itself(tmp_path: Path):
    assert lines(tmp_path / "a.png", PANELS, title="t") is None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    lines(tmp_path / "a.html", PANELS, title="limits & co")
    text = (tmp_path / "a.html").read_text()
    assert text.startswith("<!doctype html>") and text.count("<svg") == 1
    assert "<title>limits &amp; co</title>" in text


def test_without_a_path_the_drawing_comes_as_svg():
    svg = lines(None, PANELS, title="t")
    assert svg is not None and svg.startswith("<svg") and svg.rstrip().endswith("</svg>")


def test_a_page_holds_its_parts():
    assert "<p>one</p>\n<p>two</p>" in page("t", "<p>one</p>", "<p>two</p>")


@pytest.mark.parametrize(
    ("name", "says"),
    [("a.gif", r"must end in \.png, \.svg, \.html"), ("no/a.png", "there is no folder .*no")],
)
def test_a_picture_that_cannot_be_made_is_refused_at_once(tmp_path: Path, name: str, says: str):
    with pytest.raises(ConfigError, match=says):
        require_picture(tmp_path / name)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'millstream\[train\]'"):
        lines(tmp_path / "a.png", PANELS, title="t")
