"""Is the model whole, and do both sides read texts alike? Real tokenizers, in processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine.doctor import model
from engine.doctor.foreign import ForeignFailed, argument, run_script
from engine.doctor.result import Request
from engine.settings import (
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SGLangConfig,
    TeacherConfig,
)

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def tokenizer(folder: Path, words: tuple[str, ...] = ("a", "b", "c"), template: str = CHATML) -> str:
    """A Hugging Face folder: config.json, weights in name alone, a tokenizer of whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: at for at, word in enumerate(("<unk>", *words))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    )
    (folder / "model.safetensors").write_bytes(b"weights")
    return str(folder)


def request(path: str, *, teacher: str = "", chat: bool = False, args: tuple[str, ...] = ()) -> Request:
    sglang = SGLangConfig(python=sys.executable, args=args)
    config = Config(
        model=ModelConfig(path=path),
        data=DataConfig(apply_chat_template=chat),
        teacher=TeacherConfig(path=teacher),
        rollout=RolloutConfig(backend="sglang" if args else "torch", sglang=sglang),
        reward=RewardConfig(function="exact"),
    )
    return Request(config=config, has_config=True)


def test_a_model_without_one_of_its_files_fails_by_the_name_of_the_file(tmp_path: Path) -> None:
    path = Path(tokenizer(tmp_path / "model"))
    assert model.whole(request(str(path))).status == "pass"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model-1.safetensors").write_bytes(b"")
    result = model.whole(request(str(path)))
    assert result.status == "fail" and "without model-2.safetensors (1 of 2)" in result.evidence
    (path / "model.safetensors.index.json").unlink()
    (path / "tokenizer.json").unlink()
    assert "no tokenizer" in model.whole(request(str(path))).evidence
    assert "no readable config.json" in model.whole(request(str(tmp_path / "nothing"))).evidence


def test_a_teacher_with_other_tokens_fails_and_one_with_the_same_passes(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "ours")
    other = tokenizer(tmp_path / "other", words=("a", "c", "b"))
    result = model.tokenizers(request(ours, teacher=other))
    assert result.status == "fail"
    assert "vocabulary of teacher" in result.evidence and "transformers" in result.evidence
    same = tokenizer(tmp_path / "same", template="{{ messages[0].content }}")
    assert model.tokenizers(request(ours, teacher=same)).status == "pass", "a teacher renders no chats"


def test_engines_with_another_chat_template_fail(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "ours")
    template = tmp_path / "other.jinja"
    template.write_text(CHATML + "<|assistant|>")
    result = model.tokenizers(request(ours, args=("--chat-template", str(template))))
    assert result.status == "fail"
    assert "chat template of rollout" in result.evidence and "rendered chat of rollout" in result.evidence
    assert "vocabulary" not in result.evidence


def test_chats_without_a_chat_template_fail_before_a_start(tmp_path: Path) -> None:
    result = model.tokenizers(request(tokenizer(tmp_path / "plain", template=""), chat=True))
    assert result.status == "fail" and "no chat template" in result.evidence


def test_a_script_that_cannot_run_says_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ForeignFailed, match="cannot be run: No such file"):
        run_script(tmp_path / "python", "tokenizer_facts", ["x"])
    with pytest.raises(ForeignFailed, match="nothing_there"):
        run_script(sys.executable, "tokenizer_facts", [str(tmp_path / "nothing_there")])


def test_the_last_value_of_an_argument_counts() -> None:
    assert argument(("--a", "1", "--a=2"), "--a") == "2"
    assert argument(("--b",), "--b") == ""
