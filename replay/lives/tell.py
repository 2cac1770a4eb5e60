"""The one door: kind and id to a life."""

from __future__ import annotations

from replay.lives.facts import Life
from replay.lives.group import show_group
from replay.lives.run import RunFacts
from replay.lives.sample import show_sample
from replay.lives.step import show_step
from replay.lives.tokens import Words
from replay.lives.version import show_version
from streams.errors import ConfigError
from streams.log import EventLog
from streams.topics import Topics


def life(
    log: EventLog,
    topics: Topics,
    kind: str,
    text: str,
    words: Words | None = None,
    *,
    estimator: str = "grpo",
) -> Life:
    """`words` gives the text of token ids; None: tokens are shown as ids. `estimator` as in RunFacts.

    Raises ConfigError for an unknown kind or a malformed id, NotFound when the run has no such thing, SchemaTooNew for
    a ledger that this version cannot read.
    """
    run = RunFacts(log, topics, estimator)
    if kind == "group":
        return show_group(run, text)
    if kind == "sample":
        return show_sample(run, text, words)
    if kind == "step":
        return show_step(run, text)
    if kind == "version":
        return show_version(run, text)
    raise ConfigError(f"show {kind}: known are group, sample, step, version")
