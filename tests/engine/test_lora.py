"""An adapter is trained, saved, published and merged: the base model stays as it is, and both sides hold the same."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.interfaces import CheckpointError, EngineError, Sampling
from engine.rollout.batched import BatchedEngine
from engine.rollout.loading import Loader
from engine.rollout.sglang.folders import VersionFolders
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from engine.weights.lora import Adapted, Base
from engine.weights.store import WeightStore, digest, snapshot
from streams.errors import ConfigError
from tests.engine.trainer_support import batch_of, folder_of, tiny_gpt2, tiny_qwen3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tiny_qwen3(), tmp_path / "model")


def make(folder: Path, **settings: Any) -> TorchBackend:
    wanted = {"lr": 0.02, "threads": 1, "lora_rank": 4, "lora_alpha": 8.0, "seed": 3} | settings
    return TorchBackend(folder, TorchSettings(**wanted))


def store_of(folder: Path, tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "run" / "weights", keep=3, adapted=Adapted(Base(folder).digest, 8.0 / 4))


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def save(backend: TorchBackend, folder: Path) -> Path:
    folder.mkdir()
    backend.snapshot()(folder)
    return folder


def test_before_the_first_step_the_adapted_model_is_the_base_model(folder: Path):
    backend, plain = make(folder), AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(backend.model, [1, 5, 9]), logits(plain, [1, 5, 9]), rtol=0, atol=1e-6)


def test_a_step_changes_the_adapter_and_nothing_else(folder: Path):
    backend = make(folder)
    names = set(backend.weights())
    assert {name.rsplit(".", 2)[-2] for name in names} == {"lora_A", "lora_B"}
    assert (
        len(names) == 2 * 7 * 2
    )  # two matrices of seven linear layers in each of two blocks; not the output layer
    before, base = snapshot(backend.weights()), Base(folder).tensors
    backend.step(batch_of(12))
    moved = {name for name, each in backend.weights().items() if not torch.equal(each, before[name])}
    assert {name for name in names if "lora_B" in name} <= moved
    for name, held in backend.model.state_dict().items():
        if "lora" not in name and (original := base.get(name.replace(".base_layer", ""))) is not None:
            assert torch.equal(held, original), name


def test_the_first_weights_come_from_the_seed_and_leave_the_random_numbers_alone(folder: Path):
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    one = make(folder)
    assert torch.equal(torch.rand(1), expected)
    assert digest(one.weights()) == digest(make(folder).weights()) != digest(make(folder, seed=4).weights())


def test_an_engine_serves_base_plus_adapter_and_samples_with_the_trainers_logprobs(
    folder: Path, tmp_path: Path
):
    backend, store = make(folder), store_of(folder, tmp_path)
    for step in range(3):
        backend.step(batch_of(12, seed=step))
    published = store.publish(snapshot(backend.weights()), epoch=0, version=3, step=3)
    assert (published.kind, published.scaling) == ("lora", 2.0)
    engine = BatchedEngine(folder, threads=1)

    async def scene() -> Any:
        try:
            await engine.update(published, store.path(0, 3))
            return await engine.generate([1, 5, 9], Sampling(8), request_id="a")
        finally:
            await engine.close()

    done = asyncio.run(scene())
    assert engine.held is not None
    assert engine.held.digest == digest(backend.weights())
    ids = [1, 5, 9, *done.ids.tolist()]
    wanted = torch.log_softmax(logits(backend.model, ids), -1)[2:-1].gather(1, torch.tensor(ids[3:])[:, None])
    np.testing.assert_allclose(done.logprobs, wanted[:, 0].numpy(), atol=1e-5)
    plain = torch.log_softmax(logits(AutoModelForCausalLM.from_pretrained(folder), ids), -1)[2:-1]
    assert np.abs(done.logprobs - plain.gather(1, torch.tensor(ids[3:])[:, None])[:, 0].numpy()).max() > 1e-3


def test_an_engine_with_another_base_refuses_the_adapter(folder: Path, tmp_path: Path):
    published = store_of(folder, tmp_path).publish(make(folder).weights(), epoch=0, version=0, step=0)
    other = folder_of(tiny_qwen3(seed=1), tmp_path / "other")
    path = tmp_path / "run" / "weights" / "e0-v0.safetensors"
    with pytest.raises(
        EngineError, match="weights_unreadable: version 0 is an adapter of a base with digest"
    ):
        Loader("torch", Base(other)).load(published, path)
    with pytest.raises(EngineError, match="which this engine cannot take"):
        Loader("torch").load(published, path)
    damaged = msgspec.structs.replace(published, digest="0" * 64)
    with pytest.raises(EngineError, match="weights_mismatch"):
        Loader("torch", Base(folder)).load(damaged, path)


def test_a_checkpoint_is_the_adapter_alone_and_continues_bit_for_bit(folder: Path, tmp_path: Path):
    backend = make(folder)
    backend.step(batch_of(12, seed=1))
    saved = save(backend, tmp_path / "saved")
    assert (saved / "adapter_model.safetensors").stat().st_size < (
        folder / "model.safetensors"
    ).stat().st_size
    assert not (saved / "model.safetensors").exists()
    backend.step(batch_of(12, seed=2))
    again = make(folder, seed=99)
    again.load(saved)
    assert again.optimizer_steps == 1
    again.step(batch_of(12, seed=2))
    assert digest(again.weights()) == digest(backend.weights())


def test_a_checkpoint_of_another_base_is_refused(folder: Path, tmp_path: Path):
    saved = save(make(folder), tmp_path / "saved")
    other = make(folder_of(tiny_qwen3(seed=1), tmp_path / "other"))
    before = digest(other.weights())
    with pytest.raises(CheckpointError, match="an adapter of a base model with digest"):
        other.load(saved)
    assert digest(other.weights()) == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_peft_opens_the_checkpoint_and_computes_the_same(folder: Path, tmp_path: Path):
    backend = make(folder)
    backend.step(batch_of(12))
    saved = save(backend, tmp_path / "saved")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(saved)).eval()
    torch.testing.assert_close(logits(theirs, [1, 5, 9]), logits(backend.model, [1, 5, 9]), rtol=0, atol=1e-6)


def test_layers_that_are_not_there_or_not_linear_are_refused_by_name(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"target_modules: the model has no qproj; linear layers: .*q_proj"):
        make(folder, lora_target_modules=("qproj",))
    with pytest.raises(ConfigError, match="Conv1D"):
        make(folder_of(tiny_gpt2(), tmp_path / "gpt2"))


def test_only_the_named_layers_are_adapted(folder: Path):
    names = make(folder, lora_target_modules=("q_proj", "v_proj")).weights()
    assert {name.split(".")[-3] for name in names} == {"q_proj", "v_proj"}


def test_an_sglang_folder_holds_the_merged_model(folder: Path, tmp_path: Path):
    backend, store = make(folder), store_of(folder, tmp_path)
    backend.step(batch_of(12))
    published = store.publish(snapshot(backend.weights()), epoch=0, version=1, step=1)
    made = VersionFolders(folder, tmp_path / "served").make(published, store.path(0, 1))
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in folder.iterdir())
    whole = AutoModelForCausalLM.from_pretrained(made)
    torch.testing.assert_close(logits(whole, [1, 5, 9]), logits(backend.model, [1, 5, 9]), rtol=0, atol=1e-5)
