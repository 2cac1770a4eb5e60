"""Every event of the log, as frozen structs: past-tense facts, one tag word each.

    tasks         TaskDispatched  TaskSkipped                                 feeder
    trajectories  TrajectoryFinished  RolloutFailed                           rollout
    rewards       RewardAssigned  ScoringFailed                               reward
                  TeacherScored  TeacherFailed                                teacher
    groups        GroupCompleted  GroupDropped  MembersMissing                collector
    ledger        RunStarted  EpochStarted  BatchCut  GroupsDropped  WeightsPublished  CheckpointSaved
                  StepSkipped  EngineQuarantined  RunEnding  RunFinished      trainer
                  DataEnded                                                   feeder
                  LimitChanged  Paused  Resumed                               command line
    fleet         EngineJoined  EngineUpdating  EngineReady  EngineFailed  EngineLeft  rollout
                  TransferGroupFormed  TransferGroupEnded                     trainer
    metrics       Metrics                                                     all
                  StepMeasured  SamplesProbed                                 trainer
    dead          DeadLetter                                                  all

Stored as MessagePack maps by field name, tag in "type". Rules of change: a new field has a default; a field or tag
is never reused for another meaning; anything else raises SCHEMA_MAJOR and gets an upcast (streams/codec.py).

Times are milliseconds since 1970 (UTC). `seq` is the dense dispatch number of a group (0, 1, 2, …), its identity
for admission and for the trainer's frontier. `task_offset` is the offset in `tasks` of the group's *first* dispatch.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from streams.ranges import Ranges

SCHEMA_MAJOR, SCHEMA_MINOR = 1, 2

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
VersionRuns = list[tuple[int, int, int]]  # (epoch, version, n_tokens) …


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events."""


class InputProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a stage had come in one input partition when it wrote an output (DESIGN §4.1).

    Everything below `low_water` is finished and its output acknowledged; `finished` are the ranges [begin, end) of
    finished inputs between low_water and read_to.
    """

    read_to: int = 0
    low_water: int = 0
    finished: Ranges = []


Progress = dict[str, InputProgress]  # input topic word → progress in the same partition number


# ---------------------------------------------------------------- tasks
class TaskDispatched(Event, frozen=True, kw_only=True, tag="task_dispatched"):
    group_id: str
    seq: NonNegative
    data_epoch: NonNegative
    row: NonNegative
    attempt: NonNegative = 0  # 0: first dispatch; k: k-th re-dispatch of missing members
    indices: list[int] = []  # members asked for; [] = all n_samples
    n_samples: int
    prompt: Any  # str, or a list of chat messages
    label: Any = None
    metadata: dict[str, Any] = {}
    min_version: NonNegative = 0  # an engine starts it only when it holds at least this version
    first_offset: int = -1  # of a re-dispatch: the first dispatch's offset; -1: this record itself
    next_seq: NonNegative = 0  # the feeder's counter after this: every seq dispatched so far is below it
    dispatched_ms: int = 0


class TaskSkipped(Event, frozen=True, kw_only=True, tag="task_skipped"):
    """A dataset row that cannot be used; it takes its `seq` and closes it."""

    group_id: str
    seq: NonNegative
    data_epoch: NonNegative
    row: NonNegative
    reason: str
    detail: str = ""
    next_seq: NonNegative = 0


# ---------------------------------------------------------------- trajectories
class MemberOf(Event, frozen=True, kw_only=True):
    """What every event about one sample carries."""

    uid: str  # group_id/index/attempt
    group_id: str
    seq: NonNegative
    index: NonNegative
    attempt: NonNegative
    n_samples: int
    task_offset: NonNegative
    progress: Progress = {}


class TrajectoryFinished(MemberOf, frozen=True, kw_only=True, tag="trajectory_finished"):
    """One generated sequence. Columns as in streams/columns.py; build it with `streams.trajectory.pack`."""

    prompt_ids: bytes  # ids [P]
    response_ids: bytes  # ids [L]: what the engine sampled and what the environment answered
    loss_mask: bytes  # 0/1 [L]: 1 on tokens that the policy sampled
    versions: VersionRuns  # over the L response tokens
    n_prompt_tokens: NonNegative
    n_response_tokens: NonNegative
    finish_reason: str  # "stop", "length", "environment", …
    response: str = ""  # text for the reward functions; never re-tokenized
    prompt: Any = ""
    label: Any = None
    metadata: dict[str, Any] = {}
    turns: list[tuple[int, int, str]] = []  # (start, end, "policy" | "environment") over the response
    temperature: float = 1.0
    engine: str = ""
    incarnation: str = ""  # of the rollout daemon, as in EngineJoined; "": not said
    started_ms: int = 0
    finished_ms: int = 0
    claims: dict[str, tuple[str, int, str]] = {}  # name → (URI, bytes, sha256) of what lies outside the log
    # Stays the last field: its bytes end the map, where the codec leaves float32 ones out of the compressed frame.
    logprobs: bytes  # float [T]: behaviour policy, of the T tokens with loss_mask 1


class RolloutFailed(MemberOf, frozen=True, kw_only=True, tag="rollout_failed"):
    reason: str  # "generate_error", "nonfinite_logprobs", "length_mismatch", "aborted", "task_deadline", …
    detail: str = ""
    engine: str = ""


# ---------------------------------------------------------------- rewards
class RewardAssigned(MemberOf, frozen=True, kw_only=True, tag="reward_assigned"):
    reward: float
    components: dict[str, float] = {}
    trajectory_offset: NonNegative  # in `trajectories`, same partition
    n_prompt_tokens: NonNegative
    n_response_tokens: NonNegative
    trainable_versions: VersionRuns  # version runs over trainable tokens only
    payload_digest: str = (
        ""  # of the trajectory that was scored (streams.trajectory.payload_digest); "": not said
    )
    finish_reason: str = ""
    scoring_s: float = 0.0
    started_ms: int = 0
    finished_ms: int = 0


class ScoringFailed(MemberOf, frozen=True, kw_only=True, tag="scoring_failed"):
    """No verdict: never a reward of 0. `stage` says where it failed ("rollout" or "reward")."""

    stage: str
    reason: str
    detail: str = ""
    trajectory_offset: NonNegative


class TeacherScored(MemberOf, frozen=True, kw_only=True, tag="teacher_scored"):
    """What a teacher model thinks of a sample's tokens. Heavy, and read once: the trainer fetches it by reference."""

    trajectory_offset: NonNegative  # in `trajectories`, same partition
    payload_digest: str = ""  # as in RewardAssigned
    teacher: str = ""  # name of the model
    scoring_s: float = 0.0
    # Stays the last field, as in TrajectoryFinished.
    logprobs: bytes  # float [T]: of the T tokens with loss_mask 1, at temperature 1


class TeacherFailed(MemberOf, frozen=True, kw_only=True, tag="teacher_failed"):
    """The teacher cannot score this sample, so it cannot be trained on: never a log-prob of 0."""

    reason: str  # "too_long", "bad_token_id", "bad_logprob", "bad_payload", …
    detail: str = ""
    trajectory_offset: NonNegative


# ---------------------------------------------------------------- groups
class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a completed group, by reference."""

    uid: str
    index: int
    trajectory_offset: int
    reward: float
    components: dict[str, float] = {}
    n_response_tokens: int = 0
    payload_digest: str = ""  # as in RewardAssigned
    trainable_versions: VersionRuns = []
    started_ms: int = 0
    finished_ms: int = 0
    teacher_offset: int = -1  # of its TeacherScored in `rewards`, same partition; -1: the run has no teacher


class GroupOf(Event, frozen=True, kw_only=True):
    group_id: str
    seq: NonNegative
    task_offset: NonNegative
    frontier: NonNegative = 0  # every first dispatch below this offset of `tasks` is closed …
    closed_above: Ranges = []  # … and these at or above it, as ranges [begin, end)
    progress: Progress = {}


class GroupCompleted(GroupOf, frozen=True, kw_only=True, tag="group_completed"):
    n_samples: int
    members: list[Member]
    dispatched_ms: int = 0


class GroupDropped(GroupOf, frozen=True, kw_only=True, tag="group_dropped"):
    reason: str  # "incomplete", "zero_variance", "task_skipped", "reward_timeout", a filter's word …
    detail: str = ""


class MembersMissing(GroupOf, frozen=True, kw_only=True, tag="members_missing"):
    """Asks the feeder to dispatch these members again."""

    indices: list[int]
    attempt: int  # the attempt number that the re-dispatch will have
    reason: str
    detail: str = ""


# ---------------------------------------------------------------- ledger
class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    run: str
    config_fingerprint: str
    partitions: int
    schema: str = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"
    rollout_batch_size: int
    n_samples_per_prompt: int
    seed: int
    started_ms: int


class EpochStarted(Event, frozen=True, kw_only=True, tag="epoch_started"):
    """One incarnation of the trainer. Its epoch number is this record's own offset in the ledger."""

    producer: str
    started_ms: int
    limit: int = -1  # staleness limit in force as it begins; -1: not said


class CutMember(msgspec.Struct, frozen=True, array_like=True):
    uid: str
    trajectory_offset: int
    reward: float
    staleness: int
    n_trainable_tokens: int
    teacher_offset: int = -1  # as in Member


class CutGroup(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    seq: int
    partition: int
    group_offset: int
    members: list[CutMember]


class Drop(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    seq: int
    reason: str
    staleness: int = -1
    detail: str = ""


class Closing(Event, frozen=True, kw_only=True):
    """What every ledger record that closes groups carries: the frontier after it."""

    epoch: NonNegative
    version: NonNegative  # trainer version when it was written
    drops: list[Drop] = []
    frontier: NonNegative  # every seq below it has its outcome …
    closed_above: Ranges = []  # … and these above it, as ranges [begin, end)
    duplicates: NonNegative = 0  # copies passed over since the last closing record


class BatchCut(Closing, frozen=True, kw_only=True, tag="batch_cut"):
    """The write-ahead record of one step: appended before the optimizer runs, and the commit itself."""

    step: NonNegative
    groups: list[CutGroup]
    positions: list[int]  # next offset to read, per partition of `groups`
    limit: NonNegative
    on_stale: str
    seed: int
    ledger_read_to: NonNegative
    cut_ms: int
    last: bool = False


class GroupsDropped(Closing, frozen=True, kw_only=True, tag="groups_dropped"):
    """Outcomes outside a batch. Advances no position."""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: list[int]
    dtype: str
    nbytes: int
    tied: str = ""  # name of the tensor whose bytes it shares; "": its own


class WeightsPublished(Event, frozen=True, kw_only=True, tag="weights_published"):
    epoch: NonNegative
    version: NonNegative
    step: NonNegative
    kind: str = "full"  # "full", "delta", "lora"
    base_version: int = -1
    base_digest: str = ""
    scaling: float = 0.0  # "lora": W = W_base + scaling · B·A
    digest: str
    uris: dict[str, str]  # transport → where, e.g. {"disk": "weights/e1-v7.safetensors"}
    tensors: list[TensorInfo] = []
    nbytes: NonNegative = 0
    forked_at: int = -1  # first publication of an epoch: older epochs' versions above this count as this one
    published_ms: int = 0


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    epoch: NonNegative
    version: NonNegative
    step: NonNegative
    path: str
    digest: str
    ledger_position: NonNegative
    saved_ms: int = 0


class StepSkipped(Event, frozen=True, kw_only=True, tag="step_skipped"):
    """The step changed nothing and made no version; its groups stay closed."""

    epoch: NonNegative
    step: NonNegative
    version: NonNegative
    reason: str
    detail: str = ""


class EngineQuarantined(Event, frozen=True, kw_only=True, tag="engine_quarantined"):
    """From here on no group with a sample of this incarnation is trained: its log-probs are not the trainer's own.

    Both were taken of the same tokens under the same weights. The incarnation ends; the engine's next one is judged by
    its own samples.
    """

    epoch: NonNegative
    engine: str
    incarnation: str  # as in TrajectoryFinished
    step: NonNegative  # the newest one whose samples were compared
    mismatch: float  # nat per token, as engine/trainer/mismatch.py works it out
    limit: float  # rollout.max_logprob_mismatch, nat per token
    n_samples: NonNegative  # that were compared
    n_tokens: NonNegative
    at_ms: int = 0


class RunEnding(Event, frozen=True, kw_only=True, tag="run_ending"):
    """The trainer wants no more groups: the feeder stops and answers with DataEnded."""

    epoch: NonNegative
    step: NonNegative
    reason: str  # "steps_reached"


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    epoch: NonNegative
    step: NonNegative
    version: NonNegative
    reason: str  # "data_ended", "steps_reached"
    finished_ms: int


class DataEnded(Event, frozen=True, kw_only=True, tag="data_ended"):
    count: NonNegative  # groups dispatched or skipped in all: seq runs from 0 to count-1
    producer: str = ""


class LimitChanged(Event, frozen=True, kw_only=True, tag="limit_changed"):
    limit: NonNegative
    from_step: NonNegative = 0  # not before this step; a newer record replaces one that still waits
    by: str = ""
    at_ms: int = 0


class Paused(Event, frozen=True, kw_only=True, tag="paused"):
    by: str = ""
    reason: str = ""
    at_ms: int = 0


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    by: str = ""
    at_ms: int = 0


# ---------------------------------------------------------------- fleet
class EngineJoined(Event, frozen=True, kw_only=True, tag="engine_joined"):
    engine: str
    replica: int
    host: str = ""
    pid: int = 0
    n_ranks: NonNegative = 0  # that it brings to a transfer group; 0: it takes versions from disk alone
    device: str = ""  # of those ranks: "cpu", "cuda", "musa"
    incarnation: str = ""  # of its daemon, unique over the life of a run; "": not said
    at_ms: int = 0


class EngineUpdating(Event, frozen=True, kw_only=True, tag="engine_updating"):
    """It begins to take a version: "loading" while it holds none, else "updating" from what it holds."""

    engine: str
    epoch: NonNegative
    version: NonNegative
    from_epoch: int = -1  # -1: it holds nothing
    from_version: int = -1
    transport: str = "disk"  # "disk", "distributed", "ipc"
    at_ms: int = 0


class EngineReady(Event, frozen=True, kw_only=True, tag="engine_ready"):
    """The engine serves this version and its weights' digest equals the trainer's."""

    engine: str
    epoch: NonNegative
    version: NonNegative
    digest: str
    load_s: float = 0.0
    stall_s: float = 0.0
    transport: str = ""  # by which it came; "": not said
    checksum: str = ""  # the inference server's own, over the tensors as it holds them; "": it has none
    incarnation: str = ""  # as in EngineJoined
    at_ms: int = 0


class EngineFailed(Event, frozen=True, kw_only=True, tag="engine_failed"):
    engine: str
    reason: str
    detail: str = ""
    at_ms: int = 0


class EngineLeft(Event, frozen=True, kw_only=True, tag="engine_left"):
    engine: str
    at_ms: int = 0


class TransferGroupFormed(Event, frozen=True, kw_only=True, tag="transfer_group_formed"):
    """The trainer listens at this address, as rank 0, for these engines to join a group for broadcasts of weights.

    An engine that is not named, or does not join within `deadline_s`, takes versions from disk.
    """

    epoch: NonNegative
    group: str  # unique over the life of a run
    backend: str  # of torch.distributed: "gloo", "nccl", "mccl"
    address: str
    port: int
    world_size: int
    members: list[tuple[str, int, int]]  # (engine, its first rank, its ranks)
    bucket_bytes: int
    deadline_s: float
    at_ms: int = 0


class TransferGroupEnded(Event, frozen=True, kw_only=True, tag="transfer_group_ended"):
    epoch: NonNegative
    group: str
    reason: str  # "membership", "failed", "finished"
    detail: str = ""
    lost: list[str] = []  # engines that did not join, or did not take part to the end
    at_ms: int = 0


# ---------------------------------------------------------------- metrics, dead letters
class Metrics(Event, frozen=True, kw_only=True, tag="metrics"):
    source: str  # "feeder", "rollout-0", …
    values: dict[str, float]
    step: int = -1
    at_ms: int = 0


class StepMeasured(Event, frozen=True, kw_only=True, tag="step_measured"):
    """What the trainer saw of each sample when it trained it: how far the policy had moved from the one that sampled.

    Rows are in the order of the step's BatchCut: groups, then their members. What each column is:
    consumers/telemetry.py. A step whose trainer was killed before it wrote this has none; `millstream replay` measures
    it again.
    """

    step: NonNegative
    epoch: NonNegative
    version: NonNegative  # that the step started from
    names: list[str]  # of the columns
    n_samples: NonNegative
    sums: bytes  # float64 little-endian [n_samples, len(names)]
    values: dict[str, float] = {}  # the backend's metrics; those without a clock replay
    engines: list[tuple[str, str]] = []  # (engine, incarnation) …
    # int16 little-endian [n_samples]: place in `engines` of the one that made the sample, if the weights that measured
    # its tokens are those that sampled them, so that a difference is no policy lag; else −1
    compared: bytes = b""
    at_ms: int = 0


class SamplesProbed(Event, frozen=True, kw_only=True, tag="samples_probed"):
    """A few samples of a step, measured once more: under the weights that sampled them, not those that trained them."""

    epoch: NonNegative
    step: NonNegative
    weights_epoch: NonNegative  # with `version`: of the weights
    version: NonNegative
    uids: list[str]
    engines: list[tuple[str, str]]  # as in StepMeasured, and so is what follows
    compared: bytes
    names: list[str]
    n_samples: NonNegative
    sums: bytes
    at_ms: int = 0


class DeadLetter(Event, frozen=True, kw_only=True, tag="dead_letter"):
    """A refused record, whole: nothing is lost, and it can be looked at or replayed."""

    topic: str
    partition: int
    offset: int
    raw: bytes
    raw_headers: list[tuple[str, bytes]] = []
    stage: str
    reason: str
    detail: str = ""
    attempts: int = 1
    at_ms: int = 0


TaskEvent = TaskDispatched | TaskSkipped
TrajectoryEvent = TrajectoryFinished | RolloutFailed
RewardEvent = RewardAssigned | ScoringFailed | TeacherScored | TeacherFailed
GroupEvent = GroupCompleted | GroupDropped | MembersMissing
LedgerEvent = (
    RunStarted
    | EpochStarted
    | BatchCut
    | GroupsDropped
    | WeightsPublished
    | CheckpointSaved
    | StepSkipped
    | EngineQuarantined
    | RunEnding
    | RunFinished
    | DataEnded
    | LimitChanged
    | Paused
    | Resumed
)
MetricsEvent = Metrics | StepMeasured | SamplesProbed
FleetEvent = (
    EngineJoined
    | EngineUpdating
    | EngineReady
    | EngineFailed
    | EngineLeft
    | TransferGroupFormed
    | TransferGroupEnded
)
AnyEvent = (
    TaskEvent
    | TrajectoryEvent
    | RewardEvent
    | GroupEvent
    | LedgerEvent
    | FleetEvent
    | MetricsEvent
    | DeadLetter
)

EVENT_TYPES: dict[str, type[Event]] = {
    str(kind.__struct_config__.tag): kind
    for kind in AnyEvent.__args__  # pyright: ignore[reportAttributeAccessIssue]
}


def tag_of(event: Event | type[Event]) -> str:
    """The stored word of an event or of its class."""
    return str(event.__struct_config__.tag)
