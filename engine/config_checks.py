"""What settings must hold together. Each problem is one sentence with the fix; none is a warning.

A check names the keys that it read, so that one whose values could not be read at all is passed over: its values
are defaults then, and the sentence would be about something that nobody wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from engine.config_fields import get, marked
from engine.settings import Config, open_groups_cap, samples_per_step

REDACTED = "<redacted>"
ENV_REFERENCE, FILE_REFERENCE = "env:", "file:"  # a secret is written as env:NAME or file:/path
_REFERENCE_TO = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\x00-\x1f]+")
SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|secret|credentials?|(api|access|secret|private)_?key|(api|auth|access|bearer)_?token)$",
    re.IGNORECASE,
)


class Problem(NamedTuple):
    keys: tuple[str, ...]  # full keys that the check read
    text: str


def looks_secret(name: str) -> bool:
    """True for the name of an option that holds a secret, like `api_key` (and not `max_tokens`)."""
    return SECRET_NAME.search(name) is not None


def is_reference(value: str) -> bool:
    """True for `env:NAME` and `file:/path`: where a secret is, and not what it is."""
    return _REFERENCE_TO.fullmatch(value) is not None


def find_problems(config: Config) -> Iterator[Problem]:
    """Every combination in it that cannot work."""
    yield from _required(config)
    yield from _log(config)
    yield from _secrets(config)
    yield from _sampling(config)
    yield from _groups(config)
    yield from _batches(config)
    yield from _loss(config)
    yield from _staleness(config)
    yield from _transport(config)
    yield from _sglang(config)
    yield from _not_yet(config)


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
        if backend in ("torch", "sglang")
    ]
    if needs_model and not config.model.path:
        yield Problem(
            ("model.path", "rollout.backend", "trainer.backend"),
            f'model.path: missing; {needs_model[0]}.backend = "{get(config, needs_model[0]).backend}" needs a local '
            "Hugging Face folder",
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
    if n == 1 and config.trainer.advantage_estimator == "grpo":
        yield Problem(
            ("rollout.n_samples_per_prompt", "trainer.advantage_estimator"),
            'rollout.n_samples_per_prompt = 1 with trainer.advantage_estimator = "grpo": the advantage is the '
            "difference to the group's mean, which is 0 in a group of 1; set n_samples_per_prompt to 2 or more",
        )
    elif least is not None and not 2 <= least <= n:
        yield Problem(
            ("collector.min_group_size", "rollout.n_samples_per_prompt"),
            f"collector.min_group_size = {least}: must be between 2 and rollout.n_samples_per_prompt = {n}",
        )


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
    if trainer.loss != "ppo":
        for key, wrong in (
            ("use_tis", trainer.use_tis),
            ("use_rollout_logprobs", not trainer.use_rollout_logprobs),
        ):
            if wrong:
                yield Problem(
                    ("trainer.loss", f"trainer.{key}"),
                    f'trainer.{key} = {str(key == "use_tis").lower()} goes with trainer.loss = "ppo" only: '
                    f'"{trainer.loss}" weighs by the recorded log-probs itself; remove {key}',
                )
    elif trainer.use_tis and trainer.use_rollout_logprobs:
        yield Problem(
            ("trainer.use_tis", "trainer.use_rollout_logprobs"),
            "trainer.use_tis = true with trainer.use_rollout_logprobs = true corrects twice for the same difference; "
            "set use_rollout_logprobs = false, or remove use_tis",
        )
    elif (
        not trainer.use_rollout_logprobs and not trainer.use_tis and config.staleness.max_weight_staleness > 0
    ):
        yield Problem(
            ("trainer.use_rollout_logprobs", "trainer.use_tis", "staleness.max_weight_staleness"),
            "trainer.use_rollout_logprobs = false ignores the policy that sampled, which fails once samples are stale "
            f"(staleness.max_weight_staleness = {config.staleness.max_weight_staleness}); remove it, or set "
            "trainer.use_tis = true, or max_weight_staleness = 0",
        )
    if trainer.lr_schedule != "constant" and config.run.steps is None:
        yield Problem(
            ("trainer.lr_schedule", "run.steps"),
            f'trainer.lr_schedule = "{trainer.lr_schedule}" needs run.steps, the step at which the rate is 0; '
            'set run.steps, or lr_schedule = "constant"',
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
    if config.weights.transport != "distributed":
        return
    rollout = config.rollout
    if rollout.backend == "scripted":
        yield Problem(
            ("weights.transport", "rollout.backend"),
            'weights.transport = "distributed" with rollout.backend = "scripted": a scripted engine takes versions '
            "from disk alone; remove weights.transport",
        )
    elif rollout.backend == "torch" and rollout.decode == "continuous":
        yield Problem(
            ("weights.transport", "rollout.decode"),
            'weights.transport = "distributed" with rollout.decode = "continuous": that engine takes versions from '
            'disk alone; set rollout.decode = "batched", or remove weights.transport',
        )


def _sglang(config: Config) -> Iterator[Problem]:
    rollout, settings = config.rollout, config.rollout.sglang
    if rollout.backend != "sglang":
        return
    from engine.rollout.sglang.guard import in_place_is_exact, refused_args, refused_env

    yield from _sglang_url(config)
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


def _not_yet(config: Config) -> Iterator[Problem]:
    if config.weights.transport == "ipc":
        yield Problem(
            ("weights.transport",),
            'weights.transport = "ipc": this version has only "disk" and "distributed"; remove it',
        )
