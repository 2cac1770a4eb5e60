"""Functions written for Miles or Slime run unchanged; functions of neither form are refused with the mend."""

from __future__ import annotations

import asyncio
import enum
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from consumers.rewards import RewardInput, Scored
from consumers.rewards.adapter import Sample, make_args, read_back, sample_from_input, sample_from_task
from consumers.rewards.load import load_reward
from consumers.rewards.pool import ScoringPool
from streams.errors import ConfigError, InvalidEvent
from streams.events import TaskDispatched

USER_CODE = """
import asyncio
from functools import partial
async def rm(args, sample, **kwargs):
    await asyncio.sleep(0)
    assert sample.status == sample.Status.COMPLETED and sample.group_index == 7
    return {"score": float(sample.response == sample.label), "length": sample.response_length, "note": "text",
            "n": args.n_samples_per_prompt, "url": len(args.rm_url), "absent": getattr(args, "absent", 5)}
async def batched_rm(args, samples, **kwargs):
    return [s.index - sum(each.index for each in samples) / len(samples) for s in samples]
def sync_rm(args, sample): return len(sample.tokens)
async def native(sample, *, scale=1.0): return scale
def group_native(samples): return [0.0 for _ in samples]
def two(sample, other): pass
def three(args, sample, other): pass
def nothing(): return 1.0
def stars(*args): return 1.0
def needs(sample, *, url): return 1.0
class Rule:
    def __init__(self): self.calls = 0
    def __call__(self, sample): return 1.0
rule = Rule()
bound = partial(native, scale=3.0)
number = 3
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path, monkeypatch):
    (tmp_path / "miles_user_code.py").write_text(USER_CODE)
    (tmp_path / "needs_missing.py").write_text("import not_installed_xyz")
    (tmp_path / "fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def member(index: int, response: str = "4") -> RewardInput:
    return RewardInput(
        uid=f"0-7/{index}/0", group_id="0-7", index=index, prompt="2+2?", response=response, label="4",
        response_ids=np.array([5, 6, 7], np.int32), response_length=3, finish_reason="stop",
    )  # fmt: skip


CONFIG = {
    "rollout": {"n_samples_per_prompt": 8, "replicas": 2},
    "reward": {"workers": 1},
    "trainer": {"workers": 3},
}


# ---------------------------------------------------------------- rewards
def test_a_miles_reward_runs_unchanged_in_the_pool():
    options = {"reward_key": "score", "rm_url": "http://judge"}
    with ScoringPool(
        "miles_user_code:rm", options, workers=1, timeout=timedelta(seconds=20), config=CONFIG
    ) as pool:
        right, wrong = pool.submit([member(0), member(1, "5")]).result(20)
    assert isinstance(right, Scored) and isinstance(wrong, Scored)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.components == {"length": 3, "n": 8, "url": 12, "absent": 5}


def test_a_batched_miles_reward_gets_the_whole_group():
    with ScoringPool(
        "miles_user_code:batched_rm", {}, workers=1, timeout=timedelta(seconds=20), group=True
    ) as pool:
        outcomes = pool.submit([member(i) for i in range(3)]).result(20)
    assert [each.reward for each in outcomes if isinstance(each, Scored)] == [-1, 0, 1]


def test_forms_are_told_by_their_parameters():
    async_miles = load_reward("miles_user_code:rm", {"rm_url": ""}, config=CONFIG)
    assert async_miles.is_async and not async_miles.is_group
    assert asyncio.run(async_miles.call(member(0)))["score"] == 1.0
    assert load_reward("miles_user_code:sync_rm").call(member(0)) == 3
    native = load_reward("miles_user_code:native", {"scale": 2.0})
    assert native.is_async and asyncio.run(native.call(member(0))) == 2.0
    assert load_reward("miles_user_code:group_native", group=True).call([member(0), member(1)]) == [0, 0]
    assert load_reward("miles_user_code:rule").call(member(0)) == 1.0
    assert load_reward("miles_user_code:bound").is_async
    assert load_reward("exact").is_built_in and load_reward("exact").call(member(0)) == 1.0


@pytest.mark.parametrize(
    ("path", "options", "group", "says"),
    [
        ("exakt", {}, False, r"needed module:function or a built-in \(exact, .*did you mean 'exact'"),
        ("miles_user_code.rm", {}, False, "did you mean 'miles_user_code:rm'"),
        ("miles_user_code:", {}, False, "both sides of the colon"),
        ("nowhere.at.all:f", {}, False, "no module nowhere"),
        ("needs_missing:f", {}, False, "module needs_missing needs not_installed_xyz"),
        ("fails:f", {}, False, "importing fails failed: ZeroDivisionError"),
        ("miles_user_code:mr", {}, False, "miles_user_code has no 'mr'; it has rm"),
        ("miles_user_code:number", {}, False, "is a int, not callable"),
        ("miles_user_code:Rule", {}, False, "is a class"),
        (
            "miles_user_code:two",
            {},
            False,
            r"needed positional parameters \(sample\), it takes \(sample, other\)",
        ),
        ("miles_user_code:three", {}, False, r"needed positional parameters \(args, sample\).*defaults"),
        ("miles_user_code:nothing", {}, False, r"it takes \(\)"),
        ("miles_user_code:stars", {}, False, r"takes \*args only"),
        ("miles_user_code:needs", {}, False, "reward.options.url: missing"),
        ("miles_user_code:native", {"scal": 1}, False, "reward.options.scal.*did you mean 'scale'"),
        ("numeric", {"tolerance": 1}, False, "reward.options.tolerance.*known: rel_tol"),
        ("miles_user_code:rm", {}, True, "reward.group = true, but .* takes one sample"),
        ("miles_user_code:batched_rm", {}, False, "reward.group = false, but .* takes a list `samples`"),
        ("exact", {}, True, "scores one sample"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_the_mend(path, options, group, says):
    with pytest.raises(ConfigError, match=says):
        load_reward(path, options, group=group)


def test_args_have_every_unambiguous_setting_and_explain_what_is_absent():
    args = make_args(CONFIG, {"temperature": 0.5})
    assert (args.n_samples_per_prompt, args.replicas, args.temperature) == (8, 2, 0.5)
    assert args.rollout["replicas"] == 2 and args.reward_key is None
    assert getattr(args, "workers", "two tables have it") == "two tables have it"
    with pytest.raises(AttributeError, match=r"args.rm_url: .* add it to the options"):
        _ = args.rm_url


def test_a_sample_reads_like_theirs():
    sample = sample_from_input(member(2))
    assert (sample.group_index, sample.index, sample.tokens, sample.response_length) == (7, 2, [5, 6, 7], 3)
    sample.reward, sample.loss_mask, sample.weight_versions = {"acc": 1.0}, [1, 0, 1], ["9", "10"]
    assert sample.get_reward_value(SimpleNamespace(reward_key="acc")) == 1.0
    assert sample.get_reward_value(make_args()) == {"acc": 1.0}
    assert (sample.effective_response_length, sample.oldest_weight_version) == (2, 9)
    assert Sample().status is Sample.Status.PENDING


# ---------------------------------------------------------------- generate
TASK = TaskDispatched(
    group_id="0-7", seq=12, data_epoch=0, row=7, n_samples=4, prompt="2+2?", label="4", metadata={"level": 1}
)


def finished(**changes: Any) -> Sample:
    sample = sample_from_task(TASK, 2)
    sample.tokens, sample.response, sample.response_length = [1, 2, 3, 4, 5], "four", 3
    sample.rollout_log_probs, sample.status = [-0.1, 0.0, -0.3], Sample.Status.COMPLETED
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_a_task_becomes_a_pending_sample():
    sample = sample_from_task(TASK, 2)
    assert (sample.group_index, sample.index, sample.prompt, sample.label) == (12, 50, "2+2?", "4")
    assert sample.status is Sample.Status.PENDING and sample.metadata == {"level": 1}
    assert sample.metadata is not TASK.metadata


def test_what_a_generate_function_made_is_read_back():
    got = read_back(finished(loss_mask=[1, 0, 1], weight_versions=["12", "10"], reward=0.5))
    assert (got.prompt_ids.tolist(), got.response_ids.tolist()) == ([1, 2], [3, 4, 5])
    assert got.loss_mask.tolist() == [True, False, True]
    assert got.logprobs.tolist() == pytest.approx([-0.1, 0, -0.3])
    assert (got.version, got.finish_reason, got.reward, got.metadata) == (10, "stop", 0.5, {"level": 1})
    plain = read_back([finished(status=Sample.Status.TRUNCATED)])  # a list of one is one
    assert (plain.version, plain.finish_reason, plain.loss_mask.all()) == (None, "length", True)
    assert not read_back(finished(remove_sample=True)).loss_mask.any()


def test_a_sample_of_another_projects_class_is_read_by_its_attributes():
    theirs = enum.Enum("Status", {"COMPLETED": "completed"})
    foreign = SimpleNamespace(**{**vars(finished()), "status": theirs.COMPLETED})
    assert read_back(foreign).response_ids.tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("result", "reason", "says"),
    [
        ([finished(), finished()], "several_samples", "returned 2 samples for one member"),
        ([], "several_samples", "returned 0 samples"),
        (None, "no_sample", "returned NoneType"),
        (finished(status=Sample.Status.ABORTED), "aborted", "aborted"),
        (finished(status=Sample.Status.FAILED), "generate_error", "failed"),
        (finished(status=Sample.Status.PENDING), "generate_error", "completed or truncated was needed"),
        (finished(response_length=0), "no_tokens", "response_length is 0"),
        (finished(response_length=5), "length_mismatch", "prompt and response ids were needed"),
        (finished(loss_mask=[1, 1]), "length_mismatch", "loss_mask 2≠3"),
        (finished(rollout_log_probs=None), "missing_logprob", "rollout_log_probs is None"),
        (finished(rollout_log_probs=[-0.1]), "length_mismatch", "rollout_log_probs 1≠3"),
        (finished(weight_versions=["default"]), "unknown_version", "default"),
    ],
)
def test_a_result_that_cannot_be_trained_on_is_refused_with_its_reason(result, reason, says):
    with pytest.raises(InvalidEvent, match=says) as caught:
        read_back(result)
    assert caught.value.reason == reason
