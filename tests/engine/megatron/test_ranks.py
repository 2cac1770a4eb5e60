"""Megatron over one and two ranks: the same model, the same steps and the same checkpoints as without it.

Real processes over Gloo, with the CPU in place of a CUDA device (tests/support/megatron_cpu.py).
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None:  # it is imported in the lab alone
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from transformers import AutoModelForCausalLM  # noqa: E402

from engine.interfaces import TrainBatch  # noqa: E402
from engine.trainer.torch_backend import TorchBackend  # noqa: E402
from engine.trainer.torch_settings import TorchSettings  # noqa: E402
from tests.engine.megatron.lab import on_ranks  # noqa: E402
from tests.engine.megatron.models import FAMILIES, saved  # noqa: E402
from tests.engine.trainer_support import batch_of  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # the first test waits for megatron to be imported

ALONE: dict[str, Any] = {}
DATA = ALONE  # on two ranks
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
CUTS = {
    "alone": (1, ALONE),
    "data": (2, DATA),
    "tensor": (2, TENSOR),
    "sequence": (2, SEQUENCE),
    "pipeline": (2, PIPELINE),
    "expert": (2, EXPERT),
}
# a large eps: a first update is no sign of a rounding error
STEPS: dict[str, Any] = {"lr": 0.05, "adam_eps": 1e-3, "micro_batch_tokens": 40, "threads": 1}
MADE: dict[tuple[str, str, int], Any] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(saved(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


@pytest.fixture(autouse=True)
def switches_of_torch() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


# ---------------------------------------------------------------- the model
@pytest.mark.parametrize(
    ("name", "cut", "attention"),
    [
        ("qwen3", "alone", "eager"),
        ("qwen3", "tensor", "sdpa"),
        ("llama", "tensor", "eager"),
        ("qwen2", "alone", "sdpa"),
        ("qwen3_moe", "sequence", "sdpa"),
        ("qwen3_moe", "expert", "eager"),
    ],
)
def test_logits_are_hugging_faces(folders: dict[str, str], name: str, cut: str, attention: str) -> None:
    size, options = CUTS[cut]
    differences = on_ranks(size, "logits_differ_by", folders[name], options, attention)
    assert max(differences) < 1e-5


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3", "alone"),
        ("qwen3", "pipeline"),
        ("qwen3", "tensor"),
        ("llama", "pipeline"),
        ("qwen2", "tensor"),
        ("qwen3_moe", "sequence"),
        ("qwen3_moe", "expert"),
    ],
)
def test_weights_come_out_as_they_went_in(folders: dict[str, str], name: str, cut: str) -> None:
    size, options = CUTS[cut]
    out, *nothing = on_ranks(size, "weights_out", folders[name], options, "float32")
    assert nothing == [{}] * (size - 1)
    theirs = on_disk(folders[name])
    tied = {"lm_head.weight"} if name == "qwen3" else set()
    assert out.keys() == theirs.keys() | tied
    assert [key for key in theirs if not torch.equal(out[key], theirs[key])] == []
    if tied:
        assert torch.equal(out["lm_head.weight"], theirs["model.embed_tokens.weight"])


def on_disk(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


# ---------------------------------------------------------------- steps
def reference(folder: str, settings: dict[str, Any], batches: list[TrainBatch]) -> tuple[list[Any], Any]:
    """The torch trainer's steps, made once for each."""
    key = (folder, repr(settings), len(batches))
    if key not in MADE:
        backend = TorchBackend(Path(folder), TorchSettings(**settings))
        metrics = [backend.step(batch) for batch in batches]
        MADE[key] = [(each["loss"], each["grad_norm"]) for each in metrics], copy.deepcopy(backend.weights())
    return MADE[key]


def batches(count: int) -> list[TrainBatch]:
    return [batch_of(13, seed=seed, step=seed + 1, longest=9) for seed in range(count)]


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3", "alone"),
        ("qwen3", "data"),
        ("qwen3", "tensor"),
        ("qwen3", "sequence"),
        ("qwen3", "pipeline"),
        ("llama", "tensor"),
        ("qwen2", "pipeline"),
    ],
)
@pytest.mark.parametrize(
    "loss",
    [
        {"loss": "ppo", "num_steps_per_rollout": 2, "clip_grad": 0.3},
        {"loss": "decoupled_ppo", "num_steps_per_rollout": 2, "entropy_coef": 0.05, "temperature": 0.8},
    ],
    ids=["ppo", "decoupled"],
)
def test_steps_are_those_of_the_torch_trainer(
    folders: dict[str, str], name: str, cut: str, loss: dict[str, Any]
) -> None:
    if name != "qwen3" and loss["loss"] != "ppo":
        pytest.skip("one loss for each family, all losses for one")
    settings, made = STEPS | loss, batches(3)
    theirs, their_weights = reference(folders[name], settings, made)
    size, options = CUTS[cut]
    answers = on_ranks(size, "steps", folders[name], options, settings, made)
    ours, weights = answers[0]
    assert all(answer[0] == ours for answer in answers)  # every rank has seen the same numbers
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5, abs=1e-6)
    assert np.array(ours)[:, 1].max() > 0.3  # clipping is part of what is compared
    worst = max(float((weights[key] - their_weights[key]).abs().max()) for key in their_weights)
    assert worst < 2e-5, worst


@pytest.mark.parametrize("cut", ["data", "sequence", "pipeline"])
def test_packed_rows_give_the_same_steps_as_padded_ones(folders: dict[str, str], cut: str) -> None:
    theirs, their_weights = reference(folders["qwen3"], STEPS, batches(2))
    size, options = CUTS[cut]
    settings = STEPS | {"packing": True}
    ours, weights = on_ranks(size, "steps", folders["qwen3"], options, settings, batches(2))[0]
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5, abs=1e-6)
    assert max(float((weights[key] - their_weights[key]).abs().max()) for key in their_weights) < 2e-5


@pytest.mark.parametrize("cut", ["alone", "expert", "sequence", "pipeline"])
def test_steps_of_a_model_with_experts_are_the_same_however_it_is_cut(
    folders: dict[str, str], cut: str
) -> None:
    """Hugging Face holds experts under other names in memory, so losses and norms are compared."""
    made = batches(2)
    theirs, _ = reference(folders["qwen3_moe"], STEPS, made)
    size, options = CUTS[cut]
    ours, _ = on_ranks(size, "steps", folders["qwen3_moe"], options, STEPS, made)[0]
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_a_term_to_a_reference_model_is_the_torch_trainers(
    folders: dict[str, str], tmp_path: Path, cut: str
) -> None:
    other = str(saved("qwen3", tmp_path, seed=3))
    settings = STEPS | {"kl_loss_coef": 0.4, "ref_model": other}
    theirs, _ = reference(folders["qwen3"], settings, batches(2))
    plain, _ = reference(folders["qwen3"], STEPS, batches(2))
    size, options = CUTS[cut]
    ours, _ = on_ranks(size, "steps", folders["qwen3"], options, settings, batches(2))[0]
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5, abs=1e-6)
    assert abs(theirs[0][0] - plain[0][0]) > 0.01


def test_recomputed_activations_give_the_same_bits(folders: dict[str, str]) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    (plain, weights), *_ = on_ranks(2, "steps", folders["qwen3"], TENSOR, STEPS, batches(1))
    (again, other), *_ = on_ranks(2, "steps", folders["qwen3"], TENSOR | full, STEPS, batches(1))
    assert plain == again and all(torch.equal(weights[key], other[key]) for key in weights)


@pytest.mark.parametrize("cut", ["data", "tensor"])
def test_bfloat16_learns_in_float32_masters_and_publishes_bfloat16(folders: dict[str, str], cut: str) -> None:
    """Steps far below a bfloat16 number's precision add up."""
    size, options = CUTS[cut]
    settings = STEPS | {"dtype": "bfloat16", "lr": 2e-5, "adam_eps": 1e-8}
    theirs, _ = reference(folders["qwen3"], settings, batches(3))
    ours, weights = on_ranks(size, "steps", folders["qwen3"], options, settings, batches(3))[0]
    assert np.array(ours)[:, 1] == pytest.approx(np.array(theirs)[:, 1], rel=5e-2)
    before = on_disk(folders["qwen3"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    changed = [float((weights[key] != tensor.bfloat16()).float().mean()) for key, tensor in before.items()]
    assert 0 < np.mean(changed) < 0.5


# ---------------------------------------------------------------- bad steps
@pytest.mark.parametrize(
    ("cut", "more"),
    [
        ("data", {}),
        ("tensor", {"num_steps_per_rollout": 2}),
        ("pipeline", {}),
        ("data", {"num_steps_per_rollout": 2}),
    ],
)
def test_a_number_that_is_none_on_one_rank_leaves_all_bits_on_all_ranks(
    folders: dict[str, str], cut: str, more: dict[str, Any]
) -> None:
    good, bad = batch_of(12, seed=1), batch_of(12, seed=2)
    bad.samples[5] = bad.samples[5]._replace(advantage=float("nan"))
    size, options = CUTS[cut]
    answers = on_ranks(size, "bad_step", folders["qwen3"], options, STEPS | more, [good, bad])
    assert answers == [("nonfinite_loss", True, True)] * size


# ---------------------------------------------------------------- checkpoints
@pytest.mark.parametrize(
    ("name", "saved_on", "loaded_on"),
    [
        ("qwen3", "tensor", "tensor"),
        ("qwen3", "tensor", "alone"),
        ("qwen3", "alone", "data"),
        ("qwen3", "data", "pipeline"),
        ("llama", "pipeline", "tensor"),
        ("qwen3_moe", "expert", "alone"),
    ],
)
def test_a_checkpoint_is_taken_up_by_ranks_that_cut_the_model_otherwise(
    folders: dict[str, str], tmp_path: Path, name: str, saved_on: str, loaded_on: str
) -> None:
    """It is written on another thread, while the next step is taken."""
    made, settings = batches(4), STEPS | {"num_steps_per_rollout": 2, "weight_decay": 0.1}
    size, options = CUTS[saved_on]
    then, last, after = on_ranks(size, "save", folders[name], options, settings, made, str(tmp_path))[0]
    size, options = CUTS[loaded_on]
    got, again, later = on_ranks(size, "load", folders[name], options, settings, made, str(tmp_path))[0]
    assert got.keys() == then.keys() and all(torch.equal(got[key], then[key]) for key in then)
    if saved_on == loaded_on:
        assert again == last and all(torch.equal(later[key], after[key]) for key in after)
    assert np.array(again) == pytest.approx(np.array(last), rel=1e-5)
    worst = max(float((later[key] - after[key]).abs().max()) for key in after)
    assert worst < 2e-5, worst


def test_a_fresh_optimizer_takes_the_weights_alone(folders: dict[str, str], tmp_path: Path) -> None:
    made = batches(3)
    then, _, after = on_ranks(1, "save", folders["qwen3"], ALONE, STEPS, made, str(tmp_path))[0]
    got, _, later = on_ranks(2, "load", folders["qwen3"], DATA, STEPS, made, str(tmp_path), True)[0]
    assert all(torch.equal(got[key], then[key]) for key in then)
    assert any(float((later[key] - after[key]).abs().max()) > 1e-3 for key in after)


def test_weights_of_the_torch_trainers_checkpoint_are_taken_with_a_fresh_optimizer(
    folders: dict[str, str], tmp_path: Path
) -> None:
    backend = TorchBackend(Path(folders["qwen3"]), TorchSettings(**STEPS))
    backend.step(batches(1)[0])
    backend.snapshot()(tmp_path)
    got, _, _ = on_ranks(2, "load", folders["qwen3"], TENSOR, STEPS, batches(2), str(tmp_path), True)[0]
    theirs = backend.weights()
    assert got.keys() == theirs.keys() and all(torch.equal(got[key], theirs[key]) for key in theirs)


def test_a_checkpoint_that_is_not_whole_changes_nothing_on_any_rank(
    folders: dict[str, str], tmp_path: Path
) -> None:
    whole, torn, other = tmp_path / "whole", tmp_path / "torn", tmp_path / "other"
    for folder in (whole, torn, other):
        folder.mkdir()
    on_ranks(2, "save", folders["qwen3"], TENSOR, STEPS, batches(2), str(torn))
    on_ranks(1, "save", folders["llama"], ALONE, STEPS, batches(2), str(other))
    victim = torn / "megatron" / "__1_0.distcp"
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    answers = on_ranks(2, "load_fails", folders["qwen3"], DATA, [str(whole), str(torn), str(other)])
    for messages in zip(*answers, strict=True):
        assert all(unchanged and message for message, unchanged in messages), messages
    assert "is no checkpoint of the megatron trainer" in answers[0][0][0]


# ---------------------------------------------------------------- the vocabulary
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_log_probs_over_a_cut_vocabulary_are_those_of_the_whole(size: int, with_entropy: bool) -> None:
    for logprobs, entropy, gradient in on_ranks(size, "vocabulary_cut", 5, with_entropy):
        assert logprobs < 2e-6 and entropy < 2e-6 and gradient < 2e-6


# ---------------------------------------------------------------- refusals
def test_what_cannot_be_done_ends_in_a_sentence(folders: dict[str, str], tmp_path: Path) -> None:
    torn = saved("qwen3", tmp_path / "torn")
    tensors = on_disk(str(torn))
    from safetensors.torch import save_file

    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, torn / "model.safetensors")
    empty = tmp_path / "empty"
    AutoModelForCausalLM.from_pretrained(folders["qwen3"]).config.save_pretrained(empty)
    cases = [
        (str(torn), {}, {}),
        (str(empty), {}, {}),
        (folders["qwen3"], {}, {"attn_implementation": "flash_attention_2"}),
        (folders["qwen3"], {"transformer_impl": "transformer_engine"}, {}),
        (folders["qwen3"], {"tensor_model_parallel_size": 2}, {}),
        (folders["qwen3"], {"tensor_size": 2}, {}),
    ]
    (answers,) = on_ranks(1, "refusals", cases)
    for answer, words in zip(
        answers,
        (
            "no weights for model.layers.1.mlp.up_proj.weight",
            "reads safetensors alone",
            '"flash_attention_2": the megatron trainer has "sdpa"',
            "transformer_engine",
            "needs a multiple of",
            "tensor_size",
        ),
        strict=True,
    ):
        assert words in answer, answer
