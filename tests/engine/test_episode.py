"""Token bookkeeping of one sample: everything stays aligned, and ids are the engine's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interfaces import Completion
from engine.rollout.episode import Episode, PrefixMismatch
from streams.columns import VersionRun, trainable_runs
from streams.events import TaskDispatched
from streams.trajectory import open_payload, pack

TASK = TaskDispatched(
    group_id="2-5",
    seq=9,
    data_epoch=2,
    row=5,
    attempt=1,
    n_samples=4,
    prompt="p",
    label="L",
    metadata={"a": 1},
)


def said(ids: list[int], versions: list[VersionRun], logprob: float = -0.5) -> Completion:
    return Completion(np.array(ids, np.int32), np.full(len(ids), logprob, np.float32), versions, "stop")


def sample_of(episode: Episode):
    return episode.to_sample_data(TASK, 3, task_offset=17, finish_reason="stop", response="r", engine="e")


def test_policy_tokens_train_and_environment_tokens_are_masked_with_logprob_0() -> None:
    episode = Episode([1, 2])
    episode.append_policy(said([10, 11], [(0, 4, 2)]))
    episode.append_environment([20, 21, 22])
    episode.append_policy(said([12], [(0, 5, 1)], -0.25))
    payload = open_payload(pack(sample_of(episode)))
    assert payload.prompt_ids.tolist() == [1, 2]
    assert payload.response_ids.tolist() == [10, 11, 20, 21, 22, 12]
    assert payload.logprobs.tolist() == [-0.5, -0.5, 0, 0, 0, -0.25]
    assert payload.loss_mask.tolist() == [True, True, False, False, False, True]
    assert payload.versions == [(0, 4, 5), (0, 5, 1)]
    assert episode.turns == [(0, 2, "policy"), (2, 5, "environment"), (5, 6, "policy")]
    assert (len(episode), episode.n_policy_tokens) == (6, 3)


def test_a_sample_that_spans_versions_keeps_a_run_for_each() -> None:
    episode = Episode([1])
    episode.append_policy(said([7] * 420, [(0, 5, 120), (0, 7, 300)]))
    episode.append_environment([8] * 10)
    episode.append_policy(said([7] * 40, [(0, 8, 40)]))
    assert episode.versions == [(0, 5, 120), (0, 7, 310), (0, 8, 40)]
    event = pack(sample_of(episode))
    mask = open_payload(event).loss_mask
    assert trainable_runs(episode.versions, mask) == [(0, 5, 120), (0, 7, 300), (0, 8, 40)]


def test_what_the_environment_says_first_belongs_to_the_prompt() -> None:
    episode = Episode([1])
    episode.append_environment([2, 3])
    episode.append_policy(said([9], [(0, 0, 1)]))
    assert (episode.prompt_ids, episode.ids, episode.turns) == ([1, 2, 3], [9], [(0, 1, "policy")])


def test_tokens_that_came_back_changed_are_reported_at_their_place() -> None:
    episode = Episode([1, 2, 3])
    episode.append_policy(said([53122, 316], [(0, 4, 2)]))
    assert episode.check_prefix([1, 2, 3, 53122, 316, 77]) is None
    assert episode.check_prefix([1, 2, 3, 393, 30002]) == 3
    assert episode.check_prefix([1, 2, 3, 53122]) == 4
    assert episode.check_prefix([]) == 0


def test_a_prefix_mismatch_is_refused_and_the_engines_ids_stay() -> None:
    episode = Episode([1, 2, 3])
    episode.append_policy(said([53122, 316], [(0, 4, 2)]))
    with pytest.raises(PrefixMismatch, match=r"prefix_mismatch at 3") as refusal:
        episode.continue_with([1, 2, 3, 393, 30002])
    assert (refusal.value.reason, refusal.value.at) == ("prefix_mismatch", 3)
    payload = open_payload(pack(sample_of(episode)))
    assert payload.response_ids.tolist() == [53122, 316]
    assert len(payload.logprobs) == len(payload.loss_mask) == 2


def test_a_prefix_mismatch_can_split_the_sample_in_two() -> None:
    episode = Episode([1, 2, 3])
    episode.append_policy(said([53122, 316], [(0, 4, 2)]))
    episode.continue_with([1, 2, 3, 393, 30002, 8], on_mismatch="split")
    episode.append_policy(said([40, 41, 42], [(0, 5, 3)], -0.125))
    [first] = episode.parts
    assert (first.prompt_ids, first.ids, first.logprobs) == ([1, 2, 3], [53122, 316], [-0.5, -0.5])
    assert (first.mask, first.versions, first.turns) == ([1, 1], [(0, 4, 2)], [(0, 2, "policy")])
    assert (episode.prompt_ids, episode.ids) == ([1, 2, 3, 393, 30002, 8], [40, 41, 42])
    assert (episode.logprobs, episode.mask, episode.versions) == ([-0.125] * 3, [1, 1, 1], [(0, 5, 3)])
    assert sample_of(episode).metadata == {"a": 1, "prefix_splits": 1}
    for part in (first, episode):
        payload = open_payload(pack(sample_of(part)))
        assert len(payload.response_ids) == len(payload.logprobs) == len(payload.loss_mask)


def test_a_prompt_that_continues_the_episode_adds_the_environments_part_only() -> None:
    episode = Episode([1, 2, 3])
    episode.append_policy(said([5], [(0, 4, 1)]))
    episode.continue_with([1, 2, 3, 5, 6, 7])
    assert (episode.ids, episode.mask) == ([5, 6, 7], [1, 0, 0])


def test_the_sample_names_its_task_its_place_and_its_attempt() -> None:
    episode = Episode([1])
    episode.append_policy(said([9], [(0, 0, 1)]))
    sample = sample_of(episode)
    assert (sample.uid, sample.group_id, sample.index, sample.attempt) == ("2-5/3/1", "2-5", 3, 1)
    assert (sample.seq, sample.n_samples, sample.task_offset) == (9, 4, 17)
    assert (sample.prompt, sample.label, sample.metadata, sample.engine) == ("p", "L", {"a": 1}, "e")


TURN = st.one_of(
    st.lists(st.integers(0, 60_000), max_size=5).map(lambda ids: ("environment", ids)),
    st.tuples(st.lists(st.integers(0, 60_000), min_size=1, max_size=5), st.integers(0, 3)).map(
        lambda turn: ("policy", turn)
    ),
)


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(TURN, max_size=12))
def test_every_sequence_of_turns_stays_aligned(prompt: list[int], turns: list) -> None:
    episode = Episode(prompt)
    everything, policy = list(prompt), []
    for who, turn in turns:
        if who == "policy":
            ids, version = turn
            episode.append_policy(said(ids, [(0, version, len(ids))]))
            policy += ids
            everything += ids
        else:
            episode.append_environment(turn)
            everything += turn
    assert episode.context == episode.prompt_ids + episode.ids == everything
    assert len(episode.ids) == len(episode.logprobs) == len(episode.mask) == len(episode)
    assert sum(run[2] for run in episode.versions) == len(episode)
    assert [token for token, on in zip(episode.ids, episode.mask, strict=True) if on] == policy
    assert sum(end - start for start, end, _ in episode.turns) == len(episode)
    assert episode.check_prefix(everything) is None
