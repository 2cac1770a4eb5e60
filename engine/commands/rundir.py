"""A run directory belongs to one run: it is adopted by its own configuration and refused to any other.

The guarantee "no daemon ever writes into another run's log, weights or checkpoints" lives here.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.commands import common
from engine.config import CONFIG_FILE, Config, dump_toml, fingerprint, load_config, run_data
from streams.errors import ConfigError, UnknownTopic
from streams.events import RunStarted

IMPORTED_FILE = "imported.json"  # in the directory of a run that `millstream import` made: where it came from


def adopt(config: Config, *, rewrite: bool = True) -> Path:
    """Make the run directory, or check that it is this configuration's; leave the effective configuration in it.

    A single daemon does not `rewrite`: what it was told by --set is its own business. Raises ConfigError with what
    differs. A log that does not answer is waited for.
    """
    common.require_shared_log(config)
    run_dir = Path(config.run.dir)
    refuse_imported(config)
    refuse_other_run(config)
    make_run_dir(run_dir)
    if (run_dir / CONFIG_FILE).exists() and not rewrite:
        return run_dir
    draft = run_dir / f".{CONFIG_FILE}.{os.getpid()}"
    draft.write_text(dump_toml(config), encoding="utf-8")
    draft.replace(run_dir / CONFIG_FILE)
    return run_dir


def refuse_imported(config: Config) -> None:
    """Raise ConfigError for what `millstream import` made: a piece of a run is read, never gone on with.

    Its topics end at different places: what a stage takes for work that is open was done elsewhere.
    """
    log = common.log_folder(config)
    for folder in (Path(config.run.dir), *([log.parent] if log is not None else [])):
        if (folder / IMPORTED_FILE).is_file():
            raise ConfigError(
                f"{folder} was made by millstream import: it holds a piece of a run, to be read and replayed, and "
                "nothing is written into it; start a run of its own (run.dir)"
            )


def make_run_dir(run_dir: Path) -> None:
    """Raises ConfigError when it cannot be made or written to."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f'run.dir = "{run_dir}": is a file; name a folder for the run') from error
    except OSError as error:
        raise ConfigError(
            f'run.dir = "{run_dir}": cannot be made ({error.strerror}); name a folder that you may write to'
        ) from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f'run.dir = "{run_dir}": is read-only; name a folder that you may write to')


def refuse_other_run(config: Config, *, patient: bool = True) -> None:
    """Raise ConfigError if the directory or its ledger was begun with other run data than `config` asks for.

    The ledger is asked too, since a log on Kafka may hold a run whose directory is not the one that was named.
    `patient`: wait for a log that does not answer, instead of raising LogUnavailable.
    """
    run_dir, ours = Path(config.run.dir), fingerprint(config)
    recorded = load_config(run_dir, environ={}) if (run_dir / CONFIG_FILE).is_file() else None
    if recorded is not None and fingerprint(recorded) != ours:
        changes = "\n  ".join(differences(recorded, config))
        raise ConfigError(
            f"{run_dir} is a run of another configuration:\n  {changes}\n"
            "set these back, or give this run a directory of its own (run.dir)"
        )
    started = run_started(config, patient=patient)
    # the model of an imported run may lie elsewhere than where it was trained: its own configuration was compared above
    is_imported = recorded is not None and (run_dir / IMPORTED_FILE).is_file()
    if started is not None and started.config_fingerprint != ours and not is_imported:
        raise ConfigError(
            f"{run_dir}: its ledger was begun by run {started.run!r} with the fingerprint "
            f"{started.config_fingerprint[:12]}, this configuration has {ours[:12]}: {_changed(started, config)}; "
            "set it back, or give this run a directory of its own (run.dir) and, on Kafka, a name of its own (run.name)"
        )


def _changed(started: RunStarted, config: Config) -> str:
    """What differs from the manifest; it holds few settings by value, and the fingerprint of all."""
    pairs = {
        "log.partitions": (started.partitions, config.log.partitions),
        "rollout.n_samples_per_prompt": (started.n_samples_per_prompt, config.rollout.n_samples_per_prompt),
        "trainer.rollout_batch_size": (started.rollout_batch_size, config.trainer.rollout_batch_size),
        "run.seed": (started.seed, config.run.seed),
    }
    found = [f"{key}: the run has {had}, asked for {now}" for key, (had, now) in pairs.items() if had != now]
    if found:
        return ", ".join(found)
    return (
        "a setting of the run's data (prompts, policy, sampling, scoring, batches, optimizer) was changed in "
        f"{CONFIG_FILE}"
    )


def run_started(config: Config, *, patient: bool = True) -> RunStarted | None:
    """The manifest in the ledger; None while the run has not begun."""
    from streams.codec import Known, decode
    from streams.patient import PatientLog

    if not common.has_log(config):
        return None
    topic = common.topics_of(config).name("ledger")
    reading = common.open_for_reading(config)
    with PatientLog(reading, stop=lambda: not patient, who=config.run.name) as log:
        if not log.partitions(topic):
            return None
        try:
            batch = log.read(topic, 0, log.start(topic, 0))
        except UnknownTopic:  # it is being made
            return None
    for record in batch.records:
        if record.header("type") in (b"run_started", None):
            decoded = decode(record)
            if isinstance(decoded, Known) and isinstance(decoded.event, RunStarted):
                return decoded.event
    return None


def differences(recorded: Config, asked: Config) -> list[str]:
    """One line for each setting of the run's data that is not the same."""
    ours, theirs = run_data(asked), run_data(recorded)
    return [
        f"{key}: the run has {theirs[key]!r}, asked for {ours[key]!r}"
        for key in ours
        if ours[key] != theirs[key]
    ]
