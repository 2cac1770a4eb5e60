"""What the commands share: the CONFIG argument, logging, the log opened for reading, the stop flag."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
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
    # The Kafka client reports every connection it makes or loses; what matters of that reaches our own messages.
    logging.getLogger("kafka").setLevel(logging.INFO if level == "debug" else logging.CRITICAL)


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


def open_for_reading(config: Config, *, interrupted: Callable[[], bool] = lambda: False) -> EventLog:
    """The run's log, opened so that nothing can be written to it. Raises ConfigError when there is none.

    `interrupted` ends every wait for a broker (LogUnavailable); the embedded log has none.
    """
    from engine.roles import open_run_log

    require_shared_log(config)
    if not has_log(config):
        raise ConfigError(f"no log at {log_folder(config)}: this run has not been started")
    return open_run_log(config, readonly=True, interrupted=interrupted)


def log_folder(config: Config) -> Path | None:
    """Where the embedded log lies; None for another kind of log."""
    scheme, _, path = config.log.url.partition("://")
    return Path(path) if scheme == "file" else None


def has_log(config: Config) -> bool:
    """Whether there is a log to be opened; one that another process is just making is not there yet. A log that is no
    folder counts as there: only its broker can say."""
    folder = log_folder(config)
    return folder is None or (folder / "format.json").is_file()


def require_shared_log(config: Config) -> None:
    """Refuse a log that no second process can see."""
    if config.log.url.startswith("memory:"):
        raise ConfigError(
            f'log.url = "{config.log.url}" lives inside one process, and each daemon is one of its own; '
            "remove log.url, or set file:///path or kafka://host:port"
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

    def was_asked(self) -> bool:
        """As `is_set`, for those who only wait: it does not count as looking."""
        return self._stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_watched:
            os._exit(128 + signal.SIGINT)
        self._stopped = True
        self.interrupted = self.interrupted or number == signal.SIGINT
