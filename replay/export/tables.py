"""The tables of an export: their columns, in order, and what each means. One schema for every file format.

Joined on `uid` (a sample), `group_id` or `seq` (a group), `step`, and (`partition`, `offset`), a record's place in the
topic that its table comes from. Times are milliseconds since 1970, durations seconds, null what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]  # column → value; a JSON column holds the value itself until it is written

TEXT, INT, FLOAT, BOOL, JSON = "text", "int", "float", "bool", "json"  # JSON: as a text
IDS, FLOATS, MASK = "ids", "floats", "mask"  # lists of int32, float32, 0/1
RUNS = "runs"  # list of {epoch, version, n_tokens}
TURNS = "turns"  # list of {start, end, who}
ARRAYS = (IDS, FLOATS, MASK)

SAMPLES, REWARDS, GROUPS, STEPS, DROPS = "samples", "rewards", "groups", "steps", "drops"
VERSIONS, FLEET, METRICS, FAILURES = "versions", "fleet", "metrics", "failures"


class Column(NamedTuple):
    name: str
    kind: str
    meaning: str = ""


class Table(NamedTuple):
    """`time` is the column by which a row belongs to a stretch of time."""

    name: str
    time: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]


_PLACE = (Column("partition", INT), Column("offset", INT, "of the record in its topic"))
_MEMBER = (
    Column("uid", TEXT),
    Column("group_id", TEXT),
    Column("seq", INT, "dispatch number of the group"),
    Column("index", INT, "place in the group"),
    Column("attempt", INT, "0: first dispatch"),
)
_RESULT = (
    Column("step", INT, "that trained it"),
    Column("reason", TEXT, "why it was dropped"),
    Column("closed_ms", INT, "when it was trained or dropped"),
)

TABLES = {
    table.name: table
    for table in (
        Table(
            SAMPLES,
            "finished_ms",
            (
                *_MEMBER,
                *_PLACE,
                Column(
                    "outcome",
                    TEXT,
                    "trained, skipped (its step changed nothing), dropped, unused (its group was trained without it), "
                    "duplicate (a copy of a uid) or open",
                ),
                *_RESULT,
                Column("reward", FLOAT),
                Column("components", JSON),
                Column("scoring_failure", TEXT, "reason and detail where there is no reward"),
                Column(
                    "advantage",
                    FLOAT,
                    "that the run's estimator gave it (`ppo`: its reward, before the critic)",
                ),
                Column("staleness", INT, "of its oldest trained token when the batch was cut"),
                Column("n_trainable_tokens", INT, "that were trained"),
                Column("prompt", JSON),
                Column("prompt_ids", IDS, "[P]"),
                Column("response", TEXT),
                Column("response_ids", IDS, "[L]"),
                Column("logprobs", FLOATS, "[L], behaviour policy; 0 where the mask is 0"),
                Column("loss_mask", MASK, "[L], 1 on tokens that the policy sampled"),
                Column("versions", RUNS, "over the L response tokens"),
                Column("turns", TURNS, "who wrote which part of the response"),
                Column("n_prompt_tokens", INT, "P"),
                Column("n_response_tokens", INT, "L"),
                Column("finish_reason", TEXT),
                Column("label", JSON),
                Column("metadata", JSON),
                Column("temperature", FLOAT),
                Column("engine", TEXT),
                Column("claims", JSON, "what lies outside the log: name → URI, bytes, SHA-256"),
                Column("dispatched_ms", INT, "of the attempt that made it"),
                Column("started_ms", INT),
                Column("finished_ms", INT),
                Column("scored_ms", INT),
                Column("in_flight_s", FLOAT, "dispatched to finished"),
                Column("in_queue_s", FLOAT, "finished to trained or dropped"),
                Column("scoring_s", FLOAT),
            ),
        ),
        Table(
            REWARDS,
            "scored_ms",
            (
                *_MEMBER,
                *_PLACE,
                Column("trajectory_offset", INT, "of the sample, same partition"),
                Column("reward", FLOAT),
                Column("components", JSON),
                Column("n_prompt_tokens", INT),
                Column("n_response_tokens", INT),
                Column("n_trainable_tokens", INT, "tokens that the policy sampled"),
                Column("finish_reason", TEXT),
                Column("scoring_s", FLOAT),
                Column("started_ms", INT, "of the sample"),
                Column("finished_ms", INT, "of the sample"),
                Column("scored_ms", INT),
                Column("payload_digest", TEXT),
            ),
        ),
        Table(
            GROUPS,
            "dispatched_ms",
            (
                Column("group_id", TEXT),
                Column("seq", INT),
                *_PLACE,
                Column("data_epoch", INT),
                Column("row", INT, "of the dataset"),
                Column("n_samples", INT, "that were asked for"),
                Column("outcome", TEXT, "trained, skipped, dropped or open"),
                *_RESULT,
                Column("detail", TEXT),
                Column("trainer_version", INT, "when it was trained or dropped"),
                Column("min_version", INT),
                Column("redispatches", INT),
                Column("n_members", INT, "of the completed group"),
                Column("reward_mean", FLOAT),
                Column("reward_std", FLOAT, "population standard deviation"),
                Column("n_response_tokens", INT, "of all members"),
                Column("dispatched_ms", INT),
                Column("completed_ms", INT),
                Column("prompt", JSON),
                Column("label", JSON),
                Column("metadata", JSON),
            ),
        ),
        Table(
            STEPS,
            "cut_ms",
            (
                Column("step", INT),
                Column("epoch", INT, "of the trainer"),
                Column("version", INT, "that the step started from"),
                *_PLACE,
                Column("cut_ms", INT),
                Column("limit", INT),
                Column("on_stale", TEXT),
                Column("seed", INT),
                Column("n_groups", INT),
                Column("n_samples", INT),
                Column("n_trainable_tokens", INT),
                Column("reward_mean", FLOAT),
                Column("staleness_mean", FLOAT),
                Column("staleness_max", INT),
                Column("n_dropped", INT, "groups, named by the same record"),
                Column("duplicates", INT, "copies of groups that were passed over since the record before"),
                Column("last", BOOL),
                Column("skipped", TEXT, "reason, if the step changed nothing"),
                Column("metrics", JSON, "of the trainer, with the off-policy measures of the whole step"),
            ),
        ),
        Table(
            DROPS,
            "closed_ms",
            (
                Column("group_id", TEXT),
                Column("seq", INT),
                Column("reason", TEXT),
                Column("detail", TEXT),
                Column("staleness", INT, "null where the reason is another"),
                Column("step", INT, "whose cut named it; null: dropped between cuts"),
                Column("epoch", INT),
                Column("trainer_version", INT),
                *_PLACE,
                Column("closed_ms", INT),
            ),
        ),
        Table(
            VERSIONS,
            "published_ms",
            (
                Column("version", INT),
                Column("epoch", INT),
                Column("step", INT, "that made it"),
                *_PLACE,
                Column("kind", TEXT),
                Column("base_version", INT),
                Column("digest", TEXT),
                Column("nbytes", INT),
                Column("uris", JSON),
                Column("forked_at", INT, "first of an epoch: older epochs' versions above this count as it"),
                Column("published_ms", INT),
            ),
        ),
        Table(
            FLEET,
            "at_ms",
            (
                Column("type", TEXT),
                Column("engine", TEXT),
                *_PLACE,
                Column("replica", INT),
                Column("host", TEXT),
                Column("pid", INT),
                Column("epoch", INT),
                Column("version", INT),
                Column("digest", TEXT),
                Column("load_s", FLOAT),
                Column("stall_s", FLOAT),
                Column("reason", TEXT),
                Column("detail", TEXT),
                Column("at_ms", INT),
            ),
        ),
        Table(
            METRICS,
            "at_ms",
            (
                Column("source", TEXT),
                Column("name", TEXT),
                Column("value", FLOAT),
                Column("step", INT, "null where the daemon knows none; of `eval`: the version"),
                *_PLACE,
                Column("at_ms", INT),
            ),
        ),
        Table(
            FAILURES,
            "at_ms",
            (
                Column("topic", TEXT),
                *_PLACE,
                Column("type", TEXT, "of the event; null: it cannot be read"),
                Column("uid", TEXT),
                Column("group_id", TEXT),
                Column("stage", TEXT, "where it failed"),
                Column("reason", TEXT),
                Column("detail", TEXT),
                Column("engine", TEXT),
                Column("at_ms", INT),
            ),
        ),
    )
}
