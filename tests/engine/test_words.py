"""`--tokenizer`: which tokenizer it means, and what is refused."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from engine.commands import words
from engine.config import build_config
from streams.errors import ConfigError

VOCABULARY = {"<eos>": 0, "the": 1, "answer": 2, "is": 3, "7": 4}


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("topic")
    words.add_tokenizer(parser)
    return parser.parse_args(["trajectories", *given])


def config_with(folder: Path, **sections: dict):
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "q", "label": "7"}\n')
    return build_config(
        {
            "run": {"name": "run", "dir": str(folder / "run")},
            "data": {"path": str(rows)},
            "reward": {"function": "exact"},
            "rollout": {"backend": "scripted", **sections.pop("rollout", {})},
            "trainer": {"backend": "scalar"},
            **sections,
        }
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face folder with nothing but its tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    folder.mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="<eos>"))
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_without_the_option_there_is_none(tmp_path: Path):
    assert words.decoder(arguments(), config_with(tmp_path)) is None


def test_a_path_names_a_folder_or_its_file(model: Path, tmp_path: Path):
    for path in (model, model / "tokenizer.json"):
        text = words.decoder(arguments("--tokenizer", str(path)), config_with(tmp_path))
        assert text is not None
        assert text([1, 2, 3, 4, 0]) == "the answer is 7 <eos>", "special tokens are kept"
        assert text([]) == ""


def test_alone_it_is_the_one_of_the_runs_model(model: Path, tmp_path: Path):
    config = config_with(tmp_path, model={"path": str(model)})
    text = words.decoder(arguments("--tokenizer"), config)
    assert text is not None and text([2, 4]) == "answer 7"


def test_ids_that_the_tokenizer_does_not_have_are_shown_as_numbers(model: Path, tmp_path: Path):
    text = words.decoder(arguments("--tokenizer", str(model)), config_with(tmp_path))
    assert text is not None
    assert text([1, 2, 99, 5, 4]) == "the answer<99><5>7"
    assert text([99]) == "<99>"


def test_a_scripted_run_has_its_words_or_bytes(tmp_path: Path):
    config = config_with(tmp_path, rollout={"options": {"words": ["no", "yes"]}})
    text = words.decoder(arguments("--tokenizer"), config)
    assert text is not None and text([1, 0, 2]) == "yes no<2>"
    text = words.decoder(arguments("--tokenizer"), config_with(tmp_path))
    assert text is not None and text([104, 105, 256, 300]) == "hi<300>"


def test_what_is_no_tokenizer_is_refused(model: Path, tmp_path: Path):
    config = config_with(tmp_path)
    with pytest.raises(ConfigError, match=r"--tokenizer /nowhere: no tokenizer.json there; save one with"):
        words.decoder(arguments("--tokenizer", "/nowhere"), config)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is no tokenizer"):
        words.decoder(arguments("--tokenizer", str(model)), config)


def test_a_missing_library_is_named_with_its_extra(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs the tokenizers library; pip install 'millstream\[train\]'"):
        words.decoder(arguments("--tokenizer", str(model)), config_with(tmp_path))


def test_neither_torch_nor_transformers_is_needed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert words.decoder(arguments("--tokenizer", str(model)), config_with(tmp_path)) is not None
