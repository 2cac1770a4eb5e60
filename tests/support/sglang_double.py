"""A small HTTP server that answers as SGLang 0.5.23 does, dangerous defaults included, and fails on demand.

    with Double(model) as double:
        client = SGLangClient(double.url)
        double.fail("/generate", "hang")            # the next call is never answered
        double.fail("/generate", "change", change=lambda answer: answer["output_ids"].pop())

What it does that people trip over, each seen on the real server or read in its source:
- a top-level key that it does not know is passed over; an unknown sampling key is a 400
- a prompt id beyond the vocabulary ends the whole server
- an abort ends every request whose id begins with it; one of a request that a pause holds back is forgotten, and
  every later one of that request too
- a request that was retracted and is aborted while it waits tells only full fifties of its tokens, unless it streams
- a request that does not quite fit the context is taken, cut short by a few tokens, and ends as "length"
- who closes the connection leaves the request running for a while
- an unknown tensor name is a 200, and the label moves; a wrong shape is a 400 that leaves half of the bucket loaded
- without a session, updates from tensors and groups are a 400; a session that is open stays open after a failure
- a flush that is refused is a 400 although the weights have changed: then /model_info tells the old label
- after "in_place" the first token is still of the old weights, and carries the new label
- joining a group whose master does not listen blocks everything but the HTTP part, for ever; a broadcast that does
  not come blocks it too, until the other side closes the group

Tokens are made one a `step_s` for every running request, from a table (`expected`), so that a test knows them.
Its state may be read and its switches set from the test's thread at any time.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import threading
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from aiohttp import web

from engine.rollout.receiving import on_a_thread
from engine.rollout.sglang.api import SamplingParams
from tests.support.sglang_rank import Rank

FaultKind = Literal["hang", "drop", "status", "change", "partial"]
_OTHER_KEYS = """
    stop stop_regex json_schema regex ebnf structural_tag stream_interval logit_bias sampling_seed custom_params
    beam_width watermark choice
"""
SAMPLING_KEYS = {*SamplingParams.__struct_fields__, *_OTHER_KEYS.split()}
TOLD_EVERY = 50  # tokens of a request that does not stream, from the scheduler to the HTTP part
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SMALL = {"layer.0.weight": ("F32", (2, 3)), "layer.1.weight": ("F32", (3,)), "head.weight": ("F32", (2,))}


@dataclass
class Fault:
    """What happens to the next `times` calls of one path.

    hang: taken, never answered. drop: taken and worked on, and the connection is closed (a stream: after its first
    part). status: not worked on, answered with `status`. change: `change` is applied to the answer. partial: half of
    an update's tensors are loaded, then a 400.
    """

    path: str
    kind: FaultKind
    times: int = 1
    status: int = 500
    text: str = "a fault on demand"
    change: Callable[[Any], None] | None = None


class Call(NamedTuple):
    http: web.Request
    body: Any
    fault: Fault | None


Handler = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Request:
    rid: str
    prompt: list[int]
    params: Mapping[str, Any]
    is_stream: bool
    ids: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of each token, as the server will tell them
    finish: dict[str, Any] | None = None
    is_dispatched: bool = False  # it has left the HTTP part
    is_waiting: bool = False  # in the queue: new, or retracted
    abort_was_sent: bool = False
    has_old_token: bool = False  # its next token was made before the weights changed
    lost: int = 0  # tokens that an abort in the queue does not tell
    retractions: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def token(prompt: Sequence[int], index: int, label: str, vocab_size: int) -> int:
    """The `index`-th token of a response under weights with this label. Never 0, which tests use as a stop id."""
    return 1 + (31 * sum(prompt) + 7 * index + zlib.crc32(label.encode())) % (vocab_size - 1)


def logprob(token_id: int) -> float:
    return -(1 + token_id % 16) / 8


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """Of each tensor in a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = {name: at for name, at in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
    spans = {name: at["data_offsets"] for name, at in header.items()}
    return {name: data[8 + size + begin : 8 + size + end] for name, (begin, end) in spans.items()}


def tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: (at["dtype"], tuple(at["shape"])) for name, at in header.items() if name != "__metadata__"}


class Double:
    """`model`: a folder with config.json and model.safetensors; without one, three small tensors and `vocab_size`.

    `groups`: by name; None: one that never met, in which every tensor arrives as something else every time.
    `requests`: (path, body) of every call, in order. `info`: more of /server_info.
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        vocab_size: int = 512,
        context_length: int = 1024,
        port: int = 0,
        version: str = "0.5.23",
        step_s: float = 0.001,
        api_key: str | None = None,
        admin_key: str | None = None,
        workers: Sequence[str] | None = None,
        is_incremental: bool = False,
        tp_size: int = 1,
        dp_size: int = 1,
    ) -> None:
        self.model, self.port, self.version, self.step_s = model, port, version, step_s
        self.vocab_size, self.context_length = vocab_size, context_length
        self.api_key, self.admin_key, self.workers = api_key, admin_key, workers
        self.is_incremental, self.tp_size, self.dp_size = is_incremental, tp_size, dp_size
        self.disconnect_s, self.abort_poll_s = 4.0, 0.05
        self.health_generates = False
        self.ignores_aborts = False
        self.model_path = str(model) if model else "/models/tiny"
        self.label = self.shown_label = "default"
        self.paused: str | None = None
        self.session_is_open = False
        self.groups: dict[str, list[Rank] | None] = {}
        self.group_timeout_s = 60.0  # of a rank; the real one waits for half an hour
        self.info: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantization": None, "pp_size": 1}
        self.is_blocked = self.has_crashed = False
        self.table: dict[tuple[int, ...], list[int]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.live: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.shapes = tensor_shapes(model / "model.safetensors") if model else dict(SMALL)
        self.contents = (
            tensor_bytes(model / "model.safetensors") if model else {name: name.encode() for name in SMALL}
        )
        self._before = "default"  # the label of the weights before these
        self._faults: list[Fault] = []
        self._pushes = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sglang double", daemon=True)

    # -- for the test, on any thread
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Double:
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the double did not start within 10 s")
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)

    def __enter__(self) -> Double:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fail(self, path: str, kind: FaultKind, **options: Any) -> Fault:
        fault = Fault(path, kind, **options)
        self._faults.append(fault)
        return fault

    def expected(self, prompt: Sequence[int], count: int, label: str | None = None) -> list[int]:
        """The first `count` tokens after `prompt`, under the weights of `label` (those held now)."""
        return [self._token(prompt, index, self.label if label is None else label) for index in range(count)]

    def calls(self, path: str) -> list[Any]:
        """The bodies of all calls of `path`."""
        return [body for called, body in self.requests if called == path]

    @property
    def checksum(self) -> str:
        hashes = self.parameters
        return _sha("".join(f"{name}:{hashes[name]};" for name in sorted(hashes)).encode())

    @property
    def parameters(self) -> dict[str, str]:
        """Hash of each parameter as the model of the server has them, some of several tensors."""
        found = {name: value for name, value in self.contents.items() if not _is_part(name)}
        for name in self.contents:
            for whole, parts in FUSED.items():
                if f".{parts[0]}." in name:
                    of = [self.contents[name.replace(parts[0], part)] for part in parts]
                    found[name.replace(parts[0], whole)] = b"".join(of)
        return {name: _sha(value)[:16] for name, value in found.items()}

    # -- its thread
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stopped, self._unblocked = asyncio.Event(), asyncio.Event()
        self._unblocked.set()
        self._going, self._pause_lock = asyncio.Condition(), asyncio.Lock()
        self._writer = asyncio.Lock()
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(self._routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        engine = asyncio.ensure_future(self._generate_all())
        self._started.set()
        await self._stopped.wait()
        engine.cancel()
        for connection in list(runner.server.connections if runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _routes(self) -> list[web.RouteDef]:
        looks: dict[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/server_info": self._server_info,
            "/model_info": self._model_info,
        }
        control: dict[str, Handler] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_distributed": self._from_distributed,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weight_version": self._set_label,
            "/weights_checker": self._check,
            "/release_memory_occupation": self._nothing,
            "/resume_memory_occupation": self._nothing,
        }
        if self.version < "0.5.21":
            del control["/begin_weight_update"], control["/end_weight_update"]
        if self.workers is not None:  # a router
            looks["/workers"], control = self._workers, {}
        routes = [web.get(path, self._taking(handler, self.api_key)) for path, handler in looks.items()]
        routes.append(web.post("/generate", self._taking(self._generate, self.api_key)))
        key = self.admin_key or self.api_key
        return [*routes, *(web.post(path, self._taking(handler, key)) for path, handler in control.items())]

    def _taking(
        self, handler: Handler, key: str | None
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """With what every call has: a key, a place in the record, and the faults that can happen to any."""

        async def take(http: web.Request) -> web.StreamResponse:
            path = http.path
            if (
                key
                and path not in ("/health", "/ready")
                and http.headers.get("Authorization") != f"Bearer {key}"
            ):
                return _json({"error": "Unauthorized"}, 401)
            text = await http.text()
            call = Call(http, json.loads(text) if text else {}, self._fault(path))
            self.requests.append((path, call.body))
            kind = call.fault.kind if call.fault else ""
            if kind == "hang":
                await self._stopped.wait()
            if kind == "status" and call.fault:
                return _json({"error": {"message": call.fault.text}}, call.fault.status)
            response = await handler(call)
            if kind == "drop":
                _cut(http)
            if kind == "change" and isinstance(response, web.Response) and call.fault and call.fault.change:
                came = json.loads(response.text or "null")
                call.fault.change(came)
                return _json(came, response.status)
            return response

        return take

    def _fault(self, path: str) -> Fault | None:
        for fault in self._faults:
            if fault.path == path and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    # -- generation
    async def _generate(self, call: Call) -> web.StreamResponse:
        http, body, fault = call
        params = body.get("sampling_params") or {}
        for key in params:
            if key not in SAMPLING_KEYS and self.workers is None:
                names = ", ".join(f"`{each}`" for each in sorted(SAMPLING_KEYS))
                return _json({"error": f"unknown field `{key}`, expected one of {names}"}, 400)
        ids, new = body.get("input_ids") or [], params.get("max_new_tokens", 128)
        if not ids:
            return _refused("input_ids cannot be empty.")
        if params.get("n", 1) > 1:
            return _json([{"meta_info": {"id": uuid.uuid4().hex}} for _ in range(params["n"])])
        rid = body.get("rid") or uuid.uuid4().hex
        if rid in self.live:
            return _refused(f"Duplicate request ID detected: {rid}")
        request = self.live[rid] = Request(rid, ids, params, bool(body.get("stream")))
        async with self._going:
            await self._going.wait_for(lambda: self.paused is None)
        async with self._writer:  # no update without a pause is going on
            if len(ids) + new > self.context_length:
                del self.live[rid]
                return _refused(
                    f"Requested token count exceeds the model's maximum of {self.context_length} tokens."
                )
            if len(ids) > self.context_length - 6:
                del self.live[rid]
                return _refused(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length.")
            if any(not 0 <= each < self.vocab_size for each in ids):
                await self._crash()
            request.is_dispatched = request.is_waiting = True
        if request.is_stream:
            return await self._streamed(call, request)
        if fault is not None and fault.kind == "drop":
            _cut(http)
        return await self._whole(call, request)

    async def _whole(self, call: Call, request: Request) -> web.StreamResponse:
        looked = time.monotonic()
        while request.finish is None:
            await _wait(request.changed, 0.05)
            if time.monotonic() - looked > self.disconnect_s:
                looked = time.monotonic()
                if call.http.transport is None or call.http.transport.is_closing():
                    self._abort_one(request.rid)
                    return web.Response()
        return _json(self._answer(request, bool(call.body.get("return_logprob"))))

    async def _streamed(self, call: Call, request: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(call.http)
        fault, told = call.fault, 0
        while True:
            await request.changed.wait()
            request.changed.clear()
            is_last = request.finish is not None
            if len(request.ids) == told and not is_last:
                continue
            part = self._answer(request, bool(call.body.get("return_logprob")))
            if self.is_incremental:
                was_cut = is_last and request.is_waiting
                part["output_ids"] = request.ids[-1:] if was_cut else request.ids[told:]
                if not was_cut:
                    part["meta_info"]["output_token_logprobs"] = part["meta_info"]["output_token_logprobs"][
                        told:
                    ]
            told = len(request.ids)
            if fault is not None and fault.kind == "change" and fault.change:
                fault.change(part)
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            if fault is not None and fault.kind == "drop":
                _cut(call.http)
            if is_last:
                await response.write(b"data: [DONE]\n\n")
                return response

    def _answer(self, request: Request, wants: bool) -> dict[str, Any]:
        ids = request.ids[: len(request.ids) - request.lost]
        entries = [[logprob(each), each, None] for each in ids]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "weight_version": request.labels[-1] if request.labels else self.shown_label,
            "num_retractions": request.retractions,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        if wants:
            meta |= {"output_token_logprobs": entries, "output_token_logprobs_length": len(entries)}
        if request.finish is not None:
            meta["weight_versions"] = _spans(request.labels[: len(ids)]) or [
                {"version": self.label, "start": 0, "end": 0}
            ]
            meta["e2e_latency"] = 0.1
        return {"text": " ".join(f"t{each}" for each in ids), "output_ids": ids, "meta_info": meta}

    async def _generate_all(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.paused is not None or self.is_blocked:
                continue
            for request in list(self.live.values()):
                if request.is_dispatched:
                    request.is_waiting = False
                    self._step(request)

    def _step(self, request: Request) -> None:
        index = len(request.ids)
        made_by = self._before if request.has_old_token else self.label
        request.has_old_token = False
        new = self._token(request.prompt, index, made_by)
        request.ids.append(new)
        request.labels.append(self.label)
        params = request.params
        if not params.get("ignore_eos") and new in (params.get("stop_token_ids") or ()):
            self._finish(request, {"type": "stop", "matched": new})
        elif len(request.ids) >= min(params.get("max_new_tokens", 128), self._room(request)):
            self._finish(request, {"type": "length", "length": len(request.ids)})
        request.changed.set()

    def _token(self, prompt: Sequence[int], index: int, label: str) -> int:
        said = self.table.get(tuple(prompt), ())
        return said[index] if index < len(said) else token(prompt, index, label, self.vocab_size)

    def _room(self, request: Request) -> int:
        return self.context_length - 2 - len(request.prompt)

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        self.live.pop(request.rid, None)
        self.finished.append(request)
        request.changed.set()

    async def _crash(self) -> None:
        """As the scheduler's death ends everything: no answer, no listener."""
        self.has_crashed = True
        self._stopped.set()
        await asyncio.Event().wait()

    # -- requests and pauses
    async def _abort(self, call: Call) -> web.StreamResponse:
        body = call.body
        if body.get("abort_all"):
            self._abort_all()
        elif body.get("rid"):
            self._abort_one(body["rid"])
        return web.Response()

    def _abort_one(self, rid: str) -> None:
        request = self.live.get(rid)
        if request is None or request.abort_was_sent:
            return
        request.abort_was_sent = True
        if self.ignores_aborts:
            return
        for each in list(self.live.values()):
            if each.is_dispatched and each.rid.startswith(rid):
                self._end_by_abort(each)

    def _abort_all(self) -> None:
        for each in list(self.live.values()):
            if each.is_dispatched:
                self._end_by_abort(each)

    def _end_by_abort(self, request: Request) -> None:
        if request.is_waiting and not request.is_stream:
            request.lost = len(request.ids) % TOLD_EVERY
        message = "Abort in waiting queue" if request.is_waiting else "Aborted"
        self._finish(request, {"type": "abort", "message": message})

    async def _pause(self, call: Call) -> web.StreamResponse:
        body = call.body
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _json(
                {"object": "error", "message": "Input should be 'abort', 'retract' or 'in_place'"}, 400
            )
        async with self._pause_lock:
            self.paused = mode
            running = [each for each in self.live.values() if each.is_dispatched]
            if mode == "retract":
                await self._unblocked.wait()
                for each in running:
                    each.retractions += not each.is_waiting
                    each.is_waiting = True
            while mode == "abort" and any(each.is_dispatched for each in self.live.values()):
                self._abort_all()
                await asyncio.sleep(self.abort_poll_s)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, call: Call) -> web.StreamResponse:
        async with self._pause_lock:  # held while weights are loaded
            self.paused = None
            async with self._going:
                self._going.notify_all()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, call: Call) -> web.StreamResponse:
        await self._unblocked.wait()
        if self._can_flush():
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    def _can_flush(self) -> bool:
        return self.paused == "retract" or not any(each.is_dispatched for each in self.live.values())

    # -- weights
    async def _begin(self, call: Call) -> web.StreamResponse:
        await self._unblocked.wait()
        if self.session_is_open:
            return _done(False, "a weight-update session is already open; call end_weight_update() first")
        self.session_is_open = True
        return _done(True, "Success")

    async def _end(self, call: Call) -> web.StreamResponse:
        await self._unblocked.wait()
        if not self.session_is_open:
            return _done(False, "no weight-update session is open; call begin_weight_update() first")
        self.session_is_open = False
        return _done(True, "Success")

    async def _init_group(self, call: Call) -> web.StreamResponse:
        body = call.body
        await self._unblocked.wait()
        self._block(True)
        while True:  # as the real one: there is no deadline
            try:
                _, writer = await asyncio.open_connection(body["master_address"], body["master_port"])
                break
            except OSError:
                await asyncio.sleep(0.02)
        writer.close()
        try:
            ranks = [
                on_a_thread(self._rank, body, body["rank_offset"] + each) for each in range(self.tp_size)
            ]
            self.groups[body["group_name"]] = list(await asyncio.gather(*ranks))
        except Exception as error:
            return _done(False, f"Failed to initialize custom process group: {error}.")
        finally:
            self._block(False)
        return _done(True, "Succeeded to initialize custom process group.")

    def _rank(self, body: Any, rank: int) -> Rank:
        return Rank(
            body["master_address"],
            body["master_port"],
            rank,
            body["world_size"],
            body["group_name"],
            self.group_timeout_s,
        )

    def _block(self, is_blocked: bool) -> None:
        """The scheduler is in a call that nothing interrupts."""
        self.is_blocked = is_blocked
        (self._unblocked.clear if is_blocked else self._unblocked.set)()

    async def _destroy_group(self, call: Call) -> web.StreamResponse:
        await self._unblocked.wait()
        name = call.body.get("group_name", "weight_update_group")
        if name not in self.groups:
            return _done(False, "The group to be destroyed does not exist.")
        for rank in self.groups.pop(name) or ():
            rank.close()
        return _done(True, "Succeeded to destroy custom process group.")

    async def _from_disk(self, call: Call) -> web.StreamResponse:
        body = call.body
        async with self._as_writer():
            file = Path(body["model_path"]) / "model.safetensors"
            if not file.is_file():
                return _done(False, f"Failed to get weights iterator: {file.parent} has no weights")
            self.contents = {name: data for name, data in tensor_bytes(file).items() if name in self.contents}
            self.model_path = body["model_path"]
            return self._loaded(body)

    async def _from_distributed(self, call: Call) -> web.StreamResponse:
        body = call.body
        if not self.session_is_open:
            return _done(
                False, "update_weights_from_distributed must run between begin_weight_update() and end"
            )
        group = body.get("group_name", "weight_update_group")
        if group not in self.groups:
            return _done(False, f"Failed to receive weights: no group {group}")
        async with self._as_writer():
            try:
                came = await self._received(body, self.groups[group] or ())
            except Exception as error:
                return _done(False, f"Failed to receive weights: {error}")
            return self._load(call, body["names"], body["shapes"], came)

    async def _received(self, body: Any, ranks: Sequence[Rank]) -> dict[str, bytes]:
        """What rank 0 broadcasts. Nothing else is heard meanwhile."""
        sizes = [
            ITEM_BYTES[dtype] * math.prod(shape)
            for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
        ]
        if not ranks:
            push = next(self._pushes)
            return {name: f"{name} of push {push}".encode() for name in body["names"]}
        self._block(True)
        try:
            whole, *_ = await asyncio.gather(*(on_a_thread(each.receive, sum(sizes)) for each in ranks))
        finally:
            self._block(False)
        ends = list(itertools.accumulate(sizes))
        return {
            name: whole[end - size : end] for name, end, size in zip(body["names"], ends, sizes, strict=True)
        }

    async def _from_tensor(self, call: Call) -> web.StreamResponse:
        if not self.session_is_open:
            return _done(False, "update_weights_from_tensor must run between begin_weight_update() and end")
        async with self._as_writer():
            push = next(self._pushes)
            came = {name: f"{name} of push {push}".encode() for name in self.contents}
            return self._load(call, list(came), [shape for _, shape in self.shapes.values()], came)

    def _load(
        self, call: Call, names: Sequence[str], shapes: Sequence[Sequence[int]], came: Mapping[str, bytes]
    ) -> web.StreamResponse:
        is_half = call.fault is not None and call.fault.kind == "partial"
        for at, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            if is_half and at >= (len(names) + 1) // 2:
                return _done(False, "Failed to update parameter online: a fault on demand.")
            if name not in self.contents:
                continue  # as the real one
            if tuple(shape) != self.shapes[name][1]:
                return _done(False, f"Failed to update parameter online: the shape of {name} is {shape}.")
            self.contents[name] = came[name]
        if is_half:
            return _done(False, "Failed to update parameter online: a fault on demand.")
        return self._loaded(call.body)

    def _loaded(self, body: Any) -> web.StreamResponse:
        label = body.get("weight_version")
        if label is not None:
            self._before, self.label = self.label, label
            for each in self.live.values():
                each.has_old_token = self.paused == "in_place" and bool(each.ids)
        if body.get("flush_cache", True) and not self._can_flush():
            return _done(
                False, "Weights were updated, but the cache was not flushed because requests are running."
            )
        if label is not None:
            self.shown_label = label
        return _done(True, "Succeeded to update model weights.")

    def _as_writer(self) -> _Writer:
        return _Writer(self)

    async def _set_label(self, call: Call) -> web.StreamResponse:
        body = call.body
        if body.get("abort_all_requests", True):
            self._abort_all()
        self.label = self.shown_label = body["new_version"]
        return _json({"success": True, "message": "", "new_version": self.label})

    async def _check(self, call: Call) -> web.StreamResponse:
        await self._unblocked.wait()
        ranks = [{"checksums": self.parameters} for _ in range(self.tp_size)]
        return _json({"success": True, "message": "", "ranks": ranks, "per_engine_checksum": self.checksum})

    async def _nothing(self, call: Call) -> web.StreamResponse:
        return _json(None)

    # -- looks
    async def _health(self, call: Call) -> web.StreamResponse:
        return web.Response(status=503 if self.health_generates and self.paused else 200)

    async def _ready(self, call: Call) -> web.StreamResponse:
        return web.Response(status=503 if self.paused else 200)

    async def _server_info(self, call: Call) -> web.StreamResponse:
        await self._unblocked.wait()
        info = {
            "version": self.version,
            "model_path": self.model_path,
            "tp_size": self.tp_size,
            "dp_size": self.dp_size,
            "context_length": self.context_length,
            "max_total_num_tokens": 16384,
            "incremental_streaming_output": self.is_incremental,
            "status": "ready",
            "weight_version": "default",
            **self.info,
        }
        return _json(info)

    async def _model_info(self, call: Call) -> web.StreamResponse:
        return _json(
            {"model_path": self.model_path, "is_generation": True, "weight_version": self.shown_label}
        )

    async def _workers(self, call: Call) -> web.StreamResponse:
        workers = [
            {"id": str(at), "url": url, "is_healthy": True} for at, url in enumerate(self.workers or ())
        ]
        return _json({"workers": workers, "total": len(workers)})


class _Writer:
    """Weights are loaded at once while the server is paused; else after every request that runs has ended."""

    def __init__(self, double: Double) -> None:
        self._double = double
        self._lock: asyncio.Lock | None = None

    async def __aenter__(self) -> None:
        double = self._double
        await double._unblocked.wait()
        self._lock = double._pause_lock if double.paused else double._writer
        await self._lock.acquire()
        while not double.paused and any(each.is_dispatched for each in double.live.values()):
            await asyncio.sleep(0.005)

    async def __aexit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
    event.clear()


def _spans(labels: Sequence[str]) -> list[dict[str, Any]]:
    spans, at = [], 0
    for label, group in itertools.groupby(labels):
        count = len(list(group))
        spans.append({"version": label, "start": at, "end": at + count})
        at += count
    return spans


def _cut(http: web.Request) -> None:
    if http.transport is not None:
        http.transport.abort()


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(body), status=status, content_type="application/json")


def _done(success: bool, message: str) -> web.Response:
    return _json({"success": success, "message": message}, 200 if success else 400)


def _refused(message: str) -> web.Response:
    return _json({"error": {"message": message}}, 400)


def _is_part(name: str) -> bool:
    return any(f".{part}." in name for parts in FUSED.values() for part in parts)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
