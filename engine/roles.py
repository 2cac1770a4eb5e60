"""From a configuration to a running daemon: the only place that wires roles to their parts.

Imports are inside the functions, so that a feeder or a collector never loads torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from consumers.runner import Stop
from engine import devices
from engine.config import fingerprint, with_secrets
from engine.interfaces import RolloutEngine, Sampling, TrainerBackend
from engine.log_settings import log_settings
from engine.settings import Config
from streams.errors import ConfigError, LogUnavailable, TopicMismatch, UnknownTopic
from streams.log import EventLog
from streams.open import open_log
from streams.patient import PatientLog
from streams.topics import Topics

if TYPE_CHECKING:
    from consumers.dataset import JsonLines
    from consumers.rewards.pool import ScoringPool
    from engine.rollout.generate import Generate
    from engine.trainer.probe import Score
    from engine.trainer.ranks import Place
    from engine.trainer.torch_settings import TorchSettings
    from engine.weights.lora import Adapted
    from engine.weights.sender import Sender
    from streams.events import Event

logger = logging.getLogger(__name__)

SHARDED = ("fsdp2", "megatron")  # trainers of several processes
ROLES = ("feeder", "rollout", "reward", "teacher", "collector", "trainer", "evaluator")


def serve(
    role: str, config: Config, *, replica: int, replicas: int, stop: Stop, interrupted: Stop | None = None
) -> int:
    """Run one daemon until the run is finished or `stop()` is true; returns its exit code.

    An outage of the log is waited for, until `interrupted()` (default: `stop`). Raises LogUnavailable when the daemon
    was asked to stop and something that it had sent is not in the log, with the number of records.
    """
    if role not in ROLES:
        raise ConfigError(f"no role {role!r}; known: {', '.join(ROLES)}")
    if role == "trainer" and (code := _follower(config)) is not None:
        return code
    member, interrupted = f"{role}-{replica}", interrupted or stop
    log = open_run_log(config, role=role, member=member, interrupted=interrupted)
    gauges = (topics_of(config).name("metrics"),)
    with PatientLog(log, interrupted, who=member, expendable=gauges) as patient:
        try:
            have_topics(config, patient)
            return _run(role, config, patient, replica, replicas, stop)
        except LogUnavailable as error:
            if not interrupted():
                raise
            logger.warning("%s: stopped before the log had answered: %s", member, error)
            return 0


def _run(role: str, config: Config, log: EventLog, replica: int, replicas: int, stop: Stop) -> int:
    topics = topics_of(config)
    if role == "feeder":
        return _feeder(config, log, topics, stop)
    if role == "reward":
        return _reward(config, log, topics, replica, replicas, stop)
    if role == "teacher":
        return _teacher(config, log, topics, replica, replicas, stop)
    if role == "collector":
        return _collector(config, log, topics, replica, replicas, stop)
    if role == "trainer":
        return _trainer(config, log, topics, stop)
    if role == "rollout":
        return _rollout(config, log, topics, replica, replicas, stop)
    return _evaluator(config, log, topics, stop)


def have_topics(config: Config, log: EventLog) -> None:
    """Make the topics of an embedded log; on Kafka, where that is an act of its own, check that they are there.

    Raises ConfigError naming what is missing or not as the run needs it: no restart can help.
    """
    topics = topics_of(config)
    try:
        if config.log.url.startswith("kafka:"):
            topics.check(log)
        else:
            topics.create(log)
    except UnknownTopic as error:
        raise ConfigError(
            f"{error} ({config.log.url}); make the run's topics with: millstream topics {config.run.dir} --create"
        ) from error
    except TopicMismatch as error:
        raise ConfigError(f"{error}; change the topic, or choose another run.name or log.url") from error


def create_topics(config: Config, stop: Stop = lambda: False) -> None:
    """Make the run's topics, or check those that are there; a log that does not answer is waited for until `stop()`.

    Raises ConfigError for a topic that is there and not as the run needs it, and LogUnavailable once stopped.
    """
    with PatientLog(open_run_log(config, interrupted=stop), stop, who=config.run.name) as log:
        try:
            made = topics_of(config).create(log)
        except TopicMismatch as error:
            raise ConfigError(f"{error}; change the topic, or choose another run.name or log.url") from error
    if made:
        logger.info("made %d topics: %s", len(made), ", ".join(made))


def topics_of(config: Config) -> Topics:
    return Topics(config.run.name, config.log.partitions)


def open_run_log(
    config: Config,
    *,
    readonly: bool = False,
    role: str = "",
    member: str = "",
    interrupted: Stop = lambda: False,
) -> EventLog:
    """The run's log. `readonly` promises that looking changes nothing.

    `role` and `member` name the daemon that opens it; `interrupted` ends every wait for a broker.
    """
    settings = log_settings(config, readonly=readonly, role=role, member=member, interrupted=interrupted)
    return open_log(config.log.url, **settings)


def _feeder(config: Config, log: EventLog, topics: Topics, stop: Stop) -> int:
    from consumers.feeder import Feeder

    data = config.data
    dataset = _dataset(config, data.path)
    feeder = Feeder(
        log,
        topics,
        dataset,
        rollout_batch_size=config.trainer.rollout_batch_size,
        n_samples=config.rollout.n_samples_per_prompt,
        limit=config.staleness.max_weight_staleness,
        max_open_groups=config.rollout.max_open_groups,
        seed=config.run.seed,
        shuffle=data.shuffle,
        data_epochs=data.epochs,
        on_lost=config.log.on_lost,
    )
    try:
        return feeder.run(stop)
    finally:
        dataset.close()


def _dataset(config: Config, path: str) -> JsonLines:
    from consumers.dataset import JsonLines

    data = config.data
    return JsonLines(
        Path(path), prompt_key=data.prompt_key, label_key=data.label_key, metadata_key=data.metadata_key
    )


def _scoring_pool(config: Config) -> ScoringPool:
    from consumers.rewards.pool import ScoringPool

    reward = config.reward
    return ScoringPool(
        reward.function,
        with_secrets(reward.options, "reward.options"),
        workers=reward.workers,
        timeout=timedelta(seconds=reward.timeout_s),
        group=reward.group,
        config=msgspec.to_builtins(config),
    )


def _reward(config: Config, log: EventLog, topics: Topics, replica: int, replicas: int, stop: Stop) -> int:
    from consumers.reward import RewardStage
    from consumers.rewards import BUILT_INS

    pool = _scoring_pool(config)
    try:
        stage = RewardStage(
            log,
            topics,
            pool,
            group=config.reward.group,
            with_ids=config.reward.function not in BUILT_INS,  # built-ins look at the text alone
            replica=replica,
            replicas=replicas,
            on_lost=config.log.on_lost,
        )
        return stage.run(stop)
    finally:
        pool.close()


def _teacher(config: Config, log: EventLog, topics: Topics, replica: int, replicas: int, stop: Stop) -> int:
    from consumers.enrichers.teacher import TeacherStage
    from engine.teacher import TorchTeacher

    teacher = config.teacher
    if not teacher.path:
        raise ConfigError("teacher.path is not set: there is no model that could score samples")
    model = TorchTeacher(
        Path(teacher.path),
        Path(config.model.path),
        device=teacher.device,
        dtype=teacher.dtype,
        attn_implementation=config.model.attn_implementation,
        micro_batch_tokens=teacher.micro_batch_tokens,
    )
    stage = TeacherStage(log, topics, model, replica=replica, replicas=replicas, on_lost=config.log.on_lost)
    return stage.run(stop)


def _collector(config: Config, log: EventLog, topics: Topics, replica: int, replicas: int, stop: Stop) -> int:
    from consumers.collector import Collector, Heartbeats
    from consumers.filters import load_filter

    settings = config.collector
    collector = Collector(
        log,
        topics,
        filters=[
            load_filter(name, settings.options.get(name), config=msgspec.to_builtins(config))
            for name in settings.filters
        ],
        member_deadline=timedelta(seconds=settings.member_deadline_s),
        max_redispatch=settings.max_redispatch,
        min_group_size=settings.min_group_size,
        with_teacher=bool(config.teacher.path),
        owner_alive=Heartbeats(log, topics, _owners(config)),
        on_lost=config.log.on_lost,
        replica=replica,
        replicas=replicas,
    )
    return collector.run(stop)


def _owners(config: Config) -> dict[str, int]:
    """Stages whose signs of life say that somebody works on a partition, and their replicas."""
    owners = {"rollout": config.rollout.replicas, "reward": config.reward.replicas}
    return owners | {"teacher": config.teacher.replicas} if config.teacher.path else owners


def _trainer(config: Config, log: EventLog, topics: Topics, stop: Stop) -> int:
    from engine.trainer.loop import Trainer
    from engine.trainer.settings import LoopSettings
    from engine.weights.store import DeltaPolicy, WeightStore

    run_dir = Path(config.run.dir)
    settings = LoopSettings(
        run=config.run.name,
        config_fingerprint=fingerprint(config),
        seed=config.run.seed,
        rollout_batch_size=config.trainer.rollout_batch_size,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        max_weight_staleness=config.staleness.max_weight_staleness,
        on_stale=config.staleness.on_stale,
        steps=config.run.steps,
        last_batch=config.trainer.last_batch,
        update_weights_interval=config.weights.update_weights_interval,
        checkpoint_every=config.checkpoint.every,
        checkpoint_keep_last=config.checkpoint.keep_last,
        checkpoint_keep_every=config.checkpoint.keep_every,
        max_bad_steps=config.trainer.max_bad_steps,
        num_steps_per_rollout=config.trainer.num_steps_per_rollout,
        max_logprob_mismatch=config.rollout.max_logprob_mismatch,
        on_lost=config.log.on_lost,
    )
    deltas = DeltaPolicy(full_every=config.weights.full_every) if config.weights.kind == "delta" else None
    store = WeightStore(
        run_dir / "weights", keep=config.weights.keep, deltas=deltas, adapted=_adapted(config)
    )
    backend = trainer_backend(config)
    trainer = Trainer(
        log,
        topics,
        backend,
        store,
        settings,
        run_dir / "checkpoints",
        make_sender=_make_sender(config, log, topics, stop),
        score=_score(config, backend),
    )
    return trainer.run(stop)


def _score(config: Config, backend: TrainerBackend) -> Score | None:
    """None: a trainer that cannot put another version in place for a moment."""
    if config.trainer.backend != "torch" or config.trainer.lora.rank:
        return None
    from engine.rollout.loading import on_disk
    from engine.trainer.scoring import scorer
    from engine.trainer.torch_backend import TorchBackend

    return scorer(backend, on_disk(Path(config.run.dir))) if isinstance(backend, TorchBackend) else None


def _make_sender(config: Config, log: EventLog, topics: Topics, stop: Stop) -> Callable[[int], Sender] | None:
    """None: versions go by files alone."""
    weights = config.weights
    if weights.transport == "disk":
        return None
    from consumers.outbox import append_patiently
    from engine.weights import bucketing
    from engine.weights.membership import Members
    from engine.weights.sender import IPC, Sender
    from streams import codec

    device = "cpu" if config.trainer.backend == "scalar" else config.model.device
    backend = weights.backend if weights.backend != "auto" else devices.named(device).collectives
    backend = IPC if weights.transport == IPC else backend

    def append(event: Event) -> int:
        record = codec.encode(event, producer="trainer")
        return append_patiently(log, topics.name("fleet"), 0, [record], who="trainer", stop=stop)

    def make(epoch: int) -> Sender:
        return Sender(
            Members(log, topics),
            append,
            epoch=epoch,
            bucket_bytes=weights.bucket_bytes or bucketing.default_bytes(backend),
            deadline=timedelta(seconds=weights.transfer_deadline_s),
            backend=backend,
            address=weights.master_address,
            port=weights.master_port,
            device="cpu" if backend == "gloo" else device,
        )

    return make


def _adapted(config: Config) -> Adapted | None:
    """None: whole models are trained and published."""
    lora = config.trainer.lora
    if not lora.rank:
        return None
    from engine.weights.lora import Adapted, Base

    return Adapted(Base(Path(config.model.path)).digest, lora.alpha / lora.rank)


def trainer_backend(config: Config) -> TrainerBackend:
    trainer = config.trainer
    if trainer.backend == "scalar":
        from engine.trainer.scalar_backend import ScalarBackend

        return ScalarBackend(
            lr=trainer.lr,
            beta1=trainer.adam_beta1,
            beta2=trainer.adam_beta2,
            estimator=trainer.advantage_estimator,
        )
    if trainer.backend in SHARDED:
        return _ranked_backend(config, _torch_settings(config))
    from engine.trainer.torch_backend import TorchBackend

    return TorchBackend(Path(config.model.path), _torch_settings(config))


def _ranked_backend(config: Config, settings: TorchSettings) -> TrainerBackend:
    """Rank 0 of a trainer of several processes. Those that torchrun has not started are started here."""
    from engine.trainer.parts import PartSettings
    from engine.trainer.ranked_backend import RankedBackend
    from engine.weights.bucketing import BUCKET_BYTES

    trainer = config.trainer
    options = msgspec.to_builtins(getattr(trainer, trainer.backend))
    part = PartSettings(
        backend=trainer.backend,
        model=config.model.path,
        torch=settings,
        options=options,
        bucket_bytes=config.weights.bucket_bytes or BUCKET_BYTES,
    )
    return RankedBackend(part, trainer.n_ranks, place=_place(config))


def _place(config: Config) -> Place | None:
    """Where torchrun has put this process; None: it was not started by torchrun."""
    from engine.trainer.ranks import place_of

    place = place_of(os.environ)
    if place is not None and place.size != config.trainer.n_ranks:
        raise ConfigError(
            f"trainer.n_ranks = {config.trainer.n_ranks}, and WORLD_SIZE = {place.size} is set: set n_ranks to the "
            "number of processes that torchrun starts, or unset RANK and WORLD_SIZE to have them started here"
        )
    return place


def _follower(config: Config) -> int | None:
    """Be a rank of the trainer above 0, where torchrun has started this process as one; None: it is none."""
    if config.trainer.backend not in SHARDED:
        return None
    place = _place(config)
    if place is None or place.rank == 0:
        return None
    from engine.trainer import follower

    return follower.serve(place)


def _torch_settings(config: Config) -> TorchSettings:
    from engine.trainer.torch_settings import TorchSettings

    trainer = config.trainer
    return TorchSettings(
        loss=trainer.loss,
        use_rollout_logprobs=trainer.use_rollout_logprobs,
        use_tis=trainer.use_tis,
        eps_clip=trainer.eps_clip,
        eps_clip_high=trainer.eps_clip_high,
        eps_clip_c=trainer.eps_clip_c,
        m2_threshold=trainer.m2_threshold,
        proximal_policy=trainer.proximal_policy,
        tis_clip=trainer.tis_clip,
        tis_clip_low=trainer.tis_clip_low,
        tis_mode=trainer.tis_mode,
        tis_level=trainer.tis_level,
        tis_veto=trainer.tis_veto,
        use_opsm=trainer.use_opsm,
        opsm_delta=trainer.opsm_delta,
        loss_aggregation=trainer.loss_aggregation,
        loss_constant_length=trainer.loss_constant_length or config.rollout.rollout_max_response_len,
        entropy_coef=trainer.entropy_coef,
        kl_loss_coef=trainer.kl_loss_coef,
        kl_loss_type=trainer.kl_loss_type,
        use_unbiased_kl=trainer.use_unbiased_kl,
        ref_model=trainer.ref_model,
        temperature=config.rollout.rollout_temperature,
        advantage_estimator=trainer.advantage_estimator,
        kl_coef=trainer.kl_coef,
        kl_reward_type=trainer.kl_reward_type,
        gamma=trainer.gamma,
        lambd=trainer.lambd,
        normalize_advantages=trainer.normalize_advantages,
        value_clip=trainer.value_clip,
        critic_lr=trainer.critic_lr,
        critic_lr_warmup=trainer.critic_lr_warmup,
        num_critic_only_steps=trainer.num_critic_only_steps,
        num_steps_per_rollout=trainer.num_steps_per_rollout,
        lr=trainer.lr,
        lr_schedule=trainer.lr_schedule,
        lr_warmup=trainer.lr_warmup,
        lr_hold=trainer.lr_hold,
        lr_end=trainer.lr_end,
        total_steps=None if config.run.steps is None else config.run.steps * trainer.num_steps_per_rollout,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        adam_eps=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
        clip_grad=trainer.clip_grad,
        micro_batch_tokens=trainer.micro_batch_tokens,
        packing=trainer.packing,
        dtype=config.model.dtype,
        device=config.model.device,
        attn_implementation=config.model.attn_implementation,
        deterministic=trainer.deterministic,
        lora_rank=trainer.lora.rank,
        lora_alpha=trainer.lora.alpha,
        lora_target_modules=trainer.lora.target_modules,
        seed=config.run.seed,
    )


def _engine(config: Config, replica: int) -> RolloutEngine:
    """The engine of one rollout daemon."""
    name = f"rollout-{replica}"
    if config.rollout.backend == "sglang":
        from engine.rollout.sglang.starting import sglang_engine

        return sglang_engine(config, name=name, replica=replica)
    return _local_engine(config, name, config.run.seed * 1009 + replica + 1)


def _local_engine(config: Config, name: str, seed: int) -> RolloutEngine:
    """An engine in this process. Different seeds: no two engines sample the same answers."""
    rollout = config.rollout
    if rollout.backend == "scripted":
        from engine.rollout.scripted import scripted_engine

        options = with_secrets(rollout.options, "rollout.options")
        return scripted_engine(options, name=name, seed=seed, pause_mode=rollout.pause_generation_mode)
    common: dict[str, Any] = {
        "name": name,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "attn_implementation": config.model.attn_implementation,
        "seed": seed,
        "pause_mode": rollout.pause_generation_mode,
    }
    if rollout.decode == "continuous":
        from engine.rollout.continuous import ContinuousEngine

        return ContinuousEngine(
            Path(config.model.path),
            temperature=rollout.rollout_temperature,
            max_concurrency=rollout.max_concurrency,
            **common,
        )
    from engine.rollout.batched import BatchedEngine

    return BatchedEngine(Path(config.model.path), **common)


def _sampling(config: Config, engine: RolloutEngine) -> Sampling:
    from engine.rollout.text import stop_ids

    return Sampling(
        max_tokens=config.rollout.rollout_max_response_len,
        temperature=config.rollout.rollout_temperature,
        stop_ids=stop_ids(engine.tokenizer, config.model.path),
    )


def _generate(config: Config) -> Generate:
    from engine.rollout.generate import load_generate

    options = with_secrets(config.rollout.options, "rollout.options")
    return load_generate(config.rollout.generate, options, msgspec.to_builtins(config))


def _rollout(config: Config, log: EventLog, topics: Topics, replica: int, replicas: int, stop: Stop) -> int:
    from engine.rollout.loading import on_disk
    from engine.rollout.watch import UPDATE_DEADLINE
    from engine.rollout.worker import RolloutWorker

    rollout = config.rollout
    start = timedelta(seconds=rollout.sglang.start_timeout_s)
    engine = _engine(config, replica)
    worker = RolloutWorker(
        log,
        topics,
        engine,
        _generate(config),
        locate=on_disk(Path(config.run.dir)),
        sampling=_sampling(config, engine),
        options=with_secrets(rollout.options, "rollout.options"),
        replica=replica,
        replicas=replicas,
        max_concurrency=rollout.max_concurrency,
        task_deadline=timedelta(seconds=rollout.task_deadline_s),
        logprob_format=rollout.logprob_format,
        apply_chat_template=config.data.apply_chat_template,
        seed=config.run.seed,
        on_lost=config.log.on_lost,
        first_update=UPDATE_DEADLINE + (start if rollout.backend == "sglang" else timedelta()),
    )
    return worker.run(stop)


def _evaluator(config: Config, log: EventLog, topics: Topics, stop: Stop) -> int:
    from engine.evaluator import Evaluator
    from engine.rollout.loading import on_disk

    if not config.eval.path:
        raise ConfigError("eval.path is not set: there are no held-out prompts to evaluate on")
    run_dir, rollout = Path(config.run.dir), config.rollout
    dataset = _dataset(config, config.eval.path)
    pool = _scoring_pool(config)
    # also beside SGLang servers: a second one would cost more than it measures
    engine = _local_engine(config, "evaluator", config.run.seed * 1009 + 500_009)
    try:
        evaluator = Evaluator(
            log,
            topics,
            engine,
            _generate(config),
            dataset,
            pool,
            locate=on_disk(run_dir),
            pins=run_dir / "weights" / "pinned",
            sampling=_sampling(config, engine),
            options=_held_out_options(config),
            episodes=config.eval.episodes or len(dataset),
            every=config.eval.every,
            final=config.eval.final,
            total_steps=config.run.steps,
            max_concurrency=rollout.max_concurrency,
            apply_chat_template=config.data.apply_chat_template,
            seed=config.run.seed,
        )
        return evaluator.run(stop)
    finally:
        pool.close()
        dataset.close()


def _held_out_options(config: Config) -> dict[str, Any]:
    """The generate function's options, with slow tools made quick: their latency is no part of what is measured."""
    options = dict(with_secrets(config.rollout.options, "rollout.options"))
    options.pop("slow_tools_sigma", None)
    return options
