"""Reading one published version: whole and verified, or an EngineError that says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine.interfaces import EngineError, WeightsId
from streams.events import TransferGroupFormed, WeightsPublished

if TYPE_CHECKING:
    from engine.weights.lora import Base

# After these the engine serves nobody any more: no fault of a request, and never a RolloutFailed.
ENGINE_CLOSED, ENGINE_DIED = "engine_closed", "engine_died"
FATAL = frozenset({ENGINE_CLOSED, ENGINE_DIED})

QUARANTINED = (
    "quarantined"  # by the trainer: the engine ends, and its daemon's next incarnation is trusted anew
)

NO_WEIGHTS = "no_weights"
WEIGHTS_UNREADABLE, WEIGHTS_MISMATCH = "weights_unreadable", "weights_mismatch"
TRANSFER_FAILED = "transfer_failed"

PauseMode = Literal["retract", "in_place", "abort"]
Locate = Callable[[WeightsPublished], Path]


def weights_id(published: WeightsPublished) -> WeightsId:
    return WeightsId(published.epoch, published.version, published.digest)


class DiskOnly:
    """The part of an engine (engine/interfaces.py) that takes versions from files alone."""

    name: str
    n_ranks = 0

    async def join_group(self, formed: TransferGroupFormed, first_rank: int) -> None:
        raise self._is_no_member()

    async def leave_group(self, group: str) -> None:
        pass

    async def receive(self, published: WeightsPublished, group: str, bucket_bytes: int) -> float:
        raise self._is_no_member()

    def checksum(self) -> str:
        return ""

    def _is_no_member(self) -> EngineError:
        return EngineError(
            TRANSFER_FAILED, f"{self.name} is no member of transfer groups; it takes versions from disk"
        )


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


class _Held(NamedTuple):
    digest: str
    tensors: dict[str, Any]


class Loader:
    """Reads versions for one engine, each whole and verified.

        loader = Loader("torch")
        tensors = loader.load(published, path)  # a full file, or a delta with the files of its chain beside it

    The guarantee "an engine never takes weights that are not the published ones" lives here. Once deltas come, the
    tensors of the last version stay here too, so that a delta on them reads nothing else; an engine that serves these
    very tensors pays no memory for it.
    """

    def __init__(self, framework: Literal["numpy", "torch"], base: Base | None = None) -> None:
        """`base`: what adapters (versions of kind "lora") are merged into; None: they are refused."""
        self._framework: Literal["numpy", "torch"] = framework
        self._base = base
        self._held: _Held | None = None  # the last version

    def load(self, published: WeightsPublished, path: Path) -> dict[str, Any]:
        """A version's tensors in memory of their own, whose digest equals the one that the trainer published.

        Tied names share memory. They must not be changed in place: the next delta builds on them. Raises
        EngineError("weights_unreadable") or EngineError("weights_mismatch").
        """
        if published.kind not in ("full", "delta", "lora"):
            detail = f"version {published.version} is of the unknown kind {published.kind!r}"
            raise EngineError(WEIGHTS_UNREADABLE, detail)
        held = self._held
        tensors, digest = self._read(published, path, held)
        if digest != published.digest and held is not None:  # what is held was changed in place, perhaps
            self._held = None
            tensors, digest = self._read(published, path, None)
        if digest != published.digest:
            raise EngineError(
                WEIGHTS_MISMATCH,
                f"{path.name} has digest {digest[:16]}, version {published.version} was published as "
                f"{published.digest[:16]}",
            )
        if held is not None or published.kind == "delta":
            self._held = _Held(digest, tensors)
        return self.whole(published, tensors)

    def whole(self, published: WeightsPublished, tensors: dict[str, Any]) -> dict[str, Any]:
        """The model's weights: of an adapter, merged into its base. Raises EngineError("weights_unreadable")."""
        if published.kind != "lora":
            return tensors
        from engine.weights.tensors import WeightsError

        try:
            if self._base is None:
                raise WeightsError(
                    f"version {published.version} is an adapter, which this engine cannot take"
                )
            return self._base.merged(published, tensors)
        except WeightsError as error:
            raise EngineError(WEIGHTS_UNREADABLE, str(error)) from error

    def took(self, published: WeightsPublished, tensors: dict[str, Any]) -> None:
        """The engine took this version by another way; the next delta builds on it."""
        if self._held is not None:
            self._held = _Held(published.digest, tensors)

    def _read(
        self, published: WeightsPublished, path: Path, held: _Held | None
    ) -> tuple[dict[str, Any], str]:
        from engine.weights import chain, store

        try:
            tensors = chain.load(
                path,
                self._framework,
                held=held.tensors if held is not None else None,
                digest=held.digest if held is not None else "",
            )
            return tensors, store.digest(tensors)
        except Exception as error:  # missing, torn, not permitted, …: any of them means it cannot be used
            raise EngineError(WEIGHTS_UNREADABLE, f"version {published.version}: {error}") from error
