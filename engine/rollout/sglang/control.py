"""The control calls of one SGLang server: what it is, pauses, weights, memory.

They are for a worker itself. A router knows none of them and would hand none on, so an address that answers
/workers is refused for them; only aborts are sent, to every worker behind it. Keys: a server that has an admin key
takes that one alone for these calls, and the plain key for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import msgspec

from engine.rollout.loading import PauseMode
from engine.rollout.sglang.api import ServerInfo, read_server_info
from engine.rollout.sglang.errors import BadAnswer, Refused, SGLangError, Unreachable, Unsupported
from engine.rollout.sglang.wire import Wire

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]

_ABORT_S = 2.0  # one abort call
_PROBE_S = 5.0  # is it there, is it ready, is it a router


class Checksums(NamedTuple):
    whole: str
    parameters: dict[str, str]  # name in the server's model → hash; {}: not told, or of several ranks


class Control:
    """Base of SGLangClient: every call bounded, every failure an SGLangError."""

    def __init__(self, wire: Wire, *, vocab_size: int | None, control_timeout: timedelta) -> None:
        self._wire = wire
        self._vocab_size = vocab_size
        self._control_s = control_timeout.total_seconds()
        self._info: ServerInfo | None = None
        self._is_router: bool | None = None
        self._behind: dict[str, Wire] = {}  # of a router: its workers, by URL

    @property
    def url(self) -> str:
        return self._wire.url

    # -- what it is
    async def server_info(self) -> ServerInfo:
        """Asked anew each time; the sizes in it bound what generate() sends. Of a router: its first worker's.

        Raises Unsupported for a release that is too old, whichever worker it is of.
        """
        wires = await self._worker_wires()
        infos = [
            read_server_info(await wire.ask("GET", "/server_info", seconds=_PROBE_S), self._vocab_size)
            for wire in wires
        ]
        if not infos:
            raise Unreachable(f"{self.url} is a router without workers", was_sent=False)
        self._info = info = infos[0]
        self._vocab_size = info.vocab_size  # of the model it began with: an update changes weights, not sizes
        return info

    async def label(self) -> str:
        """The `weight_version` that the server carries now; what responses say may be ahead of it."""
        body = await self._wire.ask("GET", "/model_info", seconds=_PROBE_S)
        return _text_at(body, "weight_version", "model_info")

    async def is_alive(self) -> bool:
        """Whether the server runs at all, paused or not.

        A server started with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 answers at once. Another one generates a
        token each time, and counts as dead while it is paused.
        """
        return await self._is_ok("/health")

    async def is_ready(self) -> bool:
        """Whether it takes requests now: False while it starts, is paused, or is unwell."""
        return await self._is_ok("/ready") or (self._is_router is True and await self._is_ok("/readiness"))

    async def workers(self) -> list[str] | None:
        """URLs of the workers behind a router; None when the address is a server's own."""
        try:
            body = await self._wire.ask("GET", "/workers", seconds=_PROBE_S)
        except Refused:
            return None
        try:
            came = msgspec.json.decode(body)
            return [str(each["url"]) for each in came["workers"]]
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise BadAnswer("bad_answer", "workers", f"{type(error).__name__}: {body[:200]!r}") from None

    # -- requests
    async def abort(self, rid: str) -> None:
        """End the requests whose ids begin with `rid`. Without effect on one that a pause holds back.

        Behind a router it goes to every worker: none is harmed by an id that it does not know.
        """
        body = msgspec.json.encode({"rid": rid})
        answers = await asyncio.gather(
            *(
                wire.ask("POST", "/abort_request", body, seconds=_ABORT_S, is_control=True)
                for wire in await self._worker_wires()
            ),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def abort_all(self) -> None:
        """End every request on the server, whoever sent it."""
        await self._control("/abort_request", {"abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. "abort" returns when no request is left, which takes about a second."""
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on. Harmless on a server that is not paused; waits while a weight update runs."""
        await self._control("/continue_generation", {})

    async def flush_cache(self, timeout: timedelta = timedelta(0)) -> None:
        """Drop all cached prefixes; `timeout`: how long requests that hold some are waited for. Else Refused."""
        seconds = timeout.total_seconds()
        await self._control(f"/flush_cache?timeout={seconds:g}", {}, seconds=seconds + self._control_s)

    # -- weights
    async def begin_update(self) -> None:
        """Open the session that updates from tensors and groups need. Refused while another is open."""
        await self._update("/begin_weight_update", {}, None)

    async def end_update(self, *, deadline: timedelta | None = None) -> None:
        """Close it: after the last bucket, and after any failure. Refused when none is open."""
        await self._update("/end_weight_update", {}, deadline)

    async def update_from_disk(
        self, path: str, label: str, *, flush: bool, deadline: timedelta | None = None
    ) -> None:
        """Read a model folder that the server can see. A folder that it cannot read leaves the weights as they were."""
        body = {"model_path": path, "load_format": "auto", "weight_version": label, "flush_cache": flush}
        await self._update("/update_weights_from_disk", body, deadline)

    async def init_group(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group: str,
        backend: str,
        *,
        deadline: timedelta | None = None,
    ) -> None:
        """Join a process group; returns when all ranks have. The master must listen already: without one, the
        server's scheduler blocks, and no deadline here frees it."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body, deadline)

    async def destroy_group(self, group: str, *, deadline: timedelta | None = None) -> None:
        """Refused when there is no such group."""
        await self._update("/destroy_weights_update_group", {"group_name": group}, deadline)

    async def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        *,
        label: str | None,
        flush: bool,
        deadline: timedelta | None = None,
    ) -> None:
        """Take one bucket, which rank 0 broadcasts as one flat tensor of bytes. `label` with the last bucket only.

        A name that the model lacks is passed over with a 200, so success means nothing until checksums agree.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(each) for each in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
        }
        await self._update(
            "/update_weights_from_distributed", body | ({"weight_version": label} if label else {}), deadline
        )

    async def update_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        label: str | None,
        flush: bool,
        load_format: str | None = None,
        deadline: timedelta | None = None,
    ) -> None:
        """Take tensors of a process on the server's own host; `serialized`: base64, one for each of its ranks."""
        body: dict[str, Any] = {"serialized_named_tensors": list(serialized), "flush_cache": flush}
        body |= {"load_format": load_format} if load_format else {}
        await self._update(
            "/update_weights_from_tensor", body | ({"weight_version": label} if label else {}), deadline
        )

    async def checksum(self, *, deadline: timedelta | None = None) -> str:
        """Of the weights that the server holds; equal on servers with equal weights, layout and release."""
        return (await self.checksums(deadline=deadline)).whole

    async def checksums(self, *, deadline: timedelta | None = None) -> Checksums:
        """The same, and of each parameter."""
        body = await self._update("/weights_checker", {"action": "checksum"}, deadline)
        whole = _text_at(body, "per_engine_checksum", "weights_checker")
        return Checksums(whole, _parameters(body))

    # -- memory
    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give device memory back. The server must be idle, or paused with "retract": it dies on one that is not."""
        await self._control("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take it again. Weights and cache hold garbage until they are sent, and flushed, anew."""
        await self._control("/resume_memory_occupation", {"tags": list(tags)})

    # -- calls
    async def _control(self, path: str, body: dict[str, Any], *, seconds: float | None = None) -> bytes:
        await self._require_worker()
        seconds = self._control_s if seconds is None else seconds
        return await self._wire.ask("POST", path, msgspec.json.encode(body), seconds=seconds, is_control=True)

    async def _update(self, path: str, body: dict[str, Any], deadline: timedelta | None) -> bytes:
        seconds = self._control_s if deadline is None else deadline.total_seconds()
        answer = await self._control(path, body, seconds=seconds)
        try:
            success = msgspec.json.decode(answer)["success"]
        except (msgspec.DecodeError, LookupError, TypeError):
            raise BadAnswer("bad_answer", f"{path[1:]}.success", f"not told: {answer[:200]!r}") from None
        if success is not True:
            raise Refused(f"POST {path} of {self.url}", 200, answer.decode("utf-8", "replace"))
        return answer

    async def _require_worker(self) -> None:
        if await self._has_workers():
            raise Unsupported(
                f"{self.url} is a router, as it answers /workers: pauses and weights go to each worker itself, never "
                f"through it. Give each rollout daemon the URL of a worker of its own (it has "
                f"{', '.join(await self.workers() or ()) or 'none'})"
            )

    async def _has_workers(self) -> bool:
        if self._is_router is None:
            self._is_router = await self.workers() is not None
        return self._is_router

    async def _worker_wires(self) -> list[Wire]:
        """To every server behind this address: itself, unless it is a router."""
        if not await self._has_workers():
            return [self._wire]
        urls = await self.workers() or []
        for url in urls:
            if url not in self._behind:
                self._behind[url] = self._wire.to(url)
        return [self._behind[url] for url in urls]

    async def _close_wires(self) -> None:
        for wire in (self._wire, *self._behind.values()):
            await wire.close()

    async def _is_ok(self, path: str) -> bool:
        try:
            await self._wire.ask("GET", path, seconds=_PROBE_S)
        except SGLangError:
            return False
        return True


def _parameters(body: bytes) -> dict[str, str]:
    ranks = msgspec.json.decode(body).get("ranks")
    try:
        (rank,) = ranks
        return {str(name): str(value) for name, value in rank["checksums"].items()}
    except (TypeError, ValueError, LookupError, AttributeError):
        return {}


def _text_at(body: bytes, key: str, what: str) -> str:
    try:
        value = msgspec.json.decode(body)[key]
    except (msgspec.DecodeError, LookupError, TypeError):
        value = None
    if not isinstance(value, str):
        raise BadAnswer("bad_answer", f"{what}.{key}", f"needed a text, got {value!r}")
    return value
