"""Before a run takes its directory: are the functions and the prompts that its configuration names usable?

    millstream run ──► python -m engine.launch.preflight (configuration on stdin) ──► 0, or 2 and one sentence

A process of its own, since naming a function means importing its module, and the supervisor must not hold what that
loads. The daemons check the same again; here it is in time: a mistyped name must not leave a begun run behind.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.config import with_secrets
from engine.settings import Config
from streams.errors import ConfigError

LONGEST_S = 120.0  # for importing what the functions need
WRONG_CONFIG = 2


def check_functions(config: Config) -> None:
    """Raise ConfigError with what the daemons would say of reward, filters, generate function and prompts.

    Anything else that goes wrong here is left to the daemons, whose logs have room for it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=msgspec.json.encode(config),
            capture_output=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
    if done.returncode == WRONG_CONFIG:
        raise ConfigError(done.stderr.decode("utf-8", "replace").strip().rpartition("\0")[2])


def find_problem(config: Config) -> ConfigError | None:
    """The first thing that cannot be used."""
    from consumers.filters import load_filter
    from consumers.rewards.load import load_reward
    from engine.rollout.generate import load_generate

    tables: Mapping[str, Any] = msgspec.to_builtins(config)
    reward, collector, rollout = config.reward, config.collector, config.rollout
    try:
        load_reward(
            reward.function,
            with_secrets(reward.options, "reward.options"),
            group=reward.group,
            config=tables,
        )
        for name in collector.filters:
            load_filter(name, collector.options.get(name), config=tables)
        load_generate(rollout.generate, with_secrets(rollout.options, "rollout.options"), tables)
        _check_rows(config)
    except ConfigError as error:
        return error
    return None


def _check_rows(config: Config) -> None:
    """Single bad rows are skipped by the feeder; a file without one good row would only ever be skipped."""
    from consumers.dataset import BadRow, JsonLines

    data = config.data
    rows = JsonLines(
        Path(data.path), prompt_key=data.prompt_key, label_key=data.label_key, metadata_key=data.metadata_key
    )
    try:
        first = rows.row(0)
        if isinstance(first, BadRow) and all(isinstance(rows.row(at), BadRow) for at in range(1, len(rows))):
            raise ConfigError(
                f'data.path = "{data.path}": none of its rows can be used; the first: {first.detail}'
            )
    finally:
        rows.close()


def main() -> int:
    problem = find_problem(msgspec.json.decode(sys.stdin.buffer.read(), type=Config))
    if problem is None:
        return 0
    sys.stderr.write(f"\0{problem}")  # after whatever the imported modules have said
    return WRONG_CONFIG


if __name__ == "__main__":
    sys.exit(main())
