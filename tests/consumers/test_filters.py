"""Dynamic filters over the rewards of a group."""

import numpy as np
import pytest

from consumers.filters import Verdict, load_filter, reward_range, zero_variance
from streams.errors import ConfigError
from streams.events import Member


def group(*rewards: float) -> list[Member]:
    return [
        Member(uid=f"0-7/{i}/0", index=i, trajectory_offset=i, reward=reward, n_response_tokens=10 + i)
        for i, reward in enumerate(rewards)
    ]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module and put it on the path; gives its name."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def write(source: str) -> str:
        name = f"filters_{tmp_path.name}_{len(made)}"
        made.append(name)
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def test_zero_variance_drops_equal_rewards_only():
    assert zero_variance(group(0.1, 0.1, 0.1)) == Verdict(False, "zero_variance")
    assert zero_variance(group(1, 0)).keep


def test_reward_range_judges_the_mean():
    assert reward_range(group(0, 0, 0, 1), low=0.2, high=0.8).keep
    assert reward_range(group(0, 0, 0, 0), low=0.2) == Verdict(False, "reward_below_range")
    assert reward_range(group(1, 1, 1, 1), high=0.8) == Verdict(False, "reward_above_range")


def test_a_built_in_is_loaded_by_name_with_its_options():
    assert load_filter("reward_range", {"high": 0.9})(group(1, 1)).reason == "reward_above_range"
    assert load_filter("zero_variance")(group(0, 1)) == Verdict(True, "")


def test_a_custom_filter_gets_members_and_options(module):
    name = module(
        "def short(members, most=99):\n    return all(m.n_response_tokens <= most for m in members)\n"
    )
    assert load_filter(f"{name}:short")(group(0, 1)).keep
    assert load_filter(f"{name}:short", {"most": 10})(group(0, 1)) == Verdict(False, "short")


def test_a_miles_filter_gets_args_and_samples(module):
    name = module(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class DynamicFilterOutput:\n    keep: object\n    reason: str | None = None\n"
        "def check(args, samples, **kwargs):\n"
        "    rewards = [s.get_reward_value(args) for s in samples]\n"
        "    good = sum(rewards) >= args.least and samples[0].group_index == 7\n"
        "    return DynamicFilterOutput(keep=good, reason=f'sum_{sum(rewards):g}')\n"
        "def legacy(args, samples):\n    import numpy\n    return numpy.std([s.reward for s in samples]) > 0\n"
    )
    check = load_filter(f"{name}:check", {"least": 2})
    assert check(group(1, 1)).keep
    assert check(group(1, 0)) == Verdict(False, "sum_1")
    assert load_filter(f"{name}:legacy")(group(1, 1)) == Verdict(False, "legacy")


@pytest.mark.parametrize(
    ("path", "options", "says"),
    [
        ("zero_varianc", {}, "did you mean 'zero_variance'"),
        ("no_such_module_xyz:f", {}, "no module no_such_module_xyz"),
        ("zero_variance", {"low": 1}, "cannot be called as f\\(members, \\*\\*options\\).*low"),
        ("reward_range", {}, "needs low or high"),
    ],
)
def test_a_filter_that_cannot_work_is_refused_when_it_is_loaded(path, options, says):
    with pytest.raises(ConfigError, match=says):
        load_filter(path, options)


def test_an_async_filter_is_refused(module):
    with pytest.raises(ConfigError, match="async"):
        load_filter(f"{module('async def f(members): return True')}:f")


def test_a_filter_that_returns_no_verdict_says_so(module):
    broken = load_filter(f"{module('def f(members): return None')}:f")
    with pytest.raises(TypeError, match="returned NoneType"):
        broken(group(1, 0))
    assert load_filter(f"{module('def f(members): return len(members) > 1')}:f")(group(1, 0)).keep
    assert np.bool_(True).shape == ()  # how numpy's and torch's truth values are told
