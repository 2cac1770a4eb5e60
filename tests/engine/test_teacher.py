"""On-policy distillation: the teacher's model, its scores on their way into a batch, a student that learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumers.enrichers.teacher import Refused
from consumers.staleness import Lineage
from engine.config import build_config
from engine.interfaces import Inputs, TrainBatch, TrainSample
from engine.launch.local import daemons_of
from engine.teacher import TorchTeacher
from engine.trainer.payloads import BadPayload, Payloads, train_batch
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from streams import columns
from streams.errors import ConfigError
from streams.events import BatchCut, CutGroup, CutMember, GroupCompleted, Member, TeacherScored
from streams.trajectory import Payload
from tests.engine.trainer_support import batch_of, folder_of, reference_logprobs, tiny_gpt2
from tests.support.events import finished, member_fields, put, run_log


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_tokenizer(folder: Path, words: int = 23, swapped: bool = False) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{place}": place for place in range(words)}
    if swapped:
        vocabulary["w5"], vocabulary["w6"] = 6, 5
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path):
    """(teacher, policy): other weights, the same tokens."""
    policy, teacher = tiny_gpt2(seed=1), tiny_gpt2(seed=2)
    return with_tokenizer(folder_of(teacher, tmp_path / "teacher")), with_tokenizer(
        folder_of(policy, tmp_path / "policy")
    )


# ---------------------------------------------------------------- the model
def test_its_scores_are_those_of_a_plain_forward_at_temperature_one(folders):
    teacher = TorchTeacher(*folders, micro_batch_tokens=16)
    samples = batch_of(9, seed=4).samples
    found = teacher.score([sample.payload for sample in samples])
    plain = tiny_gpt2(seed=2).eval()
    for sample, scores in zip(samples, found, strict=True):
        expected, _ = reference_logprobs(plain, sample._replace(loss_mask=sample.payload.loss_mask))
        assert scores == pytest.approx(expected.detach().numpy(), abs=1e-5)


def test_what_it_has_no_row_for_is_refused_and_the_others_are_scored(folders):
    teacher = TorchTeacher(*folders)
    short, long = batch_of(2, seed=1).samples
    ids = np.full(30, 4, np.int32)
    too_long = Payload(ids[:2], ids, np.zeros(30, np.float32), np.ones(30, bool), [(0, 0, 30)])
    unknown = long.payload._replace(response_ids=long.payload.response_ids + 100)
    found = teacher.score([too_long, short.payload, unknown])
    assert isinstance(found[0], Refused) and found[0].reason == "too_long"
    assert isinstance(found[1], np.ndarray) and len(found[1]) == short.payload.loss_mask.sum()
    assert isinstance(found[2], Refused) and found[2].reason == "bad_token_id"
    assert teacher.score([]) == []


def test_a_teacher_of_other_tokens_is_refused_by_the_first_that_differs(folders, tmp_path):
    other = with_tokenizer(folder_of(tiny_gpt2(), tmp_path / "other"), swapped=True)
    with pytest.raises(ConfigError, match=r"'w5' is id 6 there and id 5 here"):
        TorchTeacher(other, folders[1])
    more = with_tokenizer(folder_of(tiny_gpt2(), tmp_path / "more"), words=24)
    with pytest.raises(ConfigError, match=r"'w23' is id 23 there and unknown here"):
        TorchTeacher(more, folders[1])
    with pytest.raises(ConfigError, match=r"teacher\.path = .* its tokenizer cannot be loaded"):
        TorchTeacher(tmp_path / "nowhere", folders[1])


# ---------------------------------------------------------------- into a batch
class Written:
    """A log with one trajectory and what the teacher says of it."""

    def __init__(self, **changes: Any) -> None:
        self.log, self.topics = run_log()
        self.trajectory = put(self.log, self.topics, "trajectories", finished(0, 0, 0))
        fields = {
            **member_fields(0, 0, 0),
            "trajectory_offset": self.trajectory,
            "logprobs": columns.encode_logprobs([-1.0, -2.0, -3.0]),
            **changes,
        }
        self.scored = put(self.log, self.topics, "rewards", TeacherScored(**fields))

    def group(self, offset: int) -> GroupCompleted:
        member = Member(
            uid="0-0/0/0", index=0, trajectory_offset=self.trajectory, reward=1.0, teacher_offset=offset
        )
        return GroupCompleted(group_id="0-0", seq=0, task_offset=0, n_samples=1, members=[member])

    def cut(self, offset: int, on_stale: str = "drop") -> BatchCut:
        member = CutMember("0-0/0/0", self.trajectory, 1.0, 0, 3, offset)
        return BatchCut(
            epoch=1, version=0, frontier=1, step=1, groups=[CutGroup("0-0", 0, 0, 0, [member])], positions=[1],
            limit=0, on_stale=on_stale, seed=1, ledger_read_to=0, cut_ms=0,
        )  # fmt: skip


WITH = Inputs(with_teacher=True)


def test_scores_come_into_the_batch_by_reference_the_same_live_and_replayed():
    written = Written()
    live = Payloads(written.log, written.topics, with_teacher=True)
    live.prepare(0, written.group(written.scored))
    (there,) = train_batch(written.cut(written.scored), live, Lineage(), WITH).samples
    (again,) = train_batch(
        written.cut(written.scored), Payloads(written.log, written.topics), Lineage(), WITH
    ).samples
    assert there.teacher is not None and again.teacher is not None
    assert there.teacher.tolist() == again.teacher.tolist() == [-1, -2, -3]
    (plain,) = train_batch(
        written.cut(written.scored), Payloads(written.log, written.topics), Lineage()
    ).samples
    assert plain.teacher is None, "a loss that does not look at a teacher does not read it"


@pytest.mark.parametrize(
    ("changes", "offset", "said"),
    [
        ({}, -1, "names no scores of a teacher"),
        ({}, 7, "offset 7 is outside the kept range"),
        ({"uid": "0-0/1/0"}, 0, "holds 0-0/1/0"),
        ({"trajectory_offset": 5}, 0, "scored 3 tokens of offset 5"),
        ({"logprobs": columns.encode_logprobs([-1.0])}, 0, "scored 1 tokens"),
        ({"logprobs": columns.encode_logprobs([-1.0, np.nan, -1.0])}, 0, "is not finite"),
        ({"logprobs": b"\1\7"}, 0, "unknown column format 7"),
    ],
)
def test_a_group_whose_scores_cannot_be_used_is_refused_before_it_is_cut(changes, offset, said):
    written = Written(**changes)
    with pytest.raises(BadPayload, match=said):
        Payloads(written.log, written.topics, with_teacher=True).prepare(0, written.group(offset))
    with pytest.raises(BadPayload, match=said):
        train_batch(written.cut(offset), Payloads(written.log, written.topics), Lineage(), WITH)


# ---------------------------------------------------------------- learning
def test_a_student_moves_to_its_teacher_on_its_own_samples_without_a_reward(folders):
    policy_folder = folders[1]
    teacher = TorchTeacher(*folders)
    backend = TorchBackend(policy_folder, TorchSettings(loss="opd", lr=3e-3, threads=1, eps_clip=0.5))
    assert backend.inputs.with_teacher
    rng, gaps = torch.Generator().manual_seed(0), []
    for step in range(1, 41):
        payloads = sampled(backend.model, rng, step - 1)
        scores = [each for each in teacher.score(payloads) if isinstance(each, np.ndarray)]
        gaps.append(
            float(np.mean([payload.logprobs - each for payload, each in zip(payloads, scores, strict=True)]))
        )
        samples = [
            TrainSample(f"{step}-{place}/0/0", payload, payload.loss_mask, 0.0, teacher=each)
            for place, (payload, each) in enumerate(zip(payloads, scores, strict=True))
        ]
        backend.step(TrainBatch(step, step - 1, step, samples))
    assert np.mean(gaps[:4]) > 0.5, "nat per token: the reverse KL"
    assert np.mean(gaps[-4:]) < np.mean(gaps[:4]) / 3


@torch.no_grad()
def sampled(
    model: Any, rng: torch.Generator, version: int, count: int = 32, length: int = 4
) -> list[Payload]:
    """Samples of the student, one after one prompt."""
    ids = torch.tensor([[3, 4]] * count)
    logprobs = torch.zeros(count, 0)
    for _ in range(length):
        logp = torch.log_softmax(model(ids).logits[:, -1], -1)
        tokens = torch.multinomial(logp.exp(), 1, generator=rng)
        ids, logprobs = torch.cat([ids, tokens], 1), torch.cat([logprobs, logp.gather(1, tokens)], 1)
    return [
        Payload(
            row[:2].numpy().astype(np.int32),
            row[2:].numpy().astype(np.int32),
            own.numpy(),
            np.ones(length, bool),
            [(0, version, length)],
        )
        for row, own in zip(ids, logprobs, strict=True)
    ]


# ---------------------------------------------------------------- configuration
def configured(**sections: dict[str, Any]):
    least = {"data": {"path": "p.jsonl"}, "model": {"path": "m"}, "reward": {"function": "exact"}}
    return build_config({**least, **sections})


def test_a_run_with_a_teacher_has_its_daemons():
    config = configured(trainer={"loss": "opd"}, teacher={"path": "t", "replicas": 2}, log={"partitions": 2})
    names = [(spec.role, spec.replica) for spec in daemons_of(config)]
    assert names.index(("teacher", 1)) == names.index(("reward", 0)) + 2
    assert ("teacher", 0) not in [(spec.role, spec.replica) for spec in daemons_of(configured())]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"loss": "opd"}}, "set teacher.path"),
        ({"teacher": {"path": "t"}}, "no loss looks at its scores"),
        (
            {"trainer": {"loss": "opd"}, "teacher": {"path": "t", "replicas": 3}, "log": {"partitions": 2}},
            "is below teacher.replicas = 3",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        configured(**sections)
