"""Supervised training through the log: responses of the dataset as samples, and the likelihood that they gain."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from consumers.staleness import Lineage
from engine.config import build_config
from engine.interfaces import Sampling, TrainBatch, TrainSample, WeightsId
from engine.rollout.generate import GenerateContext, load_generate
from engine.rollout.given import given
from engine.rollout.scripted import ScriptedEngine
from engine.rollout.text import TokenText
from engine.trainer.mismatch import compared_makers
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError, InvalidEvent
from streams.events import TaskDispatched
from streams.trajectory import open_payload, pack
from tests.engine.trainer_support import folder_of, tiny_gpt2


def publish(label: Any, **sampling: Any):
    """The event of a task's own response."""

    def nothing(*_: Any) -> Any:
        raise AssertionError("nothing is sampled")

    engine = ScriptedEngine(nothing)
    engine._held = WeightsId(2, 7, "d")
    context = GenerateContext(
        engine=engine,
        text=TokenText(engine.tokenizer),
        sampling=Sampling(**{"max_tokens": 16, "stop_ids": (256,), **sampling}),
        request_id="r",
    )
    task = TaskDispatched(group_id="0-0", seq=0, data_epoch=0, row=0, n_samples=1, prompt="say", label=label)
    return pack(asyncio.run(given(context, task, 0)), incarnation="here")


def test_a_text_is_published_with_its_end_and_without_a_policy():
    event = publish("yes")
    payload = open_payload(event)
    assert payload.prompt_ids.tolist() == list(b"say")
    assert payload.response_ids.tolist() == [*b"yes", 256]
    assert payload.loss_mask.all() and payload.logprobs.tolist() == [0.0] * 4
    assert payload.versions == [(2, 7, 4)]
    assert (event.finish_reason, event.response, event.engine, event.turns) == ("given", "yes", "", [])


def test_token_ids_are_taken_as_they_are():
    assert open_payload(publish([5, 6, 256])).response_ids.tolist() == [5, 6, 256]
    assert open_payload(publish([5, 6])).response_ids.tolist() == [5, 6]


def test_a_long_response_is_cut_as_a_sampled_one_would_be():
    event = publish("abcdef", max_tokens=4)
    assert open_payload(event).response_ids.tolist() == list(b"abcd")
    assert (event.finish_reason, event.response) == ("length", "abcd")


@pytest.mark.parametrize("label", [None, "", [], ["a"], 3, [True]])
def test_a_label_that_is_no_response_fails_by_name(label):
    with pytest.raises(InvalidEvent, match="needs the response: a text that is not empty") as caught:
        publish(label)
    assert caught.value.reason == "bad_label"


def test_no_engine_is_blamed_for_log_probs_that_it_did_not_make():
    payload = open_payload(publish("yes"))
    lineage = Lineage()
    lineage.published(2, 7)
    batch = TrainBatch(8, 7, 0, [TrainSample("0-0/0/0", payload, payload.loss_mask, 0.0)])
    assert compared_makers(batch, lineage, 1) == [None]
    batch.samples[0] = batch.samples[0]._replace(payload=payload._replace(engine="rollout-0"))
    assert compared_makers(batch, lineage, 1) == [("rollout-0", "here")]


def test_its_samples_become_likely(tmp_path):
    payload = open_payload(publish([5, 9, 4, 20]))._replace(prompt_ids=np.array([3, 7], np.int32))
    threads = torch.get_num_threads()
    backend = TorchBackend(
        folder_of(tiny_gpt2(), tmp_path / "m"), TorchSettings(loss="sft", lr=1e-2, threads=1)
    )
    samples = [TrainSample("0-0/0/0", payload, payload.loss_mask, 0.0)]
    losses = [backend.step(TrainBatch(step, step - 1, step, samples))["loss"] for step in range(1, 41)]
    torch.set_num_threads(threads)
    assert losses[0] > 2 and losses[-1] < 0.1


def configured(**sections: dict[str, Any]):
    return build_config(
        {
            "data": {"path": "p.jsonl"},
            "model": {"path": "m"},
            "reward": {"function": "exact"},
            "rollout": {"generate": "given", "n_samples_per_prompt": 1, **sections.pop("rollout", {})},
            "trainer": {"loss": "sft", "behaviour_policy": "ignored", **sections.pop("trainer", {})},
            **sections,
        }
    )


def test_a_configuration_of_it_is_taken_and_its_function_found():
    assert configured().rollout.generate == "given"
    assert load_generate("given") is given


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"loss": "ppo", "behaviour_policy": "recorded"}}, 'set trainer.loss = "sft"'),
        ({"rollout": {"n_samples_per_prompt": 2}}, "set n_samples_per_prompt = 1"),
        ({"eval": {"path": "held.jsonl"}}, "remove eval.path"),
        ({"rollout": {"max_logprob_mismatch": 0.1}}, "no engine made these log-probs"),
        ({"trainer": {"behaviour_policy": "recorded"}}, "ignores the policy that sampled"),
    ],
)
def test_what_does_not_go_with_it_is_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        configured(**sections)
