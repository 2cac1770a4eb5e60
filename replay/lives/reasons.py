"""What each typed reason means, in one plain sentence, and which setting governs it.

The words are written by consumers/ (batches, collector, filters, reward, rewards), engine/rollout and engine/trainer.
One that is not here comes from a user's filter, reward or generate function, or from a newer writer.
"""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    meaning: str
    setting: str = ""  # what governs it; "": no setting does


_LIMIT = "staleness.max_weight_staleness"
_REWARD = "reward.function"
_GENERATE = "rollout.generate"
_AGAIN = "collector.max_redispatch"
_NOTHING_TO_TRAIN = "Not one of its tokens has a loss mask of 1."

REASONS: dict[str, Reason] = {
    # the rule (consumers/staleness.py)
    "stale": Reason(
        "At the cut its oldest trainable token was more versions behind the trainer than the limit allows; the "
        "feeder dispatches another group in its place.",
        f"{_LIMIT}; with staleness.on_stale = mask only the tokens that are too old are left out",
    ),
    "future": Reason(
        "It holds tokens of a version that the trainer had not made yet, so its version stamps cannot be right."
    ),
    "unknown_version": Reason(
        "It holds tokens of a version that was never published in the epoch they name."
    ),
    "no_trainable_tokens": Reason(_NOTHING_TO_TRAIN, _GENERATE),
    # the trainer
    "surplus": Reason(
        "The run ended while it was open or waiting: it was not needed any more, and nothing is wrong with it.",
        "run.steps, data.epochs; trainer.last_batch for a short last batch",
    ),
    "bad_payload": Reason(
        "The trainer fetches and checks every payload before it cuts a batch, and one of this group's could not be "
        "trained on.",
        "model.path (longest sequence, vocabulary); the detail says what was wrong",
    ),
    "quarantined": Reason(
        "An engine that the trainer has quarantined made one of its samples: the log-probs that it recorded were too "
        "far from those that the trainer worked out under the same weights. Nothing of that incarnation is trained.",
        "rollout.max_logprob_mismatch",
    ),
    "lost": Reason(
        "The collector's record of it was gone (retention or damage) before the trainer had read it.",
        "log.on_lost, log.retention_s, log.retention_bytes",
    ),
    # the collector
    "incomplete": Reason(
        "Members failed and no attempt was left, so that fewer were there than a group may have.",
        f"collector.min_group_size, {_AGAIN}",
    ),
    "member_missing": Reason(
        "A member never came within the deadline, as often as it was dispatched.",
        f"collector.member_deadline_s, {_AGAIN}",
    ),
    "teacher_missing": Reason(
        "A member had its reward, and the teacher's scores of it never came within the deadline.",
        f"collector.member_deadline_s, teacher.replicas, {_AGAIN}",
    ),
    "teacher_too_long": Reason("A member has more tokens than the teacher takes.", "teacher.path"),
    "teacher_bad_token_id": Reason("A member holds a token that the teacher does not have.", "teacher.path"),
    "teacher_bad_logprob": Reason(
        "The teacher gave a member a log-prob that is not finite or above 0; that is never taken for a 0.",
        "teacher.path, teacher.dtype",
    ),
    "task_skipped": Reason("Its row of the dataset cannot be used.", "data.path, data.prompt_key"),
    "zero_variance": Reason(
        "All its rewards are equal, so every advantage would be 0 and it would teach nothing.",
        "collector.filters (zero_variance)",
    ),
    "reward_below_range": Reason(
        "Its mean reward lies below the range that is trained on: too hard.",
        "collector.options.reward_range.low",
    ),
    "reward_above_range": Reason(
        "Its mean reward lies above the range that is trained on: too easy.",
        "collector.options.reward_range.high",
    ),
    "bad_label": Reason(
        "The generate function `given` publishes the label of a row as its response, and this one is no response.",
        "data.path, data.label_key",
    ),
    # reward
    "reward_timeout": Reason(
        "The reward function did not answer in time; that is no reward of 0.", "reward.timeout_s"
    ),
    "reward_error": Reason("The reward function raised an error; that is no reward of 0.", _REWARD),
    "reward_missing": Reason(
        "The reward function returned no value (None); that is no reward of 0.", _REWARD
    ),
    "reward_nonfinite": Reason("The reward is not a finite number.", _REWARD),
    "worker_died": Reason(
        "The process that scored it died twice; that is no reward of 0.", f"{_REWARD}, reward.workers"
    ),
    "group_incomplete": Reason(
        "The reward function scores whole groups, and not all members came in time.",
        "reward.group, collector.member_deadline_s",
    ),
    # rollout
    "task_deadline": Reason(
        "It was not generated within the time for one sample.", "rollout.task_deadline_s"
    ),
    "generate_error": Reason("The generate function raised an error.", _GENERATE),
    "aborted": Reason("Its generation was broken off, and nothing of it counts.", _AGAIN),
    "bad_request": Reason(
        "The engine refused the request.", "rollout.rollout_max_response_len, model.path; see the detail"
    ),
    "bad_sample": Reason("The generate function returned something that is no sample.", _GENERATE),
    "unencodable": Reason(
        "The generate function put something into it that has no form in the log.", _GENERATE
    ),
    "record_too_large": Reason(
        "The sample is larger than any record that the log may take; its whole group goes, since training the short "
        "members alone would teach that long answers do not exist.",
        "log.max_claim_bytes, log.max_record_bytes, rollout.rollout_max_response_len",
    ),
    "engine_died": Reason("The engine broke while it was generated.", _AGAIN),
    "engine_closed": Reason("The engine was closed while it was generated.", _AGAIN),
    "engine_unreachable": Reason(
        "Nothing answered at the engine's address, or the connection broke.", _AGAIN
    ),
    "engine_timeout": Reason(
        "The engine did not answer in time.", f"rollout.sglang.request_timeout_s, {_AGAIN}"
    ),
    "engine_refused": Reason(
        "The engine's server answered with an error; its words are in the detail.", _AGAIN
    ),
    "bad_answer": Reason(
        "The engine's answer breaks the contract between client and server; the detail names the field.",
        "three such answers, or refused samples, among the last ten of an engine flag it in fleet",
    ),
    "prompt_too_long": Reason(
        "The prompt leaves no room for an answer in the engine's context.",
        "rollout.rollout_max_response_len, model.path",
    ),
    "no_weights": Reason("The engine held no weights yet.", _AGAIN),
    "nonfinite_logprob": Reason(
        "A behaviour log-prob is not finite, so no ratio could be formed.", _GENERATE
    ),
    "positive_logprob": Reason("A behaviour log-prob is above 0, so it is none.", _GENERATE),
    "missing_logprob": Reason("A sampled token came without its log-prob.", _GENERATE),
    "length_mismatch": Reason("Its token ids, mask, log-probs or version runs differ in length.", _GENERATE),
    "no_tokens": Reason("Its prompt or its response has no tokens.", _GENERATE),
    "bad_token_id": Reason("A token id is no id of the vocabulary.", f"model.path, {_GENERATE}"),
    "bad_mask": Reason("Its loss mask holds values other than 0 and 1.", _GENERATE),
    # skipped steps
    "nonfinite_loss": Reason(
        "The loss was not finite; weights and optimizer were put back.", "trainer.max_bad_steps, trainer.lr"
    ),
    "nonfinite_gradient": Reason(
        "The gradient was not finite; weights and optimizer were put back.",
        "trainer.max_bad_steps, trainer.lr",
    ),
    "too_long": Reason("A sample is longer than the model takes.", "model.path"),
    # refused records
    "undecodable": Reason("The record's bytes are no event."),
    "schema_too_new": Reason("The record was written by a newer version than the stage that read it."),
    "over_cap": Reason("The record grows beyond what an event may have once it is opened."),
    "claim_lost": Reason("The record's value lies in a file beside the log, which is missing or damaged."),
    "conflict": Reason("The same id came again with another body: the first stays, this one is refused."),
    "damaged": Reason("The stored bytes fail their checksum; none of them can be believed.", "log.on_lost"),
    # bad rows
    "bad_json": Reason("The row is not JSON.", "data.path"),
    "missing_prompt": Reason("The row has no prompt under the key that is asked for.", "data.prompt_key"),
    "bad_metadata": Reason("The row's metadata is no object.", "data.metadata_key"),
}

_OTHER = Reason(
    "This word is none of Millstream's own: it comes from a filter, reward or generate function of yours, or from a "
    "newer version.",
    "collector.filters, reward.function, rollout.generate",
)


def explain(reason: str) -> Reason:
    """Never fails: a word that is not known says where it may come from."""
    return REASONS.get(reason, _OTHER)
