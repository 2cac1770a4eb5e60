"""Reading one published version: whole and verified, or an EngineError that says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from engine.interfaces import EngineError, WeightsId
from streams.events import WeightsPublished

# After these the engine serves nobody any more: no fault of a request, and never a RolloutFailed.
ENGINE_CLOSED, ENGINE_DIED = "engine_closed", "engine_died"
FATAL = frozenset({ENGINE_CLOSED, ENGINE_DIED})

NO_WEIGHTS = "no_weights"
WEIGHTS_UNREADABLE, WEIGHTS_MISMATCH = "weights_unreadable", "weights_mismatch"

PauseMode = Literal["retract", "in_place", "abort"]
Locate = Callable[[WeightsPublished], Path]


def weights_id(published: WeightsPublished) -> WeightsId:
    return WeightsId(published.epoch, published.version, published.digest)


def on_disk(run_dir: Path) -> Locate:
    """Where a version lies that was published with the `disk` transport (a path, relative to the run directory)."""

    def locate(published: WeightsPublished) -> Path:
        uri = published.uris.get("disk", "")
        if not uri:
            offered = ", ".join(published.uris) or "none"
            raise EngineError(
                WEIGHTS_UNREADABLE, f"version {published.version} has no disk URI, only {offered}"
            )
        return run_dir / uri.removeprefix("file://")

    return locate


def load_verified(
    published: WeightsPublished, path: Path, framework: Literal["numpy", "torch"]
) -> dict[str, Any]:
    """A copy of a version's tensors whose digest equals the one that the trainer published.

    The guarantee "an engine never takes weights that are not the published ones" lives here. Tied names share
    memory. Raises EngineError("weights_unreadable") or EngineError("weights_mismatch").
    """
    from engine.weights import store

    if published.kind != "full":
        raise EngineError(
            WEIGHTS_UNREADABLE,
            f"version {published.version} is of kind {published.kind!r}; this engine takes full versions only",
        )
    try:
        mapped = store.read(path, framework)
        copies: dict[int, Any] = {}  # the file is mapped: what is digested must be what is kept
        for tensor in mapped.values():
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone() if framework == "torch" else tensor.copy()
        tensors = {name: copies[id(tensor)] for name, tensor in mapped.items()}
        digest = store.digest(tensors)
    except Exception as error:  # missing, torn, not permitted, …: any of them means it cannot be used
        raise EngineError(WEIGHTS_UNREADABLE, f"version {published.version}: {error}") from error
    if digest != published.digest:
        raise EngineError(
            WEIGHTS_MISMATCH,
            f"{path.name} has digest {digest[:16]}, version {published.version} was published as "
            f"{published.digest[:16]}",
        )
    return tensors
