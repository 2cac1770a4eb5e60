"""A run directory with an embedded log, filled by hand."""

from __future__ import annotations

from pathlib import Path

from engine.config import load_config
from engine.settings import Config
from streams import codec
from streams.events import Event
from streams.log import EventLog, NewRecord
from streams.open import open_log
from streams.topics import Topics

CONFIG = """
[run]
name = "tail"
dir = "{folder}"
[log]
partitions = {partitions}
[data]
path = "{folder}/prompts.jsonl"
[reward]
function = "exact"
[trainer]
backend = "scalar"
[rollout]
backend = "scripted"
"""


class Run:
    """`put` events, then let a command read it: it takes `config_file` as CONFIG."""

    def __init__(self, folder: Path, *, partitions: int) -> None:
        (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
        self.folder, self.config_file = folder, folder / "config.toml"
        self.config_file.write_text(CONFIG.format(folder=folder, partitions=partitions))
        self.topics = Topics("tail", partitions)
        with self.log() as log:
            self.topics.create(log)

    @property
    def config(self) -> Config:
        return load_config(self.config_file)

    def configure(self, text: str) -> None:
        """More lines of the configuration, the first ones in [rollout]."""
        self.config_file.write_text(self.config_file.read_text() + text)

    def log(self) -> EventLog:
        return open_log(self.config.log.url)

    def put(self, word: str, event: Event, partition: int, at_ms: int) -> None:
        self.append(word, codec.encode(event, producer="test", timestamp_ms=at_ms), partition)

    def append(self, word: str, record: NewRecord, partition: int = 0) -> None:
        with self.log() as log:
            log.append(self.topics.name(word), partition, [record])
