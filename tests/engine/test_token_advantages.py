"""REINFORCE++ and PPO with rewards of tokens: KL to a reference model, discounts, one batch from ledger to loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumers.advantages import ESTIMATORS, Group
from engine.config import build_config
from engine.interfaces import Inputs, TrainBatch
from engine.roles import trainer_backend
from engine.trainer.plan import plan_step
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError
from tests.engine.trainer_support import batch_of, folder_of, reference_logprobs, tiny_gpt2


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def backend_of(tmp_path: Path, **settings: Any) -> TorchBackend:
    folder = tmp_path / "model"
    if not folder.exists():
        folder_of(tiny_gpt2(), folder)
    use = {"advantage_estimator": "reinforce_plus_plus", "lr": 1e-2, "threads": 1, **settings}
    return TorchBackend(folder, TorchSettings(**use))


def trained_on(backend: TorchBackend, batch: TrainBatch) -> np.ndarray:
    """The advantages [N] with which the step's losses were made."""
    seen = []
    minibatch = backend._stepper._minibatch

    def spy(flat: Any, *args: Any, **more: Any) -> Any:
        seen.append(flat.advantages)
        return minibatch(flat, *args, **more)

    backend._stepper._minibatch = spy
    backend.step(batch)
    return seen[0]


def with_rewards(batch: TrainBatch, name: str) -> TrainBatch:
    """The batch with rewards 1, 0, 2, 1, 0, … as an estimator sees them; groups of one."""
    rewards = [float(place % 3 != 1) + (place % 3 == 2) for place in range(len(batch.samples))]
    groups = [
        Group([reward], [int(sample.loss_mask.sum())])
        for reward, sample in zip(rewards, batch.samples, strict=True)
    ]
    found = ESTIMATORS[name](groups)
    samples = [
        sample._replace(advantage=float(values[0]))
        for sample, values in zip(batch.samples, found, strict=True)
    ]
    return batch._replace(samples=samples)


def test_what_a_backend_wants_follows_from_its_settings():
    def inputs(**settings: Any) -> Inputs:
        return TorchSettings(**settings).inputs

    assert inputs() == Inputs("grpo", with_ages=False)
    assert inputs(advantage_estimator="rloo") == Inputs("rloo")
    assert inputs(advantage_estimator="reinforce_plus_plus") == Inputs("reinforce_plus_plus")
    assert inputs(advantage_estimator="reinforce_plus_plus", kl_coef=0.1) == Inputs("ppo")
    assert inputs(advantage_estimator="reinforce_plus_plus", gamma=0.9) == Inputs("ppo")
    assert inputs(loss="decoupled_ppo", proximal_policy="interpolated").with_ages
    assert not inputs(loss="decoupled_ppo").with_ages


def test_with_hardly_a_discount_tokens_have_the_advantages_that_the_cut_gives_their_samples(tmp_path):
    batch = batch_of(9, seed=3)
    of_samples = plan_step(with_rewards(batch, "reinforce_plus_plus"), TorchSettings()).flat.advantages
    backend = backend_of(tmp_path, gamma=1 - 1e-9)
    of_tokens = trained_on(backend, with_rewards(batch, backend.inputs.estimator))
    assert of_tokens == pytest.approx(of_samples, abs=1e-5)
    assert of_samples.std() == pytest.approx(1, abs=1e-6), "its spread is over tokens"


def test_discounted_returns_are_normalised_over_all_trained_tokens(tmp_path):
    backend = backend_of(tmp_path, gamma=0.5)
    batch = with_rewards(batch_of(6, seed=1), backend.inputs.estimator)
    flat = plan_step(batch, backend.settings).flat
    plain = np.concatenate(
        [
            0.5 ** np.arange(end - begin)[::-1] * flat.advantages[begin:end]
            for begin, end in zip(flat.token_starts[:-1], flat.token_starts[1:], strict=True)
        ]
    )
    found = trained_on(backend, batch)
    assert found == pytest.approx((plain - plain.mean()) / plain.std(), abs=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_kl_to_the_reference_model_is_taken_from_rewards_token_by_token(tmp_path, parts):
    reference = tiny_gpt2(seed=7)
    folder_of(reference, tmp_path / "reference")
    backend = backend_of(
        tmp_path,
        kl_coef=0.25,
        ref_model=str(tmp_path / "reference"),
        num_steps_per_rollout=parts,
        temperature=1.5,
    )
    batch = with_rewards(batch_of(6, seed=1), backend.inputs.estimator)
    plain = []
    for sample in batch.samples:
        logprobs, _ = reference_logprobs(reference.eval(), sample, 1.5)
        behaviour = sample.payload.logprobs[sample.loss_mask]
        rewards = -0.25 * (behaviour - logprobs.detach().numpy())
        if len(rewards):
            rewards[-1] += sample.advantage
        plain += np.cumsum(rewards[::-1])[::-1].tolist()
    expected = (np.array(plain) - np.mean(plain)) / np.std(plain)
    assert trained_on(backend, batch) == pytest.approx(expected, abs=1e-4)


def test_the_critic_sees_the_kl_as_a_part_of_what_is_to_be_expected(tmp_path):
    """A critic at 0, γ = λ = 1: its returns are the rewards to come, less the KL of the tokens to come."""
    folder_of(tiny_gpt2(), tmp_path / "model")
    reference = tiny_gpt2(seed=7)
    folder_of(reference, tmp_path / "reference")
    backend = backend_of(
        tmp_path, advantage_estimator="ppo", kl_coef=0.25, ref_model=str(tmp_path / "reference")
    )
    batch = with_rewards(batch_of(6, seed=1), "ppo")
    total, count = 0.0, 0
    for sample in batch.samples:
        logprobs, _ = reference_logprobs(reference.eval(), sample)
        rewards = -0.25 * (sample.payload.logprobs[sample.loss_mask] - logprobs.detach().numpy())
        if len(rewards):
            rewards[-1] += sample.advantage
        total, count = total + float(np.cumsum(rewards[::-1]).sum()), count + len(rewards)
    assert backend.step(batch)["return_mean"] == pytest.approx(total / count, abs=1e-5)


# ---------------------------------------------------------------- configuration
def configured(*overrides: str):
    least = {"data": {"path": "p.jsonl"}, "model": {"path": "m"}, "reward": {"function": "exact"}}
    return build_config(least, [f"trainer.{each}" for each in overrides])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["kl_coef=0.1"], r'trainer\.kl_coef = 0\.1 with trainer\.advantage_estimator = "grpo"'),
        (["gamma=0.9", "advantage_estimator=rloo"], "it goes with reinforce_plus_plus and ppo only"),
        (["lambd=0.9", "advantage_estimator=reinforce_plus_plus"], "it goes with ppo only"),
        (["normalize_advantages=true"], r"trainer\.normalize_advantages = true with .* ppo only"),
        (["critic_lr=1e-5"], "it goes with ppo only"),
        (["num_critic_only_steps=5"], "it goes with ppo only"),
        (["advantage_estimator=gspo"], 'set trainer.loss = "gspo" too'),
        (["advantage_estimator=ppo", "kl_coef=0.1", "kl_loss_coef=0.1"], "held to the reference model twice"),
        (["advantage_estimator=pppo"], "advantage_estimator"),
    ],
)
def test_settings_that_would_do_nothing_or_twice_the_same_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        configured(*overrides)


def test_a_critic_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match='only the "torch" trainer has a critic'):
        build_config(
            {
                "data": {"path": "p.jsonl"},
                "reward": {"function": "exact"},
                "rollout": {"backend": "scripted"},
                "trainer": {"backend": "scalar", "advantage_estimator": "ppo"},
            }
        )


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_groups_of_one_are_refused_where_they_teach_nothing(estimator):
    with pytest.raises(ConfigError, match="which is 0 in a group of 1"):
        build_config(
            {
                "data": {"path": "p.jsonl"},
                "model": {"path": "m"},
                "reward": {"function": "exact"},
                "rollout": {"n_samples_per_prompt": 1},
                "trainer": {"advantage_estimator": estimator},
            }
        )


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "ppo"])
def test_groups_of_one_are_taken_where_the_batch_or_a_critic_is_the_baseline(estimator):
    config = build_config(
        {
            "data": {"path": "p.jsonl"},
            "model": {"path": "m"},
            "reward": {"function": "exact"},
            "rollout": {"n_samples_per_prompt": 1},
            "trainer": {"advantage_estimator": estimator},
        }
    )
    assert config.trainer.advantage_estimator == estimator


def test_the_settings_reach_the_backend(tmp_path):
    folder_of(tiny_gpt2(), tmp_path / "model")
    config = build_config(
        {
            "data": {"path": "p.jsonl"},
            "model": {"path": str(tmp_path / "model")},
            "reward": {"function": "exact"},
            "trainer": {
                "advantage_estimator": "ppo",
                "gamma": 0.9,
                "lambd": 0.8,
                "normalize_advantages": True,
                "value_clip": 0.3,
                "critic_lr": 1e-4,
                "critic_lr_warmup": 3,
                "num_critic_only_steps": 2,
            },
        }
    )
    backend = trainer_backend(config)
    assert backend.inputs == Inputs("ppo")
    assert isinstance(backend, TorchBackend) and backend._critic is not None
    found = backend.settings
    assert (found.gamma, found.lambd, found.value_clip, found.critic_lr_warmup) == (0.9, 0.8, 0.3, 3)
    assert (found.normalize_advantages, found.num_critic_only_steps) == (True, 2)
    assert backend._critic.rate == 1e-4
