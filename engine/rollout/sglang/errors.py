"""What can go wrong between an engine and its SGLang server.

    EngineError                   engine/interfaces.py: `reason` is a fixed word, for RolloutFailed
    └── SGLangError
        ├── Unreachable           nothing answers at the address, or the connection broke
        ├── Refused               4xx or 5xx: `status`, and the server's own words in `text`
        ├── TimedOut              the deadline passed; `partial` is what an ended generation had by then
        ├── BadAnswer             the answer breaks the contract; `field` names where
        ├── Died                  the server process that this daemon started has ended
        ├── BadRequest            refused here, before anything was sent: the server would break, or lose data
        └── Unsupported           a release or a kind of address that this client must not be used with

The reasons of BadAnswer and BadRequest are those of streams.trajectory.pack, so that a broken sample has one word
however it was noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.interfaces import EngineError
from engine.rollout.loading import ENGINE_DIED

if TYPE_CHECKING:
    from engine.rollout.sglang.api import Generated

_MOST_WORDS = 2000  # of a server's text in a message


class SGLangError(EngineError):
    """Base of the errors of SGLang servers."""


class Unreachable(SGLangError):
    """Nothing answers at the server's address, or the connection broke before the answer was whole.

    `was_sent`: the server may have got the request, and may be working on it still.
    """

    def __init__(self, detail: str, *, was_sent: bool) -> None:
        super().__init__("engine_unreachable", detail)
        self.was_sent = was_sent


class Refused(SGLangError):
    """The server answered 4xx or 5xx."""

    def __init__(self, what: str, status: int, text: str) -> None:
        text = text.strip()
        super().__init__(
            "engine_refused", f"{what} was answered with {status}: {text[:_MOST_WORDS] or 'no words'}"
        )
        self.status, self.text = status, text


class TimedOut(SGLangError):
    """The deadline passed. A generation has been aborted by then; what it had is `partial`, if the server told."""

    def __init__(self, detail: str, partial: Generated | None = None) -> None:
        super().__init__("engine_timeout", detail)
        self.partial = partial


class BadAnswer(SGLangError):
    """An answer that must not be used. `field`: its place in the answer, as in "meta_info.weight_versions"."""

    def __init__(self, reason: str, field: str, detail: str) -> None:
        super().__init__(reason, f"{field}: {detail}")
        self.field = field


class Died(SGLangError):
    """The server process has ended, or never came up; the message ends with what it wrote last."""

    def __init__(self, detail: str) -> None:
        super().__init__(ENGINE_DIED, detail)


class BadRequest(SGLangError):
    """What was asked for was not sent, since the server would break on it or answer something else."""

    is_of_request = True


class Unsupported(SGLangError):
    """An SGLang release, or an address, that cannot be driven from here."""

    def __init__(self, detail: str) -> None:
        super().__init__("engine_unsupported", detail)
