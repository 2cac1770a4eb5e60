"""`millstream show` as its users meet it: exit codes, what goes where, and the sentences for what is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main
from streams.open import open_log
from tests.support.lives import story

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "my.toml"
    file.write_text(
        f"""
[run]
name = "run"
dir = "{tmp_path}/run"
[log]
partitions = 1
url = "file://{tmp_path}/log"
[data]
path = "{tmp_path}/prompts.jsonl"
[reward]
function = "exact"
[rollout]
backend = "scripted"
[trainer]
backend = "scalar"
"""
    )
    return str(file)


@pytest.fixture
def told(config: str, tmp_path: Path) -> str:
    """The configuration of a run with the story of tests/support/lives.py in an embedded log."""
    with open_log(f"file://{tmp_path}/log") as log:
        story(log)
    return config


def test_a_sample_is_told_as_plain_text_when_piped(told: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", told, "sample", "0-0/0/0"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(
        "sample 0-0/0/0  of run run\nTrained by step 1: version 0 → 1, 4 tokens with advantage +1;"
    )
    assert "\x1b" not in out


def test_a_terminal_gets_colours_and_the_same_words(
    told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["show", told, "step", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1;32mMade version 1 from version 0 (1 group, 2 samples, 8 tokens)." in out


def test_json_is_one_object_with_the_facts(told: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", told, "version", "0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["version"], shown["digest"]) == ("version", 0, "digest of 0")
    assert shown["generated"][0]["outcomes"] == {"dropped: stale": 2, "trained": 3}
    assert main(["show", told, "group", "0-3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["verdict"]["reason"], len(shown["failures"])) == ("reward_timeout", 3)


def test_html_is_written_to_the_file_and_escapes_what_a_prompt_holds(
    told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "sample.html"
    assert main(["show", told, "sample", "0-0/0/0", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"millstream: wrote {page}\n"
    text = page.read_text()
    assert "prompt &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script" not in text


def test_html_into_a_folder_that_is_not_there_fails_with_its_name(
    told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["show", told, "step", "1", "--html", str(tmp_path / "no" / "x.html")]) == 1
    assert f"{tmp_path}/no/x.html: No such file or directory" in capsys.readouterr().err


def test_tokens_are_text_with_the_runs_own_tokenizer(told: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", told, "sample", "0-0/0/0", "--set", "rollout.options={words=[\"a\",\"b\",\"c\"]}", "--json",
                 "--tokenizer"]) == 0  # fmt: skip
    spans = json.loads(capsys.readouterr().out)["spans"]
    assert spans[0]["text"] == "<10><11>", "ids beyond the vocabulary stay visible"
    assert main(["show", told, "sample", "0-0/0/0", "--json", "--tokenizer"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["prompt_text"] == "\x01\x02", "the scripted engine's tokens are bytes"


@pytest.mark.parametrize(
    ("kind", "text", "code", "words"),
    [
        ("group", "0-99", 1, "no group '0-99' in run run; nearest: 0-7, 0-6, 0-5"),
        ("sample", "0-0/9/0", 1, "no sample '0-0/9/0'; group 0-0 has 0-0/0/0, 0-0/1/0"),
        ("step", "12", 1, "run run has steps 1 to 4"),
        ("version", "12", 1, "run run has published versions 0 to 4"),
        ("group", "0-3/1/0", 2, "did you mean `show … sample 0-3/1/0`?"),
        ("step", "first", 2, "a step is a number from 1 on"),
    ],
)
def test_an_id_that_is_not_there_is_1_and_one_that_cannot_be_is_2(
    told: str, kind: str, text: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["show", told, kind, text]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_an_unknown_kind_is_wrong_usage(told: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["show", told, "epoch", "1"])
    assert end.value.code == 2
    assert "invalid choice: 'epoch'" in capsys.readouterr().err


def test_a_run_that_was_never_started_says_so(config: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", config, "step", "1"]) == 2
    assert "this run has not been started" in capsys.readouterr().err


def test_a_run_without_topics_says_so(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with open_log(f"file://{tmp_path}/log"):
        pass
    assert main(["show", config, "group", "0-0"]) == 1
    assert "no group '0-0': run run has dispatched none yet" in capsys.readouterr().err


def test_show_needs_no_torch(told: str):
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from engine.cli import main\n"
        f"sys.exit(main(['show', {told!r}, 'sample', '0-0/0/0']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (0, "")
