"""Trainers of several ranks for tests: made once for each number of ranks, and put back to their beginning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.trainer.parts import PartSettings
from engine.trainer.ranked_backend import RankedBackend
from engine.trainer.torch_settings import TorchSettings

SETTINGS: dict[str, Any] = {"lr": 0.01, "threads": 1, "micro_batch_tokens": 24, "loss": "tis"}


class Made(NamedTuple):
    key: tuple[Any, ...]
    backend: RankedBackend
    start: Path  # a checkpoint of its beginning


class Worlds:
    """`of(n, folder, …)`: a fresh trainer of n ranks. One at a time: torch's default group is one of the process's."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._made, self._count = scratch, None, 0
        self.gave_up: list[str] = []  # what would have ended this process

    def of(
        self,
        n_ranks: int,
        folder: Path,
        *,
        options: dict[str, Any] | None = None,
        bucket_bytes: int = 2000,
        **settings: Any,
    ) -> RankedBackend:
        key = (n_ranks, folder, repr(options), bucket_bytes, repr(settings))
        made: Made | None = self._made
        if made is None or made.key != key:
            self.close()
            torch_settings = TorchSettings(**(SETTINGS | settings))
            part = PartSettings(
                backend="fsdp2",
                model=str(folder),
                torch=torch_settings,
                options=options or {},
                bucket_bytes=bucket_bytes,
            )
            backend = RankedBackend(part, n_ranks, last_resort=self.gave_up.append)
            self._count += 1
            made = self._made = Made(key, backend, self._scratch / f"start-{self._count}")
            made.start.mkdir()
            backend.snapshot()(made.start)
            return backend
        made.backend.load(made.start)
        return made.backend

    def close(self) -> None:
        if self._made is not None:
            self._made.backend.close()
        self._made = None


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """A backend settles switches of torch for its process; they are given back."""
    threads, rng = torch.get_num_threads(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(rng)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
