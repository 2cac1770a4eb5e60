"""PPO's critic: its loss, its step beside the policy's, bad steps, checkpoints, replay."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.algorithms.critic import explained_variance, value_loss
from engine.algorithms.returns import gae, token_rewards
from engine.interfaces import BadStep, CheckpointError, TrainBatch
from engine.trainer.critic import Critic
from engine.trainer.plan import plan_step
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from tests.engine.trainer_support import batch_of, folder_of, in_float64, tiny_gpt2, tiny_qwen3


def settings(**changes) -> TorchSettings:
    return TorchSettings(**{"advantage_estimator": "ppo", "lr": 1e-2, "threads": 1, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tiny_gpt2(), tmp_path / "model")


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def critic_of(backend: TorchBackend) -> Critic:
    assert backend._critic is not None
    return backend._critic


def bits(backend: TorchBackend) -> list[bytes]:
    critic = critic_of(backend)
    tensors = [*backend.policy._state(), *critic._state()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def saved(backend: TorchBackend, folder: Path) -> Path:
    folder.mkdir()
    backend.snapshot()(folder)
    return folder


def plain_values(model, flat):
    """V before each trained token, by a forward of its own."""
    for sample, column in zip(flat.sample, flat.column, strict=True):
        row = flat.ids[flat.row_starts[sample] : flat.row_starts[sample + 1]]
        yield model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0, column, 0]


# ---------------------------------------------------------------- formulas
def test_the_value_loss_by_hand():
    values = torch.tensor([1.0, 1.0, 0.1, -1.0], requires_grad=True)
    before, returns = torch.zeros(4), torch.tensor([2.0, 0.5, 1.0, 1.0])
    found = value_loss(values, before, returns, 0.2)
    # kept within ±.2: .2, .2, .1, −.2;  the worse of both errors: 1.8, .5, .9, 2 (not clipped: it is the worse one)
    assert found.loss.tolist() == pytest.approx([1.8**2 / 2, 0.5**2 / 2, 0.9**2 / 2, 2.0])
    assert found.is_clipped.tolist() == [True, False, False, False]
    found.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.5, -0.9, -2.0])


def test_without_a_clip_range_it_is_half_the_squared_error():
    found = value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), 0.0)
    assert found.loss.tolist() == [2.0] and not found.is_clipped.any()


def test_explained_variance_is_one_of_a_seer_and_zero_of_a_constant():
    returns = np.array([0.0, 1.0, 1.0, 4.0])
    assert explained_variance(returns + 3, returns) == 1.0
    assert explained_variance(np.full(4, 2.0), returns) == 0.0
    assert explained_variance(returns, np.ones(4)) == 0.0


# ---------------------------------------------------------------- the model
@pytest.mark.parametrize(("make", "width"), [(partial(tiny_gpt2, tied=True), 12), (tiny_qwen3, 16)])
def test_values_are_those_of_a_plain_forward_at_the_token_before(tmp_path, make, width):
    backend = TorchBackend(folder_of(make(), tmp_path / "m"), settings())
    critic = critic_of(backend)
    flat = plan_step(batch_of(6, seed=3), backend.settings).flat
    assert not critic.values(flat).any(), "a critic expects nothing at first"
    with torch.no_grad():
        head = torch.randn(1, width, generator=torch.Generator().manual_seed(1))
        critic.parameters["lm_head.weight"].copy_(head)
    found = critic.values(flat)
    for place, value in enumerate(plain_values(in_float64(critic.model), flat)):
        assert found[place] == pytest.approx(float(value.detach()), abs=1e-5)


def test_the_critic_shares_no_memory_with_the_policy(folder):
    backend = TorchBackend(folder, settings())
    policy = {tensor.data_ptr() for tensor in backend.policy.parameters.values()}
    assert not policy & {tensor.data_ptr() for tensor in critic_of(backend).parameters.values()}


# ---------------------------------------------------------------- the step
def test_the_first_step_is_that_of_plain_discounted_returns(folder):
    """A critic at 0 makes A_t = Σ_k (γλ)^k r of it, which the policy trains on."""
    batch = batch_of(5, seed=2)
    backend = TorchBackend(folder, settings(gamma=0.9, lambd=0.5))
    seen = []
    take = backend._stepper.take
    backend._stepper.take = lambda plan, **more: (seen.append(plan), take(plan, **more))[1]
    metrics = backend.step(batch)
    flat = plan_step(batch, backend.settings).flat
    expected = np.zeros(len(flat.targets))
    for begin, end in zip(flat.token_starts[:-1], flat.token_starts[1:], strict=True):
        for place in range(begin, end):
            expected[place] = 0.45 ** (end - 1 - place) * flat.advantages[place]
    assert seen[0].flat.advantages == pytest.approx(expected, rel=1e-6)
    assert metrics["return_mean"] == pytest.approx(expected.mean(), rel=1e-6)
    assert metrics["value_mean"] == 0.0 and metrics["explained_variance"] == pytest.approx(0.0)


def test_the_critics_gradient_is_that_of_a_plain_reference(folder):
    batch = batch_of(7, seed=4)
    backend = TorchBackend(folder, settings(clip_grad=0.0, micro_batch_tokens=16))
    critic = critic_of(backend)
    with torch.no_grad():
        critic.parameters["lm_head.weight"].fill_(0.05)
    plan = plan_step(batch, backend.settings)
    values = critic.values(plan.flat)
    found = gae(token_rewards(plan.flat.advantages, plan.flat.token_starts), values, plan.flat.token_starts,
                gamma=1.0, lambd=0.9)  # fmt: skip
    judged = critic.judge(plan.flat, plan.parts[0], values, found.returns)
    plain = in_float64(critic.model).requires_grad_(True)
    errors = [
        (value - at) ** 2 for value, at in zip(plain_values(plain, plan.flat), found.returns, strict=True)
    ]
    total = torch.stack(errors).mean() / 2
    total.backward()
    assert judged.loss == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in plain.named_parameters():
        assert critic.parameters[name].grad.numpy() == pytest.approx(
            parameter.grad.numpy(), rel=1e-3, abs=1e-6
        )


def test_a_critic_learns_what_prompts_are_worth(folder):
    """Rewards that depend on the prompt alone are foreseen after some steps."""
    batch = batch_of(16, seed=5)
    samples = [
        sample._replace(advantage=float(sample.payload.prompt_ids[-1] % 2)) for sample in batch.samples
    ]
    backend = TorchBackend(folder, settings(critic_lr=3e-3, lr=1e-9, value_clip=0.0))
    metrics = [backend.step(TrainBatch(step, step - 1, step, samples)) for step in range(1, 61)]
    assert metrics[0]["explained_variance"] == pytest.approx(0)
    assert metrics[-1]["explained_variance"] > 0.9
    assert metrics[-1]["value_loss"] < 0.05 * metrics[0]["value_loss"]


def test_normalised_advantages_have_mean_zero_and_spread_one(folder):
    backend, seen = TorchBackend(folder, settings(normalize_advantages=True)), []
    take = backend._stepper.take
    backend._stepper.take = lambda plan, **more: (seen.append(plan.flat.advantages), take(plan, **more))[1]
    backend.step(batch_of(6, seed=1))
    assert seen[0].mean() == pytest.approx(0, abs=1e-6) and seen[0].std() == pytest.approx(1, rel=1e-5)


def test_steps_of_the_critic_alone_leave_the_policy_as_it_is(folder):
    backend = TorchBackend(folder, settings(num_critic_only_steps=2))
    first = [tensor.numpy().copy() for tensor in backend.weights().values()]
    for step in (1, 2):
        metrics = backend.step(batch_of(6, seed=step, step=step))
        assert all(
            np.array_equal(a, b.numpy()) for a, b in zip(first, backend.weights().values(), strict=True)
        )
        assert metrics["lr"] == 0.0 and metrics["critic_lr"] > 0 and metrics["grad_norm"] > 0
        assert backend.trajectory_sums.shape[0] == 6 and backend.optimizer_steps == 0
    assert backend.step(batch_of(6, seed=3, step=3))["lr"] == 1e-2
    assert backend.optimizer_steps == 1
    assert not all(
        np.array_equal(a, b.numpy()) for a, b in zip(first, backend.weights().values(), strict=True)
    )


def test_the_critics_rate_rises_over_its_own_warm_up(folder):
    backend = TorchBackend(folder, settings(critic_lr=4e-3, critic_lr_warmup=4, num_steps_per_rollout=2))
    rates = [backend.step(batch_of(6, seed=step, step=step))["critic_lr"] for step in (1, 2, 3)]
    assert rates == pytest.approx([2e-3, 4e-3, 4e-3])


# ---------------------------------------------------------------- bad steps
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("what", ["policy", "critic"])
def test_what_is_not_finite_in_one_of_them_leaves_both_as_they_were(folder, parts, what):
    backend = TorchBackend(folder, settings(num_steps_per_rollout=parts))
    backend.step(batch_of(9, seed=1))
    before, counted = bits(backend), (critic_of(backend).steps, critic_of(backend).optimizer_steps)
    bad = batch_of(9, seed=2, step=2)
    if what == "critic":  # a return that only the critic cannot take
        bad.samples[4] = bad.samples[4]._replace(advantage=math.inf)
    else:
        payload = bad.samples[4].payload
        bad.samples[4] = bad.samples[4]._replace(
            payload=payload._replace(logprobs=payload.logprobs + math.nan)
        )
    with pytest.raises(BadStep, match=r"critic: loss" if what == "critic" else "nonfinite"):
        backend.step(bad)
    assert bits(backend) == before
    assert (critic_of(backend).steps, critic_of(backend).optimizer_steps) == counted
    backend.step(batch_of(9, seed=3, step=3))
    assert critic_of(backend).optimizer_steps == counted[1] + parts


# ---------------------------------------------------------------- checkpoints (O32)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(folder, tmp_path, parts):
    use = settings(num_steps_per_rollout=parts, critic_lr_warmup=5, num_critic_only_steps=1, lambd=0.9)
    whole = TorchBackend(folder, use)
    for step in (1, 2):
        whole.step(batch_of(8, seed=step, step=step))
    state = saved(whole, tmp_path / "state")
    metrics = [whole.step(batch_of(8, seed=step, step=step)) for step in (3, 4)]
    resumed = TorchBackend(folder, use)
    resumed.load(state)
    again = [resumed.step(batch_of(8, seed=step, step=step)) for step in (3, 4)]
    assert bits(resumed) == bits(whole)
    for there, here in zip(metrics, again, strict=True):
        assert {name: value for name, value in there.items() if name != "seconds"} == {
            name: value for name, value in here.items() if name != "seconds"
        }


@pytest.mark.parametrize("part", ["critic.safetensors", "critic_optimizer.safetensors", "critic.json"])
def test_a_checkpoint_without_a_part_of_the_critic_is_an_error_and_changes_nothing(folder, tmp_path, part):
    backend = TorchBackend(folder, settings())
    state = saved(backend, tmp_path / "state")
    backend.step(batch_of(6, seed=1))
    before = bits(backend)
    (state / part).unlink()
    with pytest.raises(CheckpointError, match=part):
        backend.load(state)
    assert bits(backend) == before


def test_a_fresh_optimizer_on_request_keeps_the_critics_weights(folder, tmp_path):
    backend = TorchBackend(folder, settings())
    for step in (1, 2):
        backend.step(batch_of(6, seed=step, step=step))
    state = saved(backend, tmp_path / "state")
    (state / "critic_optimizer.safetensors").unlink()
    fresh = TorchBackend(folder, settings())
    fresh.load(state, fresh_optimizer=True)
    kept = critic_of(backend).parameters["lm_head.weight"]
    assert kept.any() and torch.equal(critic_of(fresh).parameters["lm_head.weight"], kept)
    assert (critic_of(fresh).steps, critic_of(fresh).optimizer_steps) == (0, 0)
    assert not any(state["exp_avg"].any() for state in critic_of(fresh).optimizer.state.values())


def test_a_run_without_a_critic_can_be_taken_up_with_a_fresh_one_on_request_alone(folder, tmp_path, caplog):
    plain = TorchBackend(folder, settings(advantage_estimator="grpo"))
    plain.step(batch_of(6, seed=1))
    state = saved(plain, tmp_path / "state")
    backend = TorchBackend(folder, settings())
    with pytest.raises(CheckpointError, match=r"critic\.safetensors"):
        backend.load(state)
    backend.load(state, fresh_optimizer=True)
    assert "has no critic: a fresh one begins" in caplog.text
    assert all(
        torch.equal(a, b) for a, b in zip(backend.weights().values(), plain.weights().values(), strict=True)
    )
