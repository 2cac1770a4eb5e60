"""From a nested table and overrides to structs, without stopping at the first problem."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.config_fields import choices, has_mark, leaves, section_of
from engine.config_problems import Problem
from engine.config_secrets import REDACTED
from engine.config_toml import show
from engine.settings import PATTERNS_IN_WORDS, Config, Section

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ENV_PREFIX = "MILLSTREAM_"  # every variable that starts so is ours
SETTING_PREFIX = "MILLSTREAM__"  # and goes on with section__key
NOT_SETTINGS = frozenset(
    {
        "MILLSTREAM_CACHE",  # where the development broker's Kafka is kept
        "MILLSTREAM_ALLOW_SLOW_KAFKA",  # streams/kafka/options.py
        "MILLSTREAM_TEST_KAFKA",  # the tests'
        "MILLSTREAM_REQUIRE_KAFKA",
        "MILLSTREAM_SGLANG_PYTHON",
        "MILLSTREAM_REQUIRE_SGLANG",
        "MILLSTREAM_REQUIRE_RAY",
        "MILLSTREAM_GIVEN_DEVICES",  # engine/devices/visible.py
    }
)
TYPES_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "null": "none",
    "array": "a list",
    "object": "a table",
}
OTHER_NAMES = {  # of Miles, Slime, verl, AReaL and torch, for what is not nearly the same word here
    "use_kl_loss": "trainer.kl_loss_coef",
    "ref_load": "trainer.ref_model",
    "learning_rate": "trainer.lr",
    "lr_rate": "trainer.lr",
    "lr_decay_style": "trainer.lr_schedule",
    "lr_warmup_iters": "trainer.lr_warmup",
    "clip_ratio": "trainer.eps_clip",
    "max_tokens_per_gpu": "trainer.micro_batch_tokens",
    "train_backend": "trainer.backend",
    "actor_num_gpus": "trainer.n_ranks",
    "tensor_parallel_size": "trainer.megatron.tensor_model_parallel_size",
    "pipeline_parallel_size": "trainer.megatron.pipeline_model_parallel_size",
    "num_rollout": "run.steps",
    "train_iters": "run.steps",
    "hf_checkpoint": "model.path",
    "prompt_data": "data.path",
    "input_key": "data.prompt_key",
    "rollout_shuffle": "data.shuffle",
    "n_samples": "rollout.n_samples_per_prompt",
    "group_size": "rollout.n_samples_per_prompt",
    "rollout_n": "rollout.n_samples_per_prompt",
    "temperature": "rollout.rollout_temperature",
    "max_new_tokens": "rollout.rollout_max_response_len",
    "max_response_len": "rollout.rollout_max_response_len",
    "sglang_server_concurrency": "rollout.max_concurrency",
    "custom_generate_function_path": "rollout.generate",
    "rm_type": "reward.function",
    "custom_rm_path": "reward.function",
    "dynamic_sampling_filter_path": "collector.filters",
    "max_staleness": "staleness.max_weight_staleness",
    "max_head_offpolicyness": "staleness.max_weight_staleness",
    "staleness_threshold": "staleness.max_weight_staleness",
    "max_off_policy_steps": "staleness.max_weight_staleness",
    "update_weight_buffer_size": "weights.bucket_bytes",
    "save_interval": "checkpoint.every",
    "eval_interval": "eval.every",
    "eval_prompt_data": "eval.path",
}
UNSET = "none"  # how an override says that a setting has no value, for which TOML has no word


class Reader:
    """Collects overrides, then turns the table into structs. `problems` grows on the way.

    >>> reader = Reader({"trainer": {"lr": 1}})
    >>> reader.override_from_option("trainer.los=tis")
    >>> reader.config().trainer.lr
    1.0
    >>> [problem.text for problem in reader.problems]
    ['trainer.los: unknown key (--set). Did you mean `trainer.loss`?']
    """

    def __init__(self, table: dict[str, Any]) -> None:
        """`table` is changed by overrides."""
        self.problems: list[Problem] = []
        self._table = table
        self._overrides: dict[str, tuple[str, str]] = {}  # key → (where it came from, its text there)

    def override_from_variable(self, name: str, text: str) -> None:
        """Take a variable that starts with ENV_PREFIX."""
        if name in NOT_SETTINGS:
            return
        parts = name[len(SETTING_PREFIX) :].split("__")
        if name.startswith(SETTING_PREFIX) and len(parts) > 1 and all(parts):
            self._override(parts, text, f"environment variable {name}")
            return
        known = [SETTING_PREFIX + leaf.key.replace(".", "__") for leaf in leaves()]
        self._refuse(
            name,
            f"{name}: unknown environment variable; ours are {SETTING_PREFIX}<section>__<key>",
            _nearest(name, known, 0.7),
        )

    def override_from_option(self, item: str) -> None:
        """Take the `section.key=value` of one --set."""
        key, equals, text = item.partition("=")
        parts = key.strip().split(".")
        if equals and len(parts) > 1 and all(parts):
            self._override(parts, text.strip(), "--set")
        else:
            nearest = _nearest_key(key.strip()) if equals and "." not in key else None
            self._refuse(item, f"--set {item}: must be section.key=value", nearest)

    def written(self, key: str) -> Any:
        """The value that somebody gave this key; None: nobody did."""
        found: Any = self._table
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def set_default(self, key: str, value: Any) -> None:
        """A default that depends on other settings, where nobody wrote the key."""
        *sections, name = key.split(".")
        section: Any = self._table
        for part in sections:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.setdefault(name, value)

    def config(self) -> Config:
        """The settings, with defaults in place of what could not be used; each such value is a problem."""
        return self._convert(Config, self._table, "")

    def _override(self, parts: list[str], text: str, origin: str) -> None:
        key = ".".join(parts)
        section = self._table
        for depth, part in enumerate(parts[:-1], 1):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                self._refuse(key, f"{key}: {'.'.join(parts[:depth])} is not a table ({origin})")
                return
        section[parts[-1]] = _parse_value(text)
        self._overrides[key] = origin, text

    def _convert(self, struct: type[Section], table: Mapping[str, Any], prefix: str) -> Any:
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        values: dict[str, Any] = {}
        for name, value in table.items():
            key, field = prefix + name, fields.get(name)
            section = None if field is None else section_of(field.type)
            if field is None:
                self._refuse_unknown(key, value)
            elif section is None:
                self._convert_value(field, key, value, values)
            elif isinstance(value, dict):
                values[name] = self._convert(section, value, key + ".")
            else:
                self._refuse(key, f"{key} = {show(value)}: must be a table, written as [{key}]")
        return struct(**values)

    def _convert_value(
        self, field: msgspec.structs.FieldInfo, key: str, value: Any, values: dict[str, Any]
    ) -> None:
        origin, text = self._overrides.get(key, ("", None))
        candidates = [value]
        if text == UNSET and field.default is None:
            candidates = [None]
        elif text is not None and text != value:
            candidates.append(text)  # `--set run.name=7` means the name "7"
        reasons = []
        for candidate in candidates:
            try:
                converted = msgspec.convert(candidate, field.type)
            except msgspec.ValidationError as error:
                reasons.append(_reason(error))
                continue
            if not isinstance(converted, float) or math.isfinite(converted):
                values[field.name] = converted
                return
            reasons.append("must be a finite number")
        words = choices(field)
        reason = "must be one of " + ", ".join(words) if words else reasons[0]
        if isinstance(value, str) and not words and reason.startswith("must be a list"):
            reason = f"must be a list, as in [{show(value)}]"
        shown = REDACTED if has_mark(field, "secret") else show(value)
        self._refuse(
            key,
            f"{key} = {shown}{_from(origin)}: {reason}",
            _nearest(value, words, 0.6) if isinstance(value, str) else None,
        )

    def _refuse_unknown(self, key: str, value: Any) -> None:
        """A key, or each key of a table, that is not ours. Values are not shown: it may be a mistyped password."""
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self._refuse_unknown(f"{key}.{name}", inner)
            return
        origin, _ = self._overrides.get(key, ("", ""))
        text, nearest = f"{key}: unknown key{_from(origin)}", _nearest_key(key)
        if nearest is None:
            section = key.rpartition(".")[0]
            names = [leaf.key[len(section) + 1 :] for leaf in leaves() if leaf.key.startswith(section + ".")]
            known = ", ".join(names or Config.__struct_fields__)
            text += f"; [{section}] has {known}" if names and section else f"; the sections are {known}"
        self._refuse(key, text, nearest)

    def _refuse(self, key: str, text: str, nearest: str | None = None) -> None:
        self.problems.append(Problem((key,), text + (f". Did you mean `{nearest}`?" if nearest else "")))


def _parse_value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _from(origin: str) -> str:
    return f" ({origin})" if origin else ""


def _nearest(word: str, words: Sequence[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, 1, cutoff)), None)


def _nearest_key(key: str) -> str | None:
    """The key that was probably meant: a near name in the same section, or nearly the same name in another one."""
    keys = [leaf.key for leaf in leaves()]
    section, _, name = key.lower().replace("-", "_").rpartition(".")
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    here = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == section}
    anywhere = {known.rpartition(".")[2]: known for known in reversed(keys)}
    for names, cutoff in ((here, 0.75), (anywhere, 0.85), (here, 0.5)):
        nearest = _nearest(name, list(names), cutoff)
        if nearest:
            return names[nearest]
    return None


def _reason(error: msgspec.ValidationError) -> str:
    """msgspec's sentence in our words, without its path, which the key already gives."""
    text = str(error).partition(" - at ")[0].replace("Expected", "must be")
    for pattern, words in PATTERNS_IN_WORDS.items():
        if repr(pattern) in text:
            return f"must be {words}"
    return re.sub(r"`([a-z| ]+)`", lambda found: _type_in_words(found[1]), text)


def _type_in_words(types: str) -> str:
    """`int | null` → "a whole number or none"."""
    return " or ".join(TYPES_IN_WORDS.get(name, name) for name in types.split(" | "))
