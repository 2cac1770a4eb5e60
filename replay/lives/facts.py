"""The shapes of a life. Each is plain data: `--json` is exactly this, the renderers add nothing to it.

Times are milliseconds since 1970 (UTC), 0 where nothing says when; durations are seconds. None: not known or does not
apply, and then `notes` or the verdict say why. A `place` is "topic/partition:offset".
"""

from __future__ import annotations

from typing import Any

import msgspec


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all parts."""


# ---------------------------------------------------------------- what all lives have
class Moment(Part, frozen=True, kw_only=True):
    """One thing that happened."""

    at_ms: int
    place: str  # the record that says so
    what: str
    detail: str = ""
    is_void: bool = False  # a ledger record of a fenced epoch


class Verdict(Part, frozen=True, kw_only=True):
    """What became of a group or a sample, by the first valid ledger record that names its group."""

    outcome: str  # "trained", "skipped", "dropped", "not_used", "open"
    sentence: str  # the whole of it
    explanation: str = ""  # what the reason means
    setting: str = ""  # what governs it
    reason: str = ""  # the typed word
    detail: str = ""  # as the record has it
    step: int | None = None
    epoch: int | None = None
    version: int | None = None  # of the trainer when it was decided
    limit: int | None = None  # on staleness, then
    staleness: int | None = None
    at_ms: int = 0
    place: str = ""


class VoidCut(Part, frozen=True, kw_only=True):
    """A batch that a fenced epoch cut: it counts for nobody."""

    step: int
    epoch: int
    place: str
    at_ms: int
    since_epoch: int  # the epoch in charge by then


class Failure(Part, frozen=True, kw_only=True):
    """One attempt that came to nothing, or members asked for again."""

    at_ms: int
    place: str
    stage: str  # "rollout", "reward", "collector"
    uid: str  # of a sample; of missing members: group_id[indices]
    reason: str
    meaning: str
    setting: str = ""
    detail: str = ""


class Letter(Part, frozen=True, kw_only=True):
    """A refused record that names it."""

    at_ms: int
    place: str  # of the letter
    record: str  # place of the refused record; "" when it never came to the log
    stage: str
    reason: str
    meaning: str
    detail: str = ""


class Dispatch(Part, frozen=True, kw_only=True):
    at_ms: int
    place: str
    attempt: int
    indices: list[int]  # members asked for; [] = all
    min_version: int  # an engine starts it only from this version on


class Copy(Part, frozen=True, kw_only=True):
    """A second record of the same id: counted and passed over."""

    at_ms: int
    place: str
    what: str
    is_same: bool | None = None  # the same body as the first; None: was not compared


class Life(Part, frozen=True, kw_only=True, tag_field="kind"):
    run: str
    notes: list[str] = []  # what could not be seen, and why
    timeline: list[Moment] = []


# ---------------------------------------------------------------- sample
class VersionTokens(Part, frozen=True, kw_only=True):
    """Consecutive tokens of one version."""

    epoch: int
    version: int
    n_tokens: int


class Span(Part, frozen=True, kw_only=True):
    """Response tokens [begin, end) that share writer, use and version."""

    begin: int
    end: int
    by: str  # "policy", "environment"
    use: str  # "trained", "trainable" (no step used it), "too_old" (masked by the limit), "masked" (loss mask 0)
    epoch: int
    version: int
    ids: list[int]
    text: str | None = None  # None: no tokenizer
    mean_logprob: float | None = None  # of the behaviour policy; None where the mask is 0


class Reward(Part, frozen=True, kw_only=True):
    value: float
    components: dict[str, float]
    scoring_s: float
    at_ms: int
    place: str


class Ages(Part, frozen=True, kw_only=True):
    """How old it was when its outcome was decided, in two parts (DESIGN §7); versions add up to the staleness."""

    in_flight_s: float | None = None  # dispatch to finish
    in_queue_s: float | None = None  # finish to cut, or drop
    in_flight_versions: int | None = None  # oldest trainable token to newest published at the finish
    in_queue_versions: int | None = None  # from there to the trainer's version
    generating_s: float | None = None  # the part of in_flight_s that an engine worked on it


class Measured(Part, frozen=True, kw_only=True):
    """Its row of StepMeasured: how far the policy had moved when it was trained (consumers/telemetry.py)."""

    place: str
    sums: dict[str, float]
    gauges: dict[str, float]  # summarize() of this row alone


class SampleLife(Life, frozen=True, kw_only=True, tag="sample"):
    uid: str
    group_id: str
    index: int
    attempt: int
    seq: int | None
    partition: int | None  # None: only the ledger knows it any more
    verdict: Verdict
    dispatch: Dispatch | None = None  # of this attempt
    engine: str = ""
    started_ms: int = 0
    finished_ms: int = 0
    finish_reason: str = ""
    temperature: float | None = None
    prompt: Any = None
    label: Any = None
    metadata: dict[str, Any] = {}
    response: str = ""
    prompt_ids: list[int] = []
    prompt_text: str | None = None  # by the tokenizer
    n_response_tokens: int = 0
    versions: list[VersionTokens] = []
    spans: list[Span] = []
    n_trained_tokens: int | None = None
    reward: Reward | None = None
    group_mean: float | None = None
    group_std: float | None = None
    advantage: float | None = None  # None: not known, not yet, or not of a whole sample (a critic's)
    advantage_estimator: str = "grpo"  # "": the loss looks at no reward
    ages: Ages | None = None
    measured: Measured | None = None
    failures: list[Failure] = []
    letters: list[Letter] = []
    copies: list[Copy] = []
    void_cuts: list[VoidCut] = []
    other_attempts: list[str] = []
    claims: dict[str, str] = {}  # name → URI of what lies outside the log
    place: str = ""  # of its trajectory


# ---------------------------------------------------------------- group
class MemberRow(Part, frozen=True, kw_only=True):
    """One sample of a group, the attempt that counts or the newest one."""

    uid: str
    index: int
    state: str  # "trained", "not trained", "scored", "failed: reason", "generated", "dispatched", …
    reward: float | None = None
    components: dict[str, float] = {}
    advantage: float | None = None
    staleness: int | None = None
    n_response_tokens: int | None = None
    n_trained_tokens: int | None = None
    versions: list[VersionTokens] = []  # over trainable tokens
    engine: str = ""
    finish_reason: str = ""
    started_ms: int = 0
    finished_ms: int = 0
    place: str = ""


class GroupLife(Life, frozen=True, kw_only=True, tag="group"):
    group_id: str
    seq: int | None
    data_epoch: int | None = None
    row: int | None = None
    partition: int | None  # None: only the ledger knows it any more
    verdict: Verdict
    waits_for: str = ""  # of an open group
    prompt: Any = None
    label: Any = None
    metadata: dict[str, Any] = {}
    n_samples: int | None = None
    members: list[MemberRow] = []
    reward_mean: float | None = None
    reward_std: float | None = None
    is_flat: bool | None = None
    ages: Ages | None = None  # of its slowest member
    dispatches: list[Dispatch] = []
    failures: list[Failure] = []
    letters: list[Letter] = []
    copies: list[Copy] = []
    void_cuts: list[VoidCut] = []


# ---------------------------------------------------------------- step
class StepGroup(Part, frozen=True, kw_only=True):
    group_id: str
    place: str  # of its GroupCompleted
    rewards: list[float]
    mean: float
    std: float
    staleness: list[int]  # per member; -1: not trained
    n_trained_tokens: int
    in_flight_s: float | None = None  # of its slowest member
    in_queue_s: float | None = None
    gauges: dict[str, float] = {}


class StepDrop(Part, frozen=True, kw_only=True):
    group_id: str
    reason: str
    staleness: int | None
    detail: str
    place: str


class Bucket(Part, frozen=True, kw_only=True):
    """The samples of one staleness."""

    staleness: int
    n_samples: int
    n_tokens: int
    reward_mean: float
    gauges: dict[str, float] = {}


class StepLife(Life, frozen=True, kw_only=True, tag="step"):
    step: int
    epoch: int
    version: int  # of the weights that it started from
    sentence: str
    outcome: str  # "trained", "skipped", "under way", "void"
    limit: int
    on_stale: str
    limit_set_by: str = ""  # the LimitChanged that it had read
    seed: int
    is_last: bool
    cut_ms: int
    place: str
    positions: list[int]
    ledger_read_to: int
    frontier: int
    duplicates: int
    n_samples: int
    n_trained_samples: int
    n_trained_tokens: int
    reward_mean: float | None
    groups: list[StepGroup]
    drops: list[StepDrop]  # since the cut before, its own included
    buckets: list[Bucket]
    values: dict[str, float] = {}  # the backend's metrics
    gauges: dict[str, float] = {}  # summarize() of all its samples
    skipped_reason: str = ""
    skipped_meaning: str = ""
    version_made: int | None = None
    digest_made: str = ""  # of the published weights; "": not published
    checkpoint: str = ""
    void_cuts: list[VoidCut] = []


# ---------------------------------------------------------------- version
class Publication(Part, frozen=True, kw_only=True):
    epoch: int
    version: int
    digest: str
    step: int
    weights: str  # "full", "delta", "lora"
    base_version: int | None
    base_digest: str
    n_tensors: int
    nbytes: int
    uris: dict[str, str]
    forked_at: int | None
    at_ms: int
    place: str
    is_void: bool
    counts_as: int | None = None  # version of the present epoch that these weights are as old as


class Holder(Part, frozen=True, kw_only=True):
    engine: str
    epoch: int
    from_ms: int
    until_ms: int | None  # None: holds it still
    ended_by: str
    digest: str
    is_published_digest: bool
    load_s: float
    stall_s: float
    transport: str = ""  # "": not said
    checksum: str = ""  # the inference server's own
    incarnation: str = ""  # of the engine's daemon


class Attempt(Part, frozen=True, kw_only=True):
    """An engine that began to take it, and what came of that."""

    engine: str
    epoch: int
    transport: str
    from_ms: int
    outcome: str  # "failed: …", "went on to e1-v8 by disk", "left", …; "": under way, or not heard of again
    until_ms: int | None = None


class Generated(Part, frozen=True, kw_only=True):
    """Scored samples with trainable tokens of this version."""

    epoch: int
    n_samples: int  # a sample of two versions counts in both
    n_tokens: int  # of this version alone
    n_pure: int  # samples that are all of this version
    reward_mean: float | None
    outcomes: dict[str, int]  # "trained", "dropped: reason", "skipped", "open" → samples


class VersionLife(Life, frozen=True, kw_only=True, tag="version"):
    version: int
    epoch: int | None  # of the newest valid publication
    sentence: str
    digest: str = ""
    publications: list[Publication] = []
    made_by_step: int | None = None
    made_at_ms: int = 0
    trained_by_step: int | None = None  # the step that started from it
    checkpoint: str = ""
    holders: list[Holder] = []
    attempts: list[Attempt] = []  # those that did not end in holding it
    generated: list[Generated] = []
