"""Every setting, declared once: its section, name, type, default, bounds, unit and one line of meaning.

The structs are frozen and know nothing of files; `engine.config` reads and writes them, `engine.config_checks`
judges how they go together, and docs/configuration.md is generated from them by `engine.configdocs`.
Some settings carry a mark in their `doc(...)`:
  `run_data`  part of the run's fingerprint: with another value, what the log holds would be another run's data
  `added`     `run_data` that came after the first release: its default stands for what was done before, and is no part
              of the fingerprint, so that older runs go on
  `secret`    must be a reference `env:NAME` or `file:/path`, so that no secret is ever written by us
  `path`      a local path: absolute once loaded, and it moves along with a run directory that is moved

A setting that may be left unset is `| None` and has None as its default, because TOML has no word for None.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from streams.checks import MAX_CLAIM_BYTES, MAX_RECORD_BYTES, MOST_CLAIM_BYTES

FUNCTION_PATH = r"^[A-Za-z_][A-Za-z0-9_]*((\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*)?$"
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"  # it starts the names of topics, so this is what Kafka allows
DEVICE = r"^(cpu|(cuda|musa)(:[0-9]+)?)$"
PATTERNS_IN_WORDS = {
    FUNCTION_PATH: "the name of something built in, or package.module:function",
    RUN_NAME: "1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit",
    DEVICE: "cpu, cuda, musa, or one of several as in cuda:1",
}

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]  # bounds of a setting that may be unset go inside its union
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


def doc(
    text: str,
    *,
    unit: str = "",
    run_data: bool = False,
    added: bool = False,
    secret: bool = False,
    path: bool = False,
    **bounds: Any,
) -> msgspec.Meta:
    """What a field means, for the reference page; `bounds` are those of msgspec.Meta (ge, gt, le, lt, pattern)."""
    marks = {"unit": unit, "run_data": run_data, "added": added, "secret": secret, "path": path}
    return msgspec.Meta(description=text, extra=marks, **bounds)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables of the file."""


class RunConfig(Section, frozen=True):
    """The run as a whole."""

    name: Annotated[
        str, doc("Name of the run; its topics are called `<name>.<topic>`.", run_data=True, pattern=RUN_NAME)
    ] = "run"
    dir: Annotated[
        str,
        doc(
            "Run directory: log (the embedded one), weights, checkpoints, claims, summary, effective configuration. On "
            "several machines it must be a folder that all of them share, also when the log is Kafka.",
            path=True,
        ),
    ] = "runs/run"
    seed: Annotated[int, doc("Seed of data order, sampling and initial weights.", run_data=True, ge=0)] = 0
    steps: Annotated[
        PositiveInt | None,
        doc("Stop after this many training steps; unset: when the data ends.", unit="steps"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], doc("Least severity written to stderr and logs/.")
    ] = "info"


class KafkaConfig(Section, frozen=True):
    """How to reach Apache Kafka; read only when `log.url` starts with `kafka://`.

    `millstream config CONFIG` shows what the client libraries are given in the end.
    """

    client: Annotated[
        Literal["kafka-python", "confluent"],
        doc("Client library: `kafka-python` (extra `kafka`) or `confluent` (extra `kafka-fast`)."),
    ] = "kafka-python"
    ingest: Annotated[
        Literal["auto", "thread", "process"],
        doc(
            "Where records are fetched and parsed: in a thread, or in a process of its own that does not fight for "
            "the interpreter lock; `auto`: a process for the trainer with `kafka-python`, else a thread."
        ),
    ] = "auto"
    security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"],
        doc("Encryption and login of the connection."),
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"],
        doc("How to log in, with a SASL protocol."),
    ] = "SCRAM-SHA-512"
    sasl_username: Annotated[str | None, doc("User to log in as (PLAIN and SCRAM).")] = None
    sasl_password: Annotated[
        str | None, doc("Password (PLAIN and SCRAM), as `env:NAME` or `file:/path`.", secret=True)
    ] = None
    sasl_oauth_token: Annotated[
        str | None,
        doc(
            "Bearer token (OAUTHBEARER), as `env:NAME` or `file:/path`; a file is read again for each login, so that "
            "it may be renewed.",
            secret=True,
        ),
    ] = None
    ssl_cafile: Annotated[
        str | None,
        doc("Certificates that the broker's is checked against; unset: the system's.", path=True),
    ] = None
    ssl_certfile: Annotated[
        str | None, doc("Own certificate, where the broker asks for one (mutual TLS).", path=True)
    ] = None
    ssl_keyfile: Annotated[str | None, doc("Its private key; unset: in `ssl_certfile`.", path=True)] = None
    ssl_key_password: Annotated[
        str | None, doc("Password of that key, as `env:NAME` or `file:/path`.", secret=True)
    ] = None
    ssl_check_hostname: Annotated[
        bool, doc("Whether the broker's certificate must be for the host that was connected to.")
    ] = True
    replication_factor: Annotated[
        int,
        doc("Copies of each topic that the brokers keep; on a cluster 3.", unit="brokers", ge=1, le=32767),
    ] = 1
    min_insync_replicas: Annotated[
        PositiveInt | None,
        doc(
            "Copies that must have a record before it counts as written; on a cluster 2. Unset: as the broker has it.",
            unit="brokers",
        ),
    ] = None
    bytes_in_flight: Annotated[
        int,
        doc(
            "Most that one daemon holds of what it has sent and the broker has not acknowledged; then it waits.",
            unit="bytes",
            ge=1 << 20,
        ),
    ] = 64 << 20
    request_timeout_s: Annotated[
        float, doc("Time for one request to a broker before it is tried again.", unit="s", ge=1)
    ] = 10.0
    delivery_timeout_s: Annotated[
        float,
        doc(
            "Time for an append, over all its tries, after which the stage is told and keeps it to send it again.",
            unit="s",
            ge=1,
        ),
    ] = 30.0
    session_timeout_s: Annotated[
        float,
        doc(
            "Silence after which a daemon's partitions go to the others of its role; the broker allows 6 to 1800 by "
            "default.",
            unit="s",
            ge=6,
            le=1800,
        ),
    ] = 10.0
    max_silence_s: Annotated[
        float,
        doc(
            "Time without one question for its partitions after which a stage that is alive is taken for stuck, and "
            "they go to the others of its role; longer than its longest unit of work.",
            unit="s",
            gt=0,
        ),
    ] = 300.0


class LogConfig(Section, frozen=True):
    """The event log, the only thing that the daemons share."""

    url: Annotated[
        str,
        doc(
            "`file:///path` (embedded), `memory://` (one process, for tests) or "
            "`kafka://host:port[,host:port…][/PREFIX]`, where PREFIX stands before the names of all topics and groups; "
            "empty: `<run.dir>/log`."
        ),
    ] = ""
    partitions: Annotated[
        int,
        doc(
            "Partitions of each data topic; fixed for a run.", unit="partitions", run_data=True, ge=1, le=4096
        ),
    ] = 4
    fsync: Annotated[
        Literal["group", "always", "never"],
        doc(
            "When the embedded log reaches the disk: once for a group of appends, for each, or when the OS likes."
        ),
    ] = "group"
    segment_bytes: Annotated[
        int, doc("Size at which the embedded log starts a new segment file.", unit="bytes", ge=4096)
    ] = 64 << 20
    retention_bytes: Annotated[
        PositiveInt | None,
        doc(
            "On Kafka: most that one partition of a topic keeps, but `ledger` and `fleet`, which keep all; unset: "
            "everything. A run cannot outlive it, and the embedded log, which keeps everything, refuses it.",
            unit="bytes",
        ),
    ] = None
    retention_s: Annotated[
        PositiveFloat | None,
        doc(
            "On Kafka: age at which records of a topic may be removed, but of `ledger` and `fleet`; unset: never. It "
            "must be longer than any pause of the run, and than the time between two checkpoints. The embedded log "
            "refuses it.",
            unit="s",
        ),
    ] = None
    on_lost: Annotated[
        Literal["stop", "continue"],
        doc(
            "What a stage does when retention has removed records that it had not read: fail and say which, or go on "
            "with the oldest that is left and count them (metric `lost`)."
        ),
    ] = "stop"
    max_record_bytes: Annotated[
        int,
        doc(
            "Largest record that goes to the log as it is; what is larger goes to a file in `<run.dir>/claims`, which "
            "all machines of the run must share. On Kafka no more than its topics' `max.message.bytes` allow.",
            unit="bytes",
            ge=1024,
            le=64 << 20,
        ),
    ] = MAX_RECORD_BYTES
    max_claim_bytes: Annotated[
        int,
        doc(
            "Largest record of all; the group of a larger sample is dropped (`record_too_large`).",
            unit="bytes",
            ge=1024,
            le=MOST_CLAIM_BYTES,
        ),
    ] = MAX_CLAIM_BYTES
    kafka: Annotated[KafkaConfig, doc("Connection to Kafka.")] = KafkaConfig()


class DataConfig(Section, frozen=True):
    """The prompts."""

    path: Annotated[str, doc("JSONL file, one prompt a line. Required.", run_data=True, path=True)] = ""
    prompt_key: Annotated[
        str, doc("Key of the prompt: a text or a list of chat messages.", run_data=True)
    ] = "prompt"
    label_key: Annotated[str, doc("Key of the label that the reward is given.", run_data=True)] = "label"
    metadata_key: Annotated[
        str, doc("Key of a table handed through to generate and reward functions.", run_data=True)
    ] = "metadata"
    epochs: Annotated[
        PositiveInt | None, doc("Passes over the file; unset: until `run.steps`.", unit="passes")
    ] = None
    shuffle: Annotated[bool, doc("Draw a new order, from `run.seed`, for each pass.", run_data=True)] = True
    apply_chat_template: Annotated[
        bool, doc("Render chat messages with the tokenizer's template.", run_data=True)
    ] = False


class ModelConfig(Section, frozen=True):
    """The policy."""

    path: Annotated[
        str,
        doc(
            "Local Hugging Face folder (config, weights, tokenizer). Required by the `torch` backends.",
            run_data=True,
            path=True,
        ),
    ] = ""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        doc("Type of the weights and of the computation.", run_data=True),
    ] = "float32"
    device: Annotated[
        str,
        doc(
            "Device of engine and trainer: `cpu`, `cuda`, `musa`, or one of several as in `cuda:1`.",
            pattern=DEVICE,
        ),
    ] = "cpu"
    attn_implementation: Annotated[
        str,
        doc("Attention of the Hugging Face model (`sdpa`, `eager`, `flash_attention_2`, …).", run_data=True),
    ] = "sdpa"


class SGLangConfig(Section, frozen=True):
    """SGLang servers, one for each rollout daemon (`rollout.backend = "sglang"`)."""

    url: Annotated[
        str,
        doc(
            "A server that runs already, as in `http://host:30000`; with several daemons `{replica}` in it stands for "
            "the number of each. Empty: the daemon starts one."
        ),
    ] = ""
    python: Annotated[
        str,
        doc("Interpreter of the environment that has SGLang; empty: this one.", path=True),
    ] = ""
    args: Annotated[
        tuple[str, ...],
        doc("Further arguments of `sglang.launch_server`, as they are."),
    ] = ()
    env: Annotated[dict[str, str], doc("Further environment variables of the server.")] = msgspec.field(
        default_factory=dict
    )
    port: Annotated[
        int,
        doc(
            "Port of the first daemon's server; the others take the next ones. 0: any free one.",
            ge=0,
            le=65535,
        ),
    ] = 0
    start_timeout_s: Annotated[
        float, doc("Time for a server to be ready, after which the daemon fails.", unit="s", gt=0)
    ] = 600.0
    request_timeout_s: Annotated[
        float,
        doc("Time for one answer that is no generation (pause, update, checksum, …).", unit="s", gt=0),
    ] = 120.0
    api_key: Annotated[
        str | None, doc('Key of the server (`--api-key`), as `"env:NAME"` or `"file:/path"`.', secret=True)
    ] = None
    admin_api_key: Annotated[
        str | None,
        doc(
            'Key of its control endpoints (`--admin-api-key`), as `"env:NAME"` or `"file:/path"`.',
            secret=True,
        ),
    ] = None


class RolloutConfig(Section, frozen=True):
    """Generation of samples."""

    backend: Annotated[
        Literal["torch", "scripted", "sglang"],
        doc("Engine: `torch` (in process), `sglang` (a server for each daemon) or `scripted` (for tests)."),
    ] = "torch"
    replicas: Annotated[
        int, doc("Rollout daemons; each takes a share of the partitions.", unit="processes", ge=1)
    ] = 1
    max_concurrency: Annotated[
        int, doc("Samples that one engine generates at a time.", unit="samples", ge=1)
    ] = 64
    max_open_groups: Annotated[
        PositiveInt | None,
        doc(
            "Own cap on dispatched groups that are still open; unset: all that `max_weight_staleness` allows.",
            unit="groups",
        ),
    ] = None
    generate: Annotated[
        str,
        doc(
            "Generate function: `single_turn`, `multi_turn`, `given` (the labels themselves, for `trainer.loss` = "
            "`sft`) or `module:function`.",
            run_data=True,
            pattern=FUNCTION_PATH,
        ),
    ] = "single_turn"
    n_samples_per_prompt: Annotated[
        int, doc("Samples of each prompt, that is, the size of a group.", unit="samples", run_data=True, ge=1)
    ] = 8
    rollout_max_response_len: Annotated[
        int, doc("Most tokens generated in one call of the engine.", unit="tokens", run_data=True, ge=1)
    ] = 1024
    rollout_temperature: Annotated[float, doc("Sampling temperature, above 0.", run_data=True, ge=0)] = 1.0
    rollout_top_p: Annotated[
        float, doc("Nucleus sampling; only 1 (off) can be trained on.", run_data=True)
    ] = 1.0
    rollout_top_k: Annotated[int, doc("Top-k sampling; only -1 (off) can be trained on.", run_data=True)] = -1
    logprob_format: Annotated[
        Literal["float32", "fixed1024"],
        doc(
            "Behaviour log-probs in the log: exact, or in steps of 1/1024 (less than half the bytes).",
            run_data=True,
        ),
    ] = "float32"
    pause_generation_mode: Annotated[
        Literal["retract", "in_place", "abort"],
        doc(
            "Running samples at a weight update: keep tokens and recompute the cache, keep both, or start again. "
            "(Miles' partial_rollout is `retract` or `in_place`.)"
        ),
    ] = "retract"
    decode: Annotated[
        Literal["batched", "continuous"],
        doc(
            "Decode loop of the `torch` engine: plain batches (tiny models) or continuous batching, which is "
            "experimental: on an overloaded machine its log-probs were found wrong."
        ),
    ] = "batched"
    task_deadline_s: Annotated[
        float, doc("Time for one sample, after which it has failed.", unit="s", gt=0)
    ] = 600.0
    max_logprob_mismatch: Annotated[
        PositiveFloat | None,
        doc(
            "Over it an engine is quarantined: the mean difference of its log-probs from the trainer's, under the same "
            "weights, over the last samples. Unset: only measured.",
            unit="nat per token",
        ),
    ] = None
    options: Annotated[dict[str, Any], doc("Handed to the generate function as it is.", run_data=True)] = (
        msgspec.field(default_factory=dict)
    )
    sglang: Annotated[SGLangConfig, doc('The servers of `rollout.backend = "sglang"`.')] = SGLangConfig()


class RewardConfig(Section, frozen=True):
    """Scoring of samples."""

    function: Annotated[
        str,
        doc(
            "Reward: a built-in name or `module:function`. Required.",
            run_data=True,
            pattern=FUNCTION_PATH,
        ),
    ] = ""
    replicas: Annotated[
        int, doc("Reward daemons; each takes a share of the partitions.", unit="processes", ge=1)
    ] = 1
    workers: Annotated[
        int,
        doc(
            "Processes of one daemon that score at a time; 0: inside the daemon itself, without deadlines, for trusted "
            "rules only.",
            unit="processes",
            ge=0,
        ),
    ] = 1
    timeout_s: Annotated[
        float,
        doc("Time for one call, after which its process is killed and the score missing.", unit="s", gt=0),
    ] = 30.0
    group: Annotated[bool, doc("Call the function once for all samples of a group.", run_data=True)] = False
    options: Annotated[dict[str, Any], doc("Handed to the reward function as it is.", run_data=True)] = (
        msgspec.field(default_factory=dict)
    )


class TeacherConfig(Section, frozen=True):
    """On-policy distillation: a model that scores the samples (`trainer.loss` = `opd`), in a daemon of its own."""

    path: Annotated[
        str,
        doc(
            "Local Hugging Face folder of the teacher, with the policy's own tokens; empty: there is none.",
            run_data=True,
            added=True,
            path=True,
        ),
    ] = ""
    replicas: Annotated[
        int, doc("Teacher daemons; each takes a share of the partitions.", unit="processes", ge=1)
    ] = 1
    device: Annotated[
        str,
        doc(
            "Device of the teacher: `cpu`, `cuda`, `musa`, or one of several as in `cuda:1`.", pattern=DEVICE
        ),
    ] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        doc("Type of the teacher's weights and of its computation.", run_data=True, added=True),
    ] = "float32"
    micro_batch_tokens: Annotated[
        int,
        doc("Padded tokens of one forward pass; a longer sample goes alone.", unit="tokens", ge=1),
    ] = 8192


class CollectorConfig(Section, frozen=True):
    """Joining samples to groups."""

    filters: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=FUNCTION_PATH)], ...],
        doc("Dynamic filters, in order: built-in names or `module:function`.", run_data=True),
    ] = ()
    options: Annotated[
        dict[str, dict[str, Any]],
        doc("Table of keyword arguments for each filter, by its name.", run_data=True),
    ] = msgspec.field(default_factory=dict)
    member_deadline_s: Annotated[
        float,
        doc(
            "Time from dispatch, while the stages make progress, after which a member is missing.",
            unit="s",
            gt=0,
        ),
    ] = 60.0
    max_redispatch: Annotated[
        int,
        doc(
            "Times that missing members are dispatched again before the group is dropped.", unit="times", ge=0
        ),
    ] = 1
    min_group_size: Annotated[
        int | None,
        doc(
            "Members with which an incomplete group may still train; unset: all.",
            unit="samples",
            run_data=True,
        ),
    ] = None


class LoraConfig(Section, frozen=True):
    """Training a low-rank adapter instead of the whole model (LoRA, arXiv 2106.09685; needs the extra `lora`)."""

    rank: Annotated[
        int, doc("Rank of the adapter; 0: all weights are trained.", run_data=True, added=True, ge=0)
    ] = 0
    alpha: Annotated[
        float, doc("The adapter's product counts alpha / rank times.", run_data=True, added=True, gt=0)
    ] = 16.0
    target_modules: Annotated[
        tuple[str, ...],
        doc(
            "Last names of the layers that are adapted; `all-linear`: all but the output layer.",
            run_data=True,
            added=True,
        ),
    ] = ("all-linear",)


class Fsdp2Config(Section, frozen=True):
    """How the model is sharded (torch's `fully_shard`): memory against time."""

    reshard_after_forward: Annotated[
        bool,
        doc("Drop a layer's gathered weights after its forward, and gather them again for its backward."),
    ] = True
    activation_checkpointing: Annotated[
        bool, doc("Keep the inputs of each layer alone, and compute the rest again in the backward.")
    ] = False
    cpu_offload: Annotated[
        bool,
        doc("Keep weights, gradients and optimizer in main memory; layers come to the device as needed."),
    ] = False
    sync_each_micro_batch: Annotated[
        bool,
        doc(
            "Sum gradients and drop gathered weights after each micro-batch. `false`: once an optimizer step; until "
            "then each rank holds all weights, and all gradients in float32. A single rank without `cpu_offload` "
            "always does that."
        ),
    ] = True


class MegatronConfig(Section, frozen=True):
    """How the model is cut over the ranks (megatron-core); names as in Megatron-LM."""

    tensor_model_parallel_size: Annotated[
        int, doc("Ranks that each weight matrix is cut over.", unit="processes", ge=1)
    ] = 1
    pipeline_model_parallel_size: Annotated[
        int, doc("Stages that the layers are cut into.", unit="processes", ge=1)
    ] = 1
    expert_model_parallel_size: Annotated[
        int, doc("Ranks that the experts of a layer are dealt to.", unit="processes", ge=1)
    ] = 1
    expert_tensor_parallel_size: Annotated[
        PositiveInt | None,
        doc(
            "Ranks that each expert's matrices are cut over; unset: `tensor_model_parallel_size`.",
            unit="processes",
        ),
    ] = None
    sequence_parallel: Annotated[
        bool,
        doc(
            "Cut what lies between the matrices along the sequence, over the tensor-parallel ranks; needed for experts "
            "on several of them."
        ),
    ] = False
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None,
        doc("Activations computed again in the backward pass: of whole layers, or of attention alone."),
    ] = None
    recompute_method: Annotated[
        Literal["uniform", "block"] | None,
        doc("With `full`: all layers in pieces, or the first layers of a stage alone."),
    ] = None
    recompute_num_layers: Annotated[
        PositiveInt | None,
        doc("With `full`: layers of one piece, or layers that are recomputed.", unit="layers"),
    ] = None
    transformer_impl: Annotated[
        Literal["local", "transformer_engine"],
        doc("Layers of megatron-core itself, or of Transformer Engine where it is installed."),
    ] = "local"


class TrainerConfig(Section, frozen=True):
    """Batches, loss and optimizer."""

    backend: Annotated[
        Literal["torch", "fsdp2", "megatron", "scalar"],
        doc(
            "`torch`: one process; `fsdp2`, `megatron`: a model sharded over `n_ranks` processes; `scalar`: one number "
            "instead of a model, to run the loop without torch. On `musa` the default is `fsdp2`.",
            run_data=True,
        ),
    ] = "torch"
    n_ranks: Annotated[
        int,
        doc(
            "Processes of the trainer. They are started on this machine, each with a device of its own, unless "
            "torchrun has started them.",
            unit="processes",
            ge=1,
        ),
    ] = 1
    rollout_batch_size: Annotated[
        int, doc("Groups of one training step.", unit="groups", run_data=True, ge=1)
    ] = 32
    num_steps_per_rollout: Annotated[
        int, doc("Optimizer steps made on one batch.", unit="optimizer steps", run_data=True, ge=1)
    ] = 1
    global_batch_size: Annotated[
        PositiveInt | None,
        doc(
            "Samples of one optimizer step; unset: rollout_batch_size × n_samples_per_prompt / num_steps_per_rollout.",
            unit="samples",
            run_data=True,
        ),
    ] = None
    last_batch: Annotated[
        Literal["train", "drop"], doc("What to do with a short batch when the data ends.", run_data=True)
    ] = "train"
    advantage_estimator: Annotated[
        Literal[
            "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "ppo"
        ],
        doc(
            "How rewards become advantages: by the rewards of the group (`grpo`, `gspo`, `dr_grpo`, `rloo`), of the "
            "batch (`reinforce_plus_plus`, `reinforce_plus_plus_baseline`), or by a critic (`ppo`).",
            run_data=True,
        ),
    ] = "grpo"
    kl_coef: Annotated[
        float,
        doc(
            "With `reinforce_plus_plus` and `ppo`: weight of the KL to the reference model in each token's reward.",
            run_data=True,
            added=True,
            ge=0,
        ),
    ] = 0.0
    kl_reward_type: Annotated[
        Literal["k1", "k2", "k3", "low_var_kl"],
        doc("Estimator of the KL in the reward.", run_data=True, added=True),
    ] = "k1"
    gamma: Annotated[
        float,
        doc(
            "With `reinforce_plus_plus` and `ppo`: discount of a reward for each trained token before it.",
            run_data=True,
            added=True,
            ge=0,
            le=1,
        ),
    ] = 1.0
    lambd: Annotated[
        float,
        doc("With `ppo`: λ of generalised advantage estimation.", run_data=True, added=True, ge=0, le=1),
    ] = 1.0
    normalize_advantages: Annotated[
        bool,
        doc("With `ppo`: bring a step's advantages to mean 0 and spread 1.", run_data=True, added=True),
    ] = False
    value_clip: Annotated[
        float,
        doc(
            "With `ppo`: how far a value may move from what it was before the step; 0: any.",
            run_data=True,
            added=True,
            ge=0,
        ),
    ] = 0.2
    critic_lr: Annotated[
        PositiveFloat | None,
        doc("With `ppo`: learning rate of the critic; unset: `lr`.", run_data=True, added=True),
    ] = None
    critic_lr_warmup: Annotated[
        int,
        doc(
            "With `ppo`: optimizer steps over which the critic's rate rises from 0.",
            unit="optimizer steps",
            run_data=True,
            added=True,
            ge=0,
        ),
    ] = 0
    num_critic_only_steps: Annotated[
        int,
        doc(
            "With `ppo`: first steps that train the critic alone, and publish the policy as it is.",
            unit="steps",
            run_data=True,
            added=True,
            ge=0,
        ),
    ] = 0
    loss: Annotated[
        Literal["ppo", "decoupled_ppo", "tis", "gspo", "cispo", "m2po", "opd", "sft"],
        doc(
            "Policy loss: clipped against the behaviour policy (`ppo`; `gspo` for whole sequences), clipped against a "
            "recomputed policy and weighted back (`decoupled_ppo`), weighted only (`tis`, `cispo`), weighted less the "
            "outliers (`m2po`); towards a teacher (`opd`), or the likelihood of the samples (`sft`).",
            run_data=True,
        ),
    ] = "ppo"
    use_rollout_logprobs: Annotated[
        bool,
        doc(
            "With `ppo`: clip against the log-probs recorded by the engine; false recomputes them at the batch cut.",
            run_data=True,
        ),
    ] = True
    behaviour_policy: Annotated[
        Literal["recorded", "ignored"],
        doc(
            "`ignored` declares that a loss may take no notice of the policy that sampled, which with stale samples is "
            "refused otherwise.",
            run_data=True,
            added=True,
        ),
    ] = "recorded"
    eps_clip: Annotated[
        float, doc("Lower clip range of the ratio, and the upper one too.", run_data=True)
    ] = 0.2
    eps_clip_high: Annotated[
        float | None, doc("Upper clip range of the ratio; unset: `eps_clip`.", run_data=True)
    ] = None
    eps_clip_c: Annotated[
        float | None,
        doc(
            "Dual clip: most that a sample worse than its group may count, as a ratio above 1; unset: off.",
            run_data=True,
            added=True,
        ),
    ] = None
    m2_threshold: Annotated[
        float,
        doc(
            "With `m2po`: largest mean square of the log-ratios; the tokens with the largest are masked.",
            unit="nat²",
            run_data=True,
            added=True,
            gt=0,
        ),
    ] = 0.04
    proximal_policy: Annotated[
        Literal["recomputed", "interpolated"],
        doc(
            "With `decoupled_ppo`: recomputed as the step begins, or interpolated between the policy that sampled and "
            "the current one, by the age of the token.",
            run_data=True,
            added=True,
        ),
    ] = "recomputed"
    use_tis: Annotated[
        bool,
        doc(
            "With recomputed log-probs: weight tokens by recomputed / recorded, capped at `tis_clip`.",
            run_data=True,
        ),
    ] = False
    tis_clip: Annotated[float, doc("Cap of importance weights.", run_data=True, gt=0)] = 2.0
    tis_clip_low: Annotated[float, doc("Floor of importance weights.", run_data=True, added=True, ge=0)] = 0.0
    tis_mode: Annotated[
        Literal["truncate", "mask"],
        doc(
            "Weights over the cap or below the floor: set to it, or their tokens masked (IcePop, MIS).",
            run_data=True,
        ),
    ] = "truncate"
    tis_level: Annotated[
        Literal["token", "sequence", "geometric"],
        doc(
            "Importance weight of a token: its own, the product over its sample, or that product's geometric mean.",
            run_data=True,
            added=True,
        ),
    ] = "token"
    tis_veto: Annotated[
        PositiveFloat | None,
        doc(
            "Ratio of a token below which its whole sample is masked, as in 1e-4; unset: none.",
            run_data=True,
            added=True,
        ),
    ] = None
    use_opsm: Annotated[
        bool,
        doc(
            "Mask samples worse than their group that the policy has left: mean log-prob over `opsm_delta` below the "
            "recorded one.",
            run_data=True,
            added=True,
        ),
    ] = False
    opsm_delta: Annotated[
        float,
        doc("That distance.", unit="nat per token", run_data=True, added=True, ge=0),
    ] = 1e-4
    loss_aggregation: Annotated[
        Literal["token", "sample", "prompt", "constant"] | None,
        doc(
            "What counts alike in the loss: trained tokens, samples (means over their tokens), prompts (means over "
            "the tokens of their samples), or tokens by a constant length (Dr. GRPO); unset: `token`, with `gspo` "
            "`sample`.",
            run_data=True,
            added=True,
        ),
    ] = None
    loss_constant_length: Annotated[
        PositiveInt | None,
        doc(
            "That constant length; unset: `rollout_max_response_len`.",
            unit="tokens",
            run_data=True,
            added=True,
        ),
    ] = None
    kl_loss_coef: Annotated[
        float, doc("Weight of the KL term to the initial weights; 0: none is computed.", run_data=True, ge=0)
    ] = 0.0
    kl_loss_type: Annotated[
        Literal["k1", "k2", "k3", "low_var_kl"], doc("Estimator of the KL term.", run_data=True)
    ] = "k3"
    use_unbiased_kl: Annotated[
        bool,
        doc("Weight the KL term by the ratio to the policy that sampled.", run_data=True, added=True),
    ] = False
    ref_model: Annotated[
        str,
        doc(
            "Hugging Face folder of the reference model of the KL terms; empty: `model.path`, the initial weights.",
            run_data=True,
            added=True,
            path=True,
        ),
    ] = ""
    entropy_coef: Annotated[float, doc("Weight of the entropy bonus.", run_data=True, ge=0)] = 0.0
    lr: Annotated[float, doc("Learning rate at its height.", run_data=True, gt=0)] = 1e-6
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        doc("Course of the learning rate after the warm-up, to `lr_end` at `run.steps`.", run_data=True),
    ] = "constant"
    lr_hold: Annotated[
        float,
        doc(
            "Share of the steps at full rate, after the warm-up, before it falls.", run_data=True, ge=0, lt=1
        ),
    ] = 0.0
    lr_end: Annotated[float, doc("Learning rate that the schedule falls to.", run_data=True, ge=0)] = 0.0
    lr_warmup: Annotated[
        int,
        doc("Optimizer steps over which the rate rises from 0.", unit="optimizer steps", run_data=True, ge=0),
    ] = 0
    adam_beta1: Annotated[float, doc("AdamW: decay of the mean.", run_data=True, ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, doc("AdamW: decay of the square.", run_data=True, ge=0, lt=1)] = 0.95
    adam_eps: Annotated[float, doc("AdamW: added to the denominator.", run_data=True, gt=0)] = 1e-8
    weight_decay: Annotated[float, doc("AdamW: decoupled weight decay.", run_data=True, ge=0)] = 0.0
    clip_grad: Annotated[float, doc("Largest norm of the gradient; 0: no clipping.", run_data=True, ge=0)] = (
        1.0
    )
    micro_batch_tokens: Annotated[
        int,
        doc(
            "Padded tokens of one forward pass; a longer sample goes alone.",
            unit="tokens",
            run_data=True,
            ge=1,
        ),
    ] = 8192
    packing: Annotated[
        bool,
        doc(
            "Lay samples one after another in a forward pass, instead of padding them to a common length.",
            run_data=True,
            added=True,
        ),
    ] = False
    deterministic: Annotated[
        bool, doc("Ask torch for deterministic kernels, so that a replay gives the same bits.", run_data=True)
    ] = True
    max_bad_steps: Annotated[
        int,
        doc("Steps in a row that may be skipped (loss or gradient not finite) before the run fails.", ge=0),
    ] = 3
    lora: Annotated[LoraConfig, doc("An adapter instead of the whole model.")] = LoraConfig()
    fsdp2: Annotated[Fsdp2Config, doc('Of `trainer.backend = "fsdp2"`.')] = Fsdp2Config()
    megatron: Annotated[MegatronConfig, doc('Of `trainer.backend = "megatron"`.')] = MegatronConfig()


class StalenessConfig(Section, frozen=True):
    """How old a token may be. The limit in force is recorded with each batch and may change in a live run."""

    max_weight_staleness: Annotated[
        int, doc("Oldest token trained on; 0 is synchronous training.", unit="versions", ge=0)
    ] = 2
    on_stale: Annotated[
        Literal["drop", "mask"],
        doc("Drop a group with too old tokens, or mask these tokens alone.", run_data=True),
    ] = "drop"


class WeightsConfig(Section, frozen=True):
    """The way of new weights to the engines."""

    transport: Annotated[
        Literal["disk", "distributed", "ipc"],
        doc(
            "`disk`: files of the run directory; `distributed`: broadcast to a group of engines; `ipc`: memory shared "
            "with engines of the trainer's host, which may be on its very GPU. With each the files stay the truth, and "
            "what an engine that missed a version catches up from."
        ),
    ] = "disk"
    kind: Annotated[
        Literal["full", "delta"],
        doc("What is written for a version: all weights, or those that changed since the one before."),
    ] = "full"
    full_every: Annotated[
        int, doc("With `delta`: versions from one full version to the next.", unit="versions", ge=1)
    ] = 20
    bucket_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=1 << 16, le=8 << 30)] | None,
        doc(
            "Bytes of one broadcast, and of what ranks of a trainer put together at a time; unset: 512 MiB for "
            "broadcasts between GPUs (NCCL, MCCL), else 64 MiB.",
            unit="bytes",
        ),
    ] = None
    backend: Annotated[
        Literal["auto", "gloo", "nccl", "mccl"],
        doc("Library of the broadcast; `auto`: by the trainer's device."),
    ] = "auto"
    master_address: Annotated[
        str, doc("Address at which the trainer listens for the engines; empty: found by itself.")
    ] = ""
    master_port: Annotated[int, doc("First port tried for it; 0: any free one.", ge=0, le=65535)] = 0
    transfer_deadline_s: Annotated[
        float,
        doc(
            "Time to form a group, and for one broadcast; an engine that is not there by then is left out.",
            unit="s",
            gt=0,
        ),
    ] = 60.0
    update_weights_interval: Annotated[
        int, doc("Training steps from one published version to the next.", unit="steps", run_data=True, ge=1)
    ] = 1
    keep: Annotated[int, doc("Published versions whose files are kept.", unit="versions", ge=1)] = 4


class CheckpointConfig(Section, frozen=True):
    """Saving the state of training."""

    every: Annotated[int, doc("Steps from one checkpoint to the next.", unit="steps", ge=1)] = 20
    keep_last: Annotated[int, doc("Newest checkpoints that are kept.", unit="checkpoints", ge=1)] = 3
    keep_every: Annotated[
        PositiveInt | None,
        doc("Keep also each checkpoint whose step this divides; unset: none.", unit="steps"),
    ] = None


class SupervisorConfig(Section, frozen=True):
    """Restarting daemons that died."""

    max_restarts: Annotated[
        int, doc("Restarts of one daemon within the window before the run fails.", unit="times", ge=0)
    ] = 3
    window_s: Annotated[float, doc("Length of that window.", unit="s", gt=0)] = 300.0
    stop_grace_s: Annotated[
        float, doc("Time from SIGTERM to SIGKILL when a daemon is stopped.", unit="s", gt=0)
    ] = 10.0


class PlacementConfig(Section, frozen=True):
    """Where the daemons run with `millstream run --launcher ray` (docs/cluster.md); names as in Miles and Slime.

    GPU stands for what Ray counts under that name: devices of the kind of `model.device`, CUDA or MUSA.
    """

    colocate: Annotated[
        bool,
        doc(
            "Engines on the very GPUs of the trainer, instead of GPUs of their own. Both models must fit together: "
            "nothing is offloaded."
        ),
    ] = False
    actor_num_nodes: Annotated[
        int,
        doc(
            "Nodes that the trainer's ranks are dealt to. With more than one, each rank is a process of its own, and "
            "all of them are started again together.",
            unit="nodes",
            ge=1,
        ),
    ] = 1
    actor_num_gpus_per_node: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        doc(
            'GPUs of the trainer on each of them; unset: one for each rank, and none with `model.device = "cpu"`.',
            unit="GPUs",
        ),
    ] = None
    rollout_num_gpus: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        doc(
            "GPUs of all engines together; unset: `rollout.replicas` × `rollout_num_gpus_per_engine`, and none with "
            '`model.device = "cpu"`.',
            unit="GPUs",
        ),
    ] = None
    rollout_num_gpus_per_engine: Annotated[
        int, doc("GPUs of one engine, all on one node.", unit="GPUs", ge=1)
    ] = 1
    num_cpus: Annotated[
        float, doc("CPUs, as Ray counts them, that are reserved for each daemon.", unit="CPUs", ge=0)
    ] = 1.0
    start_timeout_s: Annotated[
        float,
        doc(
            "Time for everything that is reserved to be free, and for a node to begin a daemon; then the run fails, "
            "and says what was needed and what there was.",
            unit="s",
            gt=0,
        ),
    ] = 120.0
    unattended_s: Annotated[
        float,
        doc(
            "Time that daemons go on after their supervisor was lost; within it, `millstream run` on the same run "
            "attaches to them; after it they end, and give back what was reserved.",
            unit="s",
            gt=0,
        ),
    ] = 600.0


class EvalConfig(Section, frozen=True):
    """Measuring the policy on held-out prompts, beside the run (daemon `evaluator`)."""

    path: Annotated[
        str, doc("JSONL file of held-out prompts, as in [data]; empty: no evaluation.", path=True)
    ] = ""
    episodes: Annotated[
        PositiveInt | None, doc("Samples of one evaluation; unset: one of each row.", unit="samples")
    ] = None
    every: Annotated[int, doc("Versions from one evaluation to the next.", unit="versions", ge=1)] = 10
    final: Annotated[
        int, doc("Every version of the last so many steps is evaluated too.", unit="versions", ge=0)
    ] = 0


class Config(Section, frozen=True):
    """A whole configuration. `Config()` has every default; only `engine.config` checks one."""

    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    teacher: TeacherConfig = TeacherConfig()
    collector: CollectorConfig = CollectorConfig()
    trainer: TrainerConfig = TrainerConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    placement: PlacementConfig = PlacementConfig()
    eval: EvalConfig = EvalConfig()


def samples_per_step(config: Config) -> int:
    """Samples of one full batch: rollout_batch_size × n_samples_per_prompt."""
    return config.trainer.rollout_batch_size * config.rollout.n_samples_per_prompt


def global_batch_size(config: Config) -> int:
    """Samples of one optimizer step."""
    return (
        config.trainer.global_batch_size or samples_per_step(config) // config.trainer.num_steps_per_rollout
    )


def open_groups_cap(config: Config, max_weight_staleness: int | None = None) -> int:
    """How many dispatched groups may be open at once: (limit + 1) × rollout_batch_size, or the user's own lower cap.

    Every step makes a version, whether it is published or not, so `update_weights_interval` has no part in it.

    `max_weight_staleness` is the limit in force where it was changed in the live run.
    """
    limit = config.staleness.max_weight_staleness if max_weight_staleness is None else max_weight_staleness
    cap = (limit + 1) * config.trainer.rollout_batch_size
    return cap if config.rollout.max_open_groups is None else min(cap, config.rollout.max_open_groups)
