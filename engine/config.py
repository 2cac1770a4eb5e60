"""Reading and checking the configuration.

    file or run directory ──────┐
    MILLSTREAM__section__key=v ─┼─ later wins ─► one table ─► each value to its type ─► cross checks ─► Config
    --set section.key=v ────────┘                    └─ every problem is kept ─────────────┴─► one ConfigError

Nothing is ignored: an unknown key, a value of another type and a combination that cannot work are refused with
the full key, the value, the reason and, for a near miss, the nearest name.

Example:
    >>> config = build_config(
    ...     {"data": {"path": "prompts.jsonl"}, "reward": {"function": "exact"}, "model": {"path": "model"}},
    ...     ["trainer.lr=1e-3"],
    ... )
    >>> config.trainer.lr
    0.001
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine import devices
from engine.config_checks import find_problems
from engine.config_fields import get, has_mark, marked, replaced
from engine.config_kafka import find_kafka_problems
from engine.config_reader import ENV_PREFIX, Reader
from engine.config_secrets import ENV_REFERENCE, FILE_REFERENCE, is_reference, looks_secret
from engine.config_toml import dump_toml, show
from engine.settings import Config, global_batch_size, open_groups_cap, samples_per_step
from engine.trainer.megatron.bootstrap import without_musa_patch
from streams.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

__all__ = [
    "CONFIG_FILE",
    "ENV_PREFIX",
    "Config",
    "build_config",
    "check_paths",
    "dump_toml",
    "fingerprint",
    "global_batch_size",
    "load_config",
    "open_groups_cap",
    "run_data",
    "samples_per_step",
    "secret",
    "with_secrets",
    "without_overrides",
]

CONFIG_FILE = "config.toml"  # the effective configuration in a run directory


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """The configuration in a TOML file, or the effective one of a run directory.

    Relative paths are taken from the working directory and are absolute in the result. When a run directory was
    moved, the paths that lie in it moved along.

    Args:
        overrides: the `section.key=value` of each --set. The value is TOML or a bare string; `none` unsets.
        environ: where `MILLSTREAM__section__key` variables come from; default: this process's environment.

    Raises:
        ConfigError: all problems found, each with its full key.
    """
    path, environ = Path(path), os.environ if environ is None else environ
    if not path.is_dir():
        return build_config(_read_toml(path), overrides, environ, where=str(path))
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            f"{path} is a directory without {CONFIG_FILE}: neither a configuration nor a run directory"
        )
    return build_config(_relocated(_read_toml(file), path), overrides, environ, where=str(file))


def build_config(
    table: Mapping[str, Any],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    where: str = "configuration",
) -> Config:
    """A checked configuration from a nested table; no environment is read unless `environ` is given.

    Raises ConfigError with all problems, as `load_config` does; `where` starts its message.
    """
    reader = Reader(copy.deepcopy(dict(table)))
    for name, text in sorted((environ or {}).items()):
        if name.startswith(ENV_PREFIX):
            reader.override_from_variable(name, text)
    for item in overrides:
        reader.override_from_option(item)
    if str(reader.written("model.device")).partition(":")[0] == "musa":
        reader.set_default("trainer.backend", "fsdp2")  # what is reported to work there
    config = _with_absolute_paths(reader.config())
    unread = {key for problem in reader.problems for key in problem.keys}
    found = (*find_problems(config), *find_kafka_problems(config))
    crossed = [problem for problem in found if unread.isdisjoint(problem.keys)]
    problems = [problem.text for problem in (*reader.problems, *crossed)]
    if problems:
        head = f"{where}: " if len(problems) == 1 else f"{where}: {len(problems)} problems\n  "
        raise ConfigError(head + "\n  ".join(problems))
    return config


def check_paths(config: Config) -> None:
    """Refuse a dataset, a model or a patch that is not there. Apart from loading: a log can be read without them."""
    missing = []
    for key in ("data.path", "eval.path"):
        path = get(config, key)
        if path and not Path(path).is_file():
            reason = "is a folder; name a JSONL file in it" if Path(path).is_dir() else "no such file"
            missing.append(f"{key} = {show(path)}: {reason}")
    for key in ("model.path", "teacher.path"):
        folder = get(config, key)
        if folder and not (Path(folder) / "config.json").is_file():
            missing.append(f"{key} = {show(folder)}: not a Hugging Face folder (no config.json in it)")
    if config.trainer.backend == "megatron" and devices.named(config.model.device).kind == "musa":
        missing += without_musa_patch(os.environ)
    if missing:
        raise ConfigError("\n  ".join(missing))


def secret(reference: str, key: str, environ: Mapping[str, str] | None = None) -> str:
    """What `env:NAME` or `file:/path` stands for now; a file's last line break is no part of it.

    Raises ConfigError, naming `key` and the place, when there is nothing.
    """
    shown = f"{key} = {show(reference)}"
    if reference.startswith(FILE_REFERENCE):
        try:
            value = Path(reference.removeprefix(FILE_REFERENCE)).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"{shown}: that file cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{shown}: that file is not text in UTF-8") from error
        if not value:
            raise ConfigError(f"{shown}: that file is empty")
        return value
    name = reference.removeprefix(ENV_REFERENCE)
    value = (os.environ if environ is None else environ).get(name, "")
    if not value:
        raise ConfigError(f"{shown}: the environment variable {name} is not set")
    return value


def with_secrets(
    options: Mapping[str, Any], key: str, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A free-form table (`rollout.options`, `reward.options`) as its function needs it: references `env:NAME`, at
    any depth, replaced by what they stand for, and `file:/path` where the option's name is that of a secret (elsewhere
    it is the URL of a file). `key` is the table's own. Raises ConfigError as `secret` does."""

    def opened(value: Any, name: str, where: str) -> Any:
        if isinstance(value, Mapping):
            return {inner: opened(value[inner], inner, f"{where}.{inner}") for inner in value}
        is_secret = isinstance(value, str) and (
            value.startswith(ENV_REFERENCE) or (looks_secret(name) and is_reference(value))
        )
        return secret(value, where, environ) if is_secret else value

    return opened(options, "", key)


def without_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a daemon that is given a run directory.

    Its configuration holds our variables' values already, and applying them again would undo a --set.
    """
    return {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}


def fingerprint(config: Config) -> str:
    """SHA-256 (hex) over `run_data`; `RunStarted` records it.

    With another value of one of these settings the ledger could not be replayed to the recorded weights, so a run
    directory of another fingerprint is refused.
    """
    return hashlib.sha256(msgspec.json.encode(run_data(config), order="deterministic")).hexdigest()


def run_data(config: Config) -> dict[str, Any]:
    """Full key → value of the settings that say what the run's data is (marked `run_data` in engine.settings).

    In: prompts and their order, policy, sampling, scoring, filters, batches, loss, optimizer, partitions.
    Out: where things lie, how many processes work and how fast, deadlines, retention, checkpoints, `data.epochs`,
    `run.steps` (but in where a schedule of the learning rate ends at it), and the staleness limit, which each
    batch records for itself.
    A setting that came after the first release counts only where it is not at its default.
    Paths inside the run directory count relative to it, so a run that was moved stays the same run.
    """
    values: dict[str, Any] = {}
    for key, field in marked("run_data"):
        value = get(config, key)
        if has_mark(field, "added") and value == field.default:
            continue
        if has_mark(field, "path") and value and Path(value).is_relative_to(config.run.dir):
            value = Path(value).relative_to(config.run.dir).as_posix()
        values[key] = value
    if config.trainer.lr_schedule != "constant":
        values["run.steps"] = config.run.steps  # the schedule's length
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def _relocated(table: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The table of a run directory as it must read where the directory lies now."""
    old, new = _table(table, "run").get("dir"), run_dir.resolve()
    if not isinstance(old, str):
        return table
    log = _table(table, "log")
    if log.get("url") == _default_log_url(old):
        del log["url"]  # the default again, so that it follows a --set run.dir too
    for key, _ in marked("path"):
        *sections, name = key.split(".")
        section = table
        for part in sections:
            section = _table(section, part)
        value = section.get(name)
        if isinstance(value, str) and Path(value).is_relative_to(old):
            section[name] = str(new / Path(value).relative_to(old))
    return table


def _table(table: dict[str, Any], name: str) -> dict[str, Any]:
    """The inner table of that name; an empty one when there is none (or something else, refused later)."""
    inner = table.get(name)
    return inner if isinstance(inner, dict) else {}


def _with_absolute_paths(config: Config) -> Config:
    for key, _ in marked("path"):
        value = get(config, key)
        if value:
            config = replaced(config, key, os.path.abspath(os.path.expanduser(value)))
    return config if config.log.url else replaced(config, "log.url", _default_log_url(config.run.dir))


def _default_log_url(run_dir: str) -> str:
    return f"file://{run_dir}/log"
