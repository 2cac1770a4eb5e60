"""Supervised training through the log: the dataset's own responses are published as samples, and nothing is sampled.

    task (prompt, label) ──► ids of the label, end of sequence ──► TrajectoryFinished ──► … ──► trainer.loss = "sft"

Feeder, log, collector, ledger and replay are those of every run; only that no policy made these tokens. What is
recorded says so: log-prob 0, which is the data's own (it gives each of these tokens, and no other), no engine, and
finish_reason "given". A ratio to such a "policy" means nothing, so no loss but "sft" takes them
(engine/config_checks.py). Versions are those that the engine held: a response is no staler for it, but the run's pace
and its limit count by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.interfaces import Completion
from engine.rollout.episode import Episode
from streams.errors import InvalidEvent
from streams.events import TaskDispatched
from streams.trajectory import SampleData

if TYPE_CHECKING:
    from engine.rollout.generate import GenerateContext

GIVEN = "given"


async def given(context: GenerateContext, task: TaskDispatched, index: int) -> SampleData:
    """The label, a text or token ids, as the response; cut at rollout_max_response_len, as a sampled one would be.

    A text gets the model's end of sequence after it. Raises InvalidEvent("bad_label").
    """
    held = context.engine.held
    assert held is not None, "a task starts only once its engine holds weights"
    episode = Episode(context.text.prompt_ids(task.prompt))
    ids = _response_ids(context, task)
    most = context.sampling.max_tokens
    kept = np.array(ids[:most], np.int32)
    run = (held.epoch, held.version, len(kept))
    episode.append_policy(Completion(kept, np.zeros(len(kept), np.float32), [run], GIVEN))
    response = task.label if isinstance(task.label, str) and len(ids) <= most else None
    finish_reason = GIVEN if len(ids) <= most else "length"
    sample = context.finish(episode, task, index, finish_reason=finish_reason, response=response)
    sample.engine, sample.turns = "", []
    return sample


def _response_ids(context: GenerateContext, task: TaskDispatched) -> list[int]:
    label = task.label
    if isinstance(label, str) and label:
        ids, ends = context.text.reply_ids(label), context.sampling.stop_ids
        return ids if not ends or ids[-1] in ends else [*ids, ends[0]]
    if isinstance(label, list) and label and all(type(each) is int for each in label):
        return list(label)
    raise InvalidEvent(
        "bad_label",
        f"the label of {task.group_id} is {type(label).__name__} {str(label)[:80]!r}; `given` needs the response: a "
        "text that is not empty, or a list of token ids",
    )
