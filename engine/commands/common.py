"""What the commands share: the CONFIG argument, logging, the log opened for reading, the stop flag."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from streams.errors import ConfigError

if TYPE_CHECKING:
    from engine.settings import Config
    from streams.log import EventLog
    from streams.topics import Topics


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or a run directory")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a setting, as in --set trainer.lr=1e-5; may be repeated",
    )


def load(args: argparse.Namespace) -> Config:
    """The configuration that the arguments name. Raises ConfigError."""
    from engine.config import load_config

    return load_config(args.config, args.overrides)


def setup_logging(level: str) -> None:
    """Log lines go to stderr, so that stdout holds nothing but data."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        force=True,
    )


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def natural(text: str) -> int:
    """The type of an argument that may also be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def topics_of(config: Config) -> Topics:
    from engine.roles import topics_of

    return topics_of(config)


def open_for_reading(config: Config) -> EventLog:
    """The run's log, opened so that nothing can be written to it. Raises ConfigError when there is none."""
    from engine.roles import open_run_log

    require_shared_log(config)
    folder = log_folder(config)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"no log at {folder}: this run has not been started")
    return open_run_log(config, readonly=True)


def log_folder(config: Config) -> Path | None:
    """Where the embedded log lies; None for another kind of log."""
    scheme, _, path = config.log.url.partition("://")
    return Path(path) if scheme == "file" else None


def require_shared_log(config: Config) -> None:
    """Refuse a log that no second process can see, and one that this version cannot open."""
    if config.log.url.startswith("kafka:"):
        raise ConfigError(
            f'log.url = "{config.log.url}": this version has no Kafka log yet; '
            "remove log.url for the embedded log in the run directory, or set file:///path"
        )
    if config.log.url.startswith("memory:"):
        raise ConfigError(
            f'log.url = "{config.log.url}" lives inside one process, and each daemon is one of its own; '
            "remove log.url, or set file:///path"
        )


class StopFlag:
    """Turned on by SIGTERM and SIGINT; a second signal changes nothing.

    >>> stop = StopFlag()
    >>> stop.is_set(), stop.interrupted
    (False, False)
    """

    def __init__(self, *, exits_at_start: bool = False) -> None:
        """`exits_at_start`: until somebody looks at the flag for the first time, a signal ends the process.

        A daemon that is still importing torch has written nothing, and could not obey within 2 s otherwise.
        """
        self.interrupted = False  # by the keyboard
        self._stopped = False
        self._is_watched = not exits_at_start

    def install(self) -> StopFlag:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        return self

    def is_set(self) -> bool:
        self._is_watched = True
        return self._stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_watched:
            os._exit(128 + signal.SIGINT)
        self._stopped = True
        self.interrupted = self.interrupted or number == signal.SIGINT
