"""What settings must hold together. Each problem is one sentence with the fix; none is a warning.

A check names the keys that it read, so that one whose values could not be read at all is passed over: its values
are defaults then, and the sentence would be about something that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine import devices
from engine.config_effects import WITHOUT_ADVANTAGES, find_without_effect
from engine.config_fields import get, marked
from engine.config_placement import find_placement_problems
from engine.config_problems import Problem
from engine.config_secrets import REDACTED, is_reference, looks_secret
from engine.settings import Config, open_groups_cap, samples_per_step
from engine.trainer.megatron.settings import MegatronSettings
from streams.errors import ConfigError


def find_problems(config: Config) -> Iterator[Problem]:
    """Every combination in it that cannot work."""
    yield from _required(config)
    yield from _log(config)
    yield from _secrets(config)
    yield from _sampling(config)
    yield from _groups(config)
    yield from _advantages(config)
    yield from _given(config)
    yield from _teacher(config)
    yield from _batches(config)
    yield from _loss(config)
    yield from _staleness(config)
    yield from _transport(config)
    yield from _sglang(config)
    yield from _lora(config)
    yield from _ranks(config)
    yield from _megatron(config)
    yield from find_without_effect(config)
    yield from find_placement_problems(config)


def _required(config: Config) -> Iterator[Problem]:
    if not config.data.path:
        yield Problem(("data.path",), "data.path: missing; it names the JSONL file of prompts")
    if not config.reward.function:
        yield Problem(
            ("reward.function",), "reward.function: missing; it names a built-in reward or a module:function"
        )
    needs_model = [
        key
        for key, backend in (("rollout", config.rollout.backend), ("trainer", config.trainer.backend))
        if backend in ("torch", "sglang", "fsdp2", "megatron")
    ]
    if needs_model and not config.model.path:
        yield Problem(
            ("model.path", "rollout.backend", "trainer.backend"),
            f'model.path: missing; {needs_model[0]}.backend = "{get(config, needs_model[0]).backend}" needs a local '
            "Hugging Face folder",
        )
    if config.rollout.max_logprob_mismatch is not None and config.trainer.backend == "scalar":
        yield Problem(
            ("rollout.max_logprob_mismatch", "trainer.backend"),
            f"rollout.max_logprob_mismatch = {config.rollout.max_logprob_mismatch:g} with trainer.backend = "
            '"scalar": the scalar trainer has no log-probs to compare with; remove it',
        )
    if config.rollout.backend in ("torch", "sglang") and config.trainer.backend == "scalar":
        yield Problem(
            ("rollout.backend", "trainer.backend"),
            f'rollout.backend = "{config.rollout.backend}" with trainer.backend = "scalar": the scalar trainer has no '
            'weights that the engine could load; set rollout.backend = "scripted" or trainer.backend = "torch"',
        )


def _log(config: Config) -> Iterator[Problem]:
    key, url = ("log.url",), config.log.url
    parts = urlsplit(url)
    if "@" in parts.netloc:
        yield Problem(
            key, f"log.url: a login does not belong in the URL; set log.kafka.sasl_username and {_REFERENCE}"
        )
    elif parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        yield Problem(key, f'log.url = "{url}": needs an absolute path, as in file:///data/run/log')
    elif parts.scheme not in ("file", "memory", "kafka"):
        yield Problem(key, f'log.url = "{url}": must start with file://, memory:// or kafka://')
    for role, replicas in (("rollout", config.rollout.replicas), ("reward", config.reward.replicas)):
        if config.log.partitions < replicas:
            yield Problem(
                ("log.partitions", f"{role}.replicas"),
                f"log.partitions = {config.log.partitions} is below {role}.replicas = {replicas}: some replicas would "
                f"own no partition; raise log.partitions to at least {replicas}",
            )
    if config.log.max_claim_bytes < config.log.max_record_bytes:
        yield Problem(
            ("log.max_claim_bytes", "log.max_record_bytes"),
            f"log.max_claim_bytes = {config.log.max_claim_bytes} is below log.max_record_bytes = "
            f"{config.log.max_record_bytes}: it limits what is too large for the log itself; raise the first or "
            "lower the second",
        )


_REFERENCE = 'log.kafka.sasl_password = "env:NAME"'


def _secrets(config: Config) -> Iterator[Problem]:
    found: list[tuple[str, Any]] = [(key, get(config, key)) for key, _ in marked("secret")]
    for prefix, options in (
        ("rollout.options", config.rollout.options),
        ("reward.options", config.reward.options),
    ):
        found += _secret_options(prefix, options)
    for key, value in found:
        if value is None or is_reference(value):
            continue
        if value == REDACTED:
            yield Problem(
                (key,),
                f'{key} = "{REDACTED}": the secret was not written here; set it to "env:NAME" or "file:/path"',
            )
        else:
            yield Problem(
                (key,),
                f"{key} = {REDACTED}: a secret must not stand in a configuration, which is copied to the run "
                'directory; set it to "env:NAME" and put the secret in that environment variable, or to "file:/path"',
            )


def _secret_options(prefix: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_options(f"{prefix}.{name}", value)
        elif isinstance(value, str) and looks_secret(name):
            yield f"{prefix}.{name}", value


def _sampling(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    why = "the recorded log-probs would belong to another policy than the one that is trained"
    if rollout.rollout_top_p != 1.0:
        yield Problem(
            ("rollout.rollout_top_p",),
            f"rollout.rollout_top_p = {rollout.rollout_top_p}: only 1 is allowed, since {why}; remove it",
        )
    if rollout.rollout_top_k != -1:
        yield Problem(
            ("rollout.rollout_top_k",),
            f"rollout.rollout_top_k = {rollout.rollout_top_k}: only -1 is allowed, since {why}; remove it",
        )
    if rollout.rollout_temperature == 0:
        yield Problem(
            ("rollout.rollout_temperature",),
            "rollout.rollout_temperature = 0: greedy samples of a group are all alike and teach nothing; "
            "set it above 0, usually 1",
        )


def _groups(config: Config) -> Iterator[Problem]:
    n, least = config.rollout.n_samples_per_prompt, config.collector.min_group_size
    estimator = config.trainer.advantage_estimator
    needs_group = estimator not in _WITHOUT_GROUPS and config.trainer.loss not in WITHOUT_ADVANTAGES
    fewest = 2 if needs_group else 1
    if n < fewest:
        yield Problem(
            ("rollout.n_samples_per_prompt", "trainer.advantage_estimator", "trainer.loss"),
            f'rollout.n_samples_per_prompt = 1 with trainer.advantage_estimator = "{estimator}": the advantage is the '
            "difference to the group's mean, which is 0 in a group of 1; set n_samples_per_prompt to 2 or more",
        )
    elif least is not None and not fewest <= least <= n:
        yield Problem(
            (
                "collector.min_group_size",
                "rollout.n_samples_per_prompt",
                "trainer.advantage_estimator",
                "trainer.loss",
            ),
            f"collector.min_group_size = {least}: must be between {fewest} and rollout.n_samples_per_prompt = {n}",
        )


def _advantages(config: Config) -> Iterator[Problem]:
    trainer, key = config.trainer, "trainer.advantage_estimator"
    estimator = trainer.advantage_estimator
    if estimator == "ppo" and trainer.backend != "torch":
        yield Problem(
            (key, "trainer.backend"),
            f'{key} = "ppo" with trainer.backend = "{trainer.backend}": only the "torch" trainer has a critic; set '
            'that backend, or another estimator, like "grpo"',
        )
    if estimator == "gspo" and trainer.loss != "gspo":
        yield Problem(
            (key, "trainer.loss"),
            f'{key} = "gspo" with trainer.loss = "{trainer.loss}": its advantages are those of "grpo", and what makes '
            'it GSPO is the loss; set trainer.loss = "gspo" too',
        )
    if trainer.kl_coef > 0 and trainer.kl_loss_coef > 0:
        yield Problem(
            ("trainer.kl_coef", "trainer.kl_loss_coef"),
            f"trainer.kl_coef = {trainer.kl_coef:g} with trainer.kl_loss_coef = {trainer.kl_loss_coef:g}: the policy "
            "would be held to the reference model twice, by its rewards and by its loss; set one of them to 0",
        )


def _teacher(config: Config) -> Iterator[Problem]:
    loss, path = config.trainer.loss, config.teacher.path
    keys = ("teacher.path", "trainer.loss")
    if loss == "opd" and not path:
        yield Problem(
            keys,
            'trainer.loss = "opd" learns from a teacher: set teacher.path to its local Hugging Face folder',
        )
    if path and loss != "opd":
        yield Problem(
            keys,
            f'teacher.path with trainer.loss = "{loss}": no loss looks at its scores; set trainer.loss = '
            '"opd", or remove teacher.path',
        )
    if path and config.log.partitions < config.teacher.replicas:
        yield Problem(
            ("log.partitions", "teacher.replicas"),
            f"log.partitions = {config.log.partitions} is below teacher.replicas = {config.teacher.replicas}: some "
            f"replicas would own no partition; raise log.partitions to at least {config.teacher.replicas}",
        )


def _given(config: Config) -> Iterator[Problem]:
    """Responses that nobody sampled."""
    rollout, key = config.rollout, "rollout.generate"
    if rollout.generate != "given":
        return
    if config.trainer.loss != "sft":
        yield Problem(
            (key, "trainer.loss"),
            f'{key} = "given" with trainer.loss = "{config.trainer.loss}": no policy sampled these responses, so there '
            'is none to weigh them by; set trainer.loss = "sft"',
        )
    if rollout.n_samples_per_prompt > 1:
        yield Problem(
            (key, "rollout.n_samples_per_prompt"),
            f'{key} = "given" with rollout.n_samples_per_prompt = {rollout.n_samples_per_prompt}: a prompt has one '
            "response, and its copies would teach the same; set n_samples_per_prompt = 1",
        )
    if config.eval.path:
        yield Problem(
            (key, "eval.path"),
            f'{key} = "given" with eval.path: the evaluator answers as the run does, so it would score the responses '
            "of the dataset; remove eval.path",
        )
    if rollout.max_logprob_mismatch is not None:
        yield Problem(
            (key, "rollout.max_logprob_mismatch"),
            f'{key} = "given" with rollout.max_logprob_mismatch: no engine made these log-probs; remove it',
        )


_WITHOUT_GROUPS = ("reinforce_plus_plus", "ppo")


def _batches(config: Config) -> Iterator[Problem]:
    trainer, samples = config.trainer, samples_per_step(config)
    keys = ("trainer.rollout_batch_size", "rollout.n_samples_per_prompt", "trainer.num_steps_per_rollout")
    product = (
        f"trainer.rollout_batch_size × rollout.n_samples_per_prompt = {trainer.rollout_batch_size} × "
        f"{config.rollout.n_samples_per_prompt} = {samples}"
    )
    if samples % trainer.num_steps_per_rollout:
        yield Problem(
            keys,
            f"trainer.num_steps_per_rollout = {trainer.num_steps_per_rollout} does not divide {product}; "
            "choose a divisor of it",
        )
    elif trainer.global_batch_size and trainer.global_batch_size * trainer.num_steps_per_rollout != samples:
        yield Problem(
            (*keys, "trainer.global_batch_size"),
            f"trainer.global_batch_size = {trainer.global_batch_size} times trainer.num_steps_per_rollout = "
            f"{trainer.num_steps_per_rollout} is not {product}; set global_batch_size to "
            f"{samples // trainer.num_steps_per_rollout}, or remove it",
        )
    cap, own = open_groups_cap(config), config.rollout.max_open_groups
    if trainer.rollout_batch_size > cap:
        yield Problem(
            ("trainer.rollout_batch_size", "rollout.max_open_groups"),
            f"trainer.rollout_batch_size = {trainer.rollout_batch_size} is over the in-flight cap "
            f"rollout.max_open_groups = {own}: a batch could never fill; raise or remove the cap",
        )
    limit = config.staleness.max_weight_staleness
    most = (limit + 1) * trainer.rollout_batch_size
    if own is not None and own > most:
        yield Problem(
            ("rollout.max_open_groups", "staleness.max_weight_staleness", "trainer.rollout_batch_size"),
            f"rollout.max_open_groups = {own} asks to generate ahead of what staleness.max_weight_staleness = {limit} "
            f"allows: {most} groups = (limit + 1) × rollout_batch_size; "
            "raise the limit, or lower or remove max_open_groups",
        )


def _loss(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if not 0 < trainer.eps_clip < 1:
        yield Problem(
            ("trainer.eps_clip",),
            f"trainer.eps_clip = {trainer.eps_clip}: must be between 0 and 1, usually 0.2",
        )
    elif trainer.eps_clip_high is not None and trainer.eps_clip_high < trainer.eps_clip:
        yield Problem(
            ("trainer.eps_clip", "trainer.eps_clip_high"),
            f"trainer.eps_clip_high = {trainer.eps_clip_high} is below trainer.eps_clip = {trainer.eps_clip}: "
            "the upper range may only be the wider one; raise or remove it",
        )
    yield from _behaviour_policy(config)
    yield from _corrections(config)
    if trainer.lr_schedule != "constant" and config.run.steps is None:
        yield Problem(
            ("trainer.lr_schedule", "run.steps"),
            f'trainer.lr_schedule = "{trainer.lr_schedule}" needs run.steps, the step at which the rate is 0; '
            'set run.steps, or lr_schedule = "constant"',
        )


def _behaviour_policy(config: Config) -> Iterator[Problem]:
    """Stale samples are of another policy, so the loss must look at it, or say in so many words that it does not."""
    trainer, limit = config.trainer, config.staleness.max_weight_staleness
    if trainer.loss != "ppo":
        for key, wrong in (
            ("use_tis", trainer.use_tis),
            ("use_rollout_logprobs", not trainer.use_rollout_logprobs),
        ):
            if wrong:
                why = (
                    "looks at no policy but the one that is trained"
                    if trainer.loss == "sft"
                    else "weighs by the recorded log-probs itself"
                )
                yield Problem(
                    ("trainer.loss", f"trainer.{key}"),
                    f'trainer.{key} = {str(key == "use_tis").lower()} goes with trainer.loss = "ppo" only: '
                    f'"{trainer.loss}" {why}; remove {key}',
                )
    elif trainer.use_tis and trainer.use_rollout_logprobs:
        yield Problem(
            ("trainer.use_tis", "trainer.use_rollout_logprobs"),
            "trainer.use_tis = true with trainer.use_rollout_logprobs = true corrects twice for the same difference; "
            "set use_rollout_logprobs = false, or remove use_tis",
        )
    recomputed = trainer.loss == "ppo" and not trainer.use_rollout_logprobs and not trainer.use_tis
    ignores = trainer.loss == "sft" or recomputed
    if trainer.behaviour_policy == "ignored" and not ignores:
        yield Problem(
            ("trainer.behaviour_policy", "trainer.loss", "trainer.use_rollout_logprobs", "trainer.use_tis"),
            'trainer.behaviour_policy = "ignored", and this loss looks at the recorded log-probs; remove it, or set '
            "trainer.use_rollout_logprobs = false",
        )
    elif trainer.behaviour_policy == "recorded" and limit > 0 and ignores:
        what, mend = (
            ("trainer.use_rollout_logprobs = false", "remove it, or set trainer.use_tis = true,")
            if recomputed
            else (f'trainer.loss = "{trainer.loss}"', "choose another loss,")
        )
        yield Problem(
            ("trainer.loss", "trainer.use_rollout_logprobs", "trainer.use_tis", "trainer.behaviour_policy",
             "staleness.max_weight_staleness"),
            f"{what} ignores the policy that sampled, which fails once samples are stale "
            f"(staleness.max_weight_staleness = {limit}); {mend} or max_weight_staleness = 0; to do it all the same, "
            'declare trainer.behaviour_policy = "ignored"',
        )  # fmt: skip


def _corrections(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.eps_clip_c is not None and not trainer.eps_clip_c > 1 + (
        trainer.eps_clip_high or trainer.eps_clip
    ):
        yield Problem(
            ("trainer.eps_clip_c", "trainer.eps_clip", "trainer.eps_clip_high"),
            f"trainer.eps_clip_c = {trainer.eps_clip_c}: must be a ratio above the clip range, usually 3",
        )
    if trainer.tis_clip_low > min(1.0, trainer.tis_clip):
        yield Problem(
            ("trainer.tis_clip_low", "trainer.tis_clip"),
            f"trainer.tis_clip_low = {trainer.tis_clip_low}: must be at most 1, the weight of a fresh token, and at "
            f"most trainer.tis_clip = {trainer.tis_clip}; lower it",
        )
    if trainer.kl_loss_coef > 0 and trainer.kl_loss_type == "k1" and not trainer.use_unbiased_kl:
        yield Problem(
            ("trainer.kl_loss_coef", "trainer.kl_loss_type", "trainer.use_unbiased_kl"),
            'trainer.kl_loss_type = "k1": the mean gradient of this term is 0, so that it adds noise and pulls '
            'nowhere; set it to "k2" or "k3", or use_unbiased_kl = true',
        )


def _staleness(config: Config) -> Iterator[Problem]:
    limit, interval = config.staleness.max_weight_staleness, config.weights.update_weights_interval
    if limit < interval - 1:
        yield Problem(
            ("staleness.max_weight_staleness", "weights.update_weights_interval"),
            f"staleness.max_weight_staleness = {limit} is below weights.update_weights_interval - 1 = {interval - 1}: "
            f"just before an update even the newest samples are {interval - 1} versions old and would all be dropped; "
            f"raise the limit to at least {interval - 1}, or lower the interval to {limit + 1}",
        )


def _transport(config: Config) -> Iterator[Problem]:
    transport, rollout = config.weights.transport, config.rollout
    if transport == "disk":
        return
    if rollout.backend == "scripted":
        yield Problem(
            ("weights.transport", "rollout.backend"),
            f'weights.transport = "{transport}" with rollout.backend = "scripted": a scripted engine takes versions '
            "from disk alone; remove weights.transport",
        )
    elif rollout.backend == "torch" and rollout.decode == "continuous":
        yield Problem(
            ("weights.transport", "rollout.decode"),
            f'weights.transport = "{transport}" with rollout.decode = "continuous": that engine takes versions from '
            'disk alone; set rollout.decode = "batched", or remove weights.transport',
        )
    if transport == "ipc":
        yield from _ipc(config)
    elif config.trainer.backend != "scalar":
        yield from _broadcasts(config)


def _broadcasts(config: Config) -> Iterator[Problem]:
    backend, own = config.weights.backend, devices.named(config.model.device)
    if backend not in ("auto", "gloo", own.collectives):
        yield Problem(
            ("weights.backend", "weights.transport", "model.device"),
            f'weights.backend = "{backend}" with model.device = "{config.model.device}": that library moves tensors of '
            f'other devices; set "auto" ({own.collectives}), or "gloo" to go through main memory',
        )


def _ipc(config: Config) -> Iterator[Problem]:
    if config.rollout.backend == "sglang":
        yield Problem(
            ("weights.transport", "rollout.backend"),
            'weights.transport = "ipc" with rollout.backend = "sglang": a server unpickles what comes that way, so it '
            'is not offered; set "distributed" (another GPU than the trainer\'s) or "disk"',
        )
    if not devices.named(config.model.device).has_ipc:
        yield Problem(
            ("weights.transport", "model.device"),
            f'weights.transport = "ipc" with model.device = "{config.model.device}": memory is shared between '
            'processes on CPUs or on CUDA devices; set "distributed" or "disk"',
        )
    if config.weights.backend != "auto":
        yield Problem(
            ("weights.backend", "weights.transport"),
            f'weights.backend = "{config.weights.backend}" with weights.transport = "ipc": no library of broadcasts is '
            "used there; remove weights.backend",
        )


def _sglang(config: Config) -> Iterator[Problem]:
    rollout, settings = config.rollout, config.rollout.sglang
    if rollout.backend != "sglang":
        return
    from engine.rollout.sglang.guard import in_place_is_exact, refused_args, refused_env, refused_group

    yield from _sglang_url(config)
    if config.weights.transport == "distributed" and (reason := refused_group(settings.args)):
        yield Problem(
            ("weights.transport", "rollout.sglang.args"),
            f'weights.transport = "distributed" with rollout.sglang.args: {reason}; remove one of them',
        )
    if reason := refused_args(settings.args):
        yield Problem(("rollout.sglang.args",), f"rollout.sglang.args: {reason}")
    if reason := refused_env(settings.env):
        yield Problem(("rollout.sglang.env",), f"rollout.sglang.env: {reason}; remove it")
    reason = in_place_is_exact(settings.args)
    if rollout.pause_generation_mode == "in_place" and not settings.url and reason:
        yield Problem(
            ("rollout.pause_generation_mode", "rollout.sglang.args"),
            f'rollout.pause_generation_mode = "in_place" {reason}; add them to rollout.sglang.args, or use "retract"',
        )


def _sglang_url(config: Config) -> Iterator[Problem]:
    replicas, settings = config.rollout.replicas, config.rollout.sglang
    if settings.url and not settings.url.startswith(("http://", "https://")):
        yield Problem(
            ("rollout.sglang.url",),
            f'rollout.sglang.url = "{settings.url}": must start with http:// or https://',
        )
    if settings.url and replicas > 1 and "{replica}" not in settings.url:
        yield Problem(
            ("rollout.sglang.url", "rollout.replicas"),
            f'rollout.sglang.url = "{settings.url}" with rollout.replicas = {replicas}: the daemons would update the '
            "weights of one server each for itself; write {replica} into it where their servers differ, or set "
            "replicas to 1",
        )
    if not settings.url:
        for key in ("api_key", "admin_api_key"):
            if getattr(settings, key) is not None:
                yield Problem(
                    (f"rollout.sglang.{key}", "rollout.sglang.url"),
                    f"rollout.sglang.{key}: goes with rollout.sglang.url; a server that the daemon starts listens on "
                    "this machine alone and has no key; remove it",
                )
        if settings.port and settings.port + replicas - 1 > 65535:
            yield Problem(
                ("rollout.sglang.port", "rollout.replicas"),
                f"rollout.sglang.port = {settings.port} with rollout.replicas = {replicas}: the last daemon's port "
                "would be above 65535; choose a lower one",
            )


def _lora(config: Config) -> Iterator[Problem]:
    if not config.trainer.lora.rank:
        return
    if config.weights.kind == "delta":
        yield Problem(
            ("trainer.lora.rank", "weights.kind"),
            'weights.kind = "delta" with trainer.lora.rank above 0: a version is the adapter alone then, which is '
            'small already; set weights.kind = "full"',
        )
    if config.rollout.backend == "sglang" and config.weights.transport != "disk":
        yield Problem(
            ("trainer.lora.rank", "rollout.backend", "weights.transport"),
            f'weights.transport = "{config.weights.transport}" with trainer.lora.rank above 0 and SGLang engines: they '
            'take an adapter merged into its base, from a file; set weights.transport = "disk"',
        )
    if config.trainer.backend != "torch":
        yield Problem(
            ("trainer.lora.rank", "trainer.backend"),
            f'trainer.lora.rank above 0 with trainer.backend = "{config.trainer.backend}": adapters are trained by the '
            '"torch" backend alone; set one of them back',
        )


def _ranks(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.n_ranks > 1 and trainer.backend not in ("fsdp2", "megatron"):
        yield Problem(
            ("trainer.n_ranks", "trainer.backend"),
            f'trainer.n_ranks = {trainer.n_ranks} with trainer.backend = "{trainer.backend}": that trainer is one '
            'process; set backend = "fsdp2" or "megatron", or n_ranks = 1',
        )
    if trainer.fsdp2.cpu_offload and not trainer.fsdp2.sync_each_micro_batch:
        yield Problem(
            ("trainer.fsdp2.cpu_offload", "trainer.fsdp2.sync_each_micro_batch"),
            "trainer.fsdp2.cpu_offload = true with sync_each_micro_batch = false: nothing stays on the device with the "
            "one, all weights and gradients with the other; remove one of them",
        )
    if trainer.backend == "megatron":
        cut = msgspec.structs.asdict(trainer.megatron)
        try:
            MegatronSettings(**cut).data_parallel_size(trainer.n_ranks)
        except ConfigError as error:
            yield Problem(("trainer.n_ranks", *(f"trainer.megatron.{name}" for name in cut)), str(error))


def _megatron(config: Config) -> Iterator[Problem]:
    trainer, model = config.trainer, config.model
    if trainer.backend != "megatron":
        return
    if (
        trainer.packing
        and model.attn_implementation == "eager"
        and trainer.megatron.transformer_impl == "local"
    ):
        yield Problem(
            ("trainer.packing", "model.attn_implementation", "trainer.backend"),
            'trainer.packing = true with model.attn_implementation = "eager": the megatron trainer packs rows with '
            '"sdpa" only; set it, or packing = false',
        )
