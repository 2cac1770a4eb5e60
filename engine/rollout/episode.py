"""The tokens of one sample: what the policy said, what the environment answered, and which weights made each token.

    prompt ─► policy turn ─► environment turn ─► policy turn ─► …
    mask        1 1 1            0 0               1 1
    log-prob    from the engine  0 0               from the engine
    version     its own runs     of the run before its own runs

Token in, token out: ids come from the engine and are never re-tokenized. A caller that renders the history as text
again gets other ids sooner or later; `check_prefix` finds the place, and `continue_with` refuses or splits there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from engine.interfaces import Completion
from streams.columns import VersionRun
from streams.errors import InvalidEvent
from streams.events import TaskDispatched
from streams.trajectory import SampleData

OnMismatch = Literal["refuse", "split"]

POLICY, ENVIRONMENT = "policy", "environment"


class PrefixMismatch(InvalidEvent):
    """The next prompt does not start with the tokens of the episode so far. `at` is the first place that differs."""

    def __init__(self, at: int, expected: Sequence[int], got: Sequence[int], uid: str = "") -> None:
        super().__init__(
            "prefix_mismatch",
            f"prefix_mismatch at {at}: the episode holds {list(expected[at : at + 4])}, the next prompt "
            f"{list(got[at : at + 4])}; pass token ids on, never text that is tokenized again",
            uid=uid,
        )
        self.at = at


class Episode:
    """Keeps ids, log-probs, mask, version runs and turns of one sample aligned.

    >>> import numpy as np
    >>> episode = Episode([1, 2, 3])
    >>> episode.append_policy(Completion(np.array([7]), np.array([-0.5], np.float32), [(0, 4, 1)], "stop"))
    >>> episode.append_environment([8, 9])
    >>> episode.ids, episode.logprobs, episode.mask, episode.versions
    ([7, 8, 9], [-0.5, 0.0, 0.0], [1, 0, 0], [(0, 4, 3)])
    >>> episode.context
    [1, 2, 3, 7, 8, 9]
    """

    __slots__ = ("_context", "_n_prompt", "logprobs", "mask", "n_policy_tokens", "parts", "turns", "versions")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._context: list[int] = list(prompt_ids)
        self._n_prompt = len(self._context)
        self.logprobs: list[float] = []  # [L]
        self.mask: list[int] = []  # [L], 1 on tokens that the policy sampled
        self.versions: list[VersionRun] = []  # over L
        self.turns: list[tuple[int, int, str]] = []  # (start, end, who) over L
        self.n_policy_tokens = 0
        self.parts: list[Episode] = []  # earlier parts, closed by a split

    @property
    def prompt_ids(self) -> list[int]:
        return self._context[: self._n_prompt]

    @property
    def ids(self) -> list[int]:
        """Response ids, [L]."""
        return self._context[self._n_prompt :]

    @property
    def context(self) -> list[int]:
        """Prompt and response: what the next engine call continues. Not a copy: do not change it."""
        return self._context

    def __len__(self) -> int:
        """L, the number of response tokens."""
        return len(self._context) - self._n_prompt

    def append_policy(self, completion: Completion) -> None:
        """One engine call's tokens. Lengths that disagree are kept as they came: `pack` refuses them by name."""
        ids = completion.ids.tolist()
        start = len(self)
        self._context += ids
        self.logprobs += completion.logprobs.tolist()
        self.mask += [1] * len(ids)
        self.n_policy_tokens += len(ids)
        for run in completion.versions:
            self._append_run(run)
        self._append_turn(start, POLICY)

    def append_environment(self, ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample. Before its first token they belong to the prompt."""
        if not ids:
            return
        start = len(self)
        self._context += ids
        if not self.versions:
            self._n_prompt = len(self._context)
            return
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        epoch, version, n_tokens = self.versions[-1]
        self.versions[-1] = (epoch, version, n_tokens + len(ids))
        self._append_turn(start, ENVIRONMENT)

    def _append_run(self, run: VersionRun) -> None:
        last = self.versions[-1] if self.versions else None
        if last is not None and last[0] == run[0] and last[1] == run[1]:
            self.versions[-1] = (run[0], run[1], last[2] + run[2])
        else:
            self.versions.append((run[0], run[1], run[2]))

    def _append_turn(self, start: int, who: str) -> None:
        end = len(self)
        if end > start:
            self.turns.append((start, end, who))

    # -- prompts that somebody else renders
    def check_prefix(self, next_prompt_ids: Sequence[int]) -> int | None:
        """None when the next prompt starts with prompt + response so far, else the first index that differs."""
        context = self._context
        if list(next_prompt_ids[: len(context)]) == context:
            return None
        for at, (held, given) in enumerate(zip(context, next_prompt_ids, strict=False)):
            if held != given:
                return at
        return min(len(context), len(next_prompt_ids))

    def continue_with(self, next_prompt_ids: Sequence[int], *, on_mismatch: OnMismatch = "refuse") -> None:
        """Take the next turn's whole prompt: what goes beyond the episode so far is the environment's.

        A prompt that does not continue it raises PrefixMismatch ("refuse"), or ("split") closes the tokens so far
        as an element of `parts` and goes on with that prompt as the prompt of a new part: then no log-prob ever
        belongs to another token, and the part that is published is conditioned on exactly what the policy saw.
        """
        at = self.check_prefix(next_prompt_ids)
        if at is None:
            self.append_environment(list(next_prompt_ids[len(self._context) :]))
            return
        if on_mismatch == "refuse":
            raise PrefixMismatch(at, self._context, next_prompt_ids)
        closed = Episode(self.prompt_ids)
        closed._context = self._context
        closed.logprobs, closed.mask, closed.versions = self.logprobs, self.mask, self.versions
        closed.turns, closed.n_policy_tokens = self.turns, self.n_policy_tokens
        parts = [*self.parts, closed]
        self.__init__(next_prompt_ids)
        self.parts = parts

    def to_sample_data(
        self,
        task: TaskDispatched,
        index: int,
        *,
        task_offset: int,
        finish_reason: str,
        response: str = "",
        temperature: float = 1.0,
        engine: str = "",
        started_ms: int = 0,
        finished_ms: int = 0,
        metadata: dict[str, Any] | None = None,
    ) -> SampleData:
        """The sample as the worker publishes it. `metadata` is added to the task's own."""
        extra = dict(metadata or {})
        if self.parts:
            extra["prefix_splits"] = len(self.parts)
        return SampleData(
            uid=f"{task.group_id}/{index}/{task.attempt}",
            group_id=task.group_id,
            seq=task.seq,
            index=index,
            attempt=task.attempt,
            n_samples=task.n_samples,
            task_offset=task_offset,
            prompt_ids=np.array(self.prompt_ids, np.int64),
            response_ids=np.array(self.ids, np.int64),
            logprobs=np.array(self.logprobs, np.float32),
            loss_mask=np.array(self.mask, bool),
            versions=self.versions,
            finish_reason=finish_reason,
            response=response,
            prompt=task.prompt,
            label=task.label,
            metadata={**task.metadata, **extra} if extra else task.metadata,
            turns=self.turns,
            temperature=temperature,
            engine=engine,
            started_ms=started_ms,
            finished_ms=finished_ms,
        )
