"""The SGLang engine of one daemon, as the run's configuration says."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from pathlib import Path

from engine.config import secret
from engine.rollout.loading import on_disk
from engine.rollout.sglang.engine import SGLangEngine
from engine.rollout.sglang.guard import ORIGINAL_LOGPROB, tensor_ranks
from engine.rollout.sglang.server import Server
from engine.settings import Config

_DEVICE = re.compile(r"([a-z]+)(?::(\d+))?")


def sglang_engine(config: Config, *, name: str, replica: int) -> SGLangEngine:
    """Starts the server, unless one is given by URL, and does not wait for it."""
    rollout, settings = config.rollout, config.rollout.sglang
    run_dir, model = Path(config.run.dir), Path(config.model.path)
    server = None if settings.url else _server(config, model, run_dir, replica)
    keys = {
        key: None if value is None else secret(value, f"rollout.sglang.{key}")
        for key, value in (("api_key", settings.api_key), ("admin_api_key", settings.admin_api_key))
    }
    try:
        return SGLangEngine(
            model,
            server=server,
            url=settings.url.replace("{replica}", str(replica)),
            folder=run_dir / "weights" / "served" / name,
            name=name,
            device=config.model.device,
            n_ranks=1 if settings.url else tensor_ranks(settings.args),
            locate=on_disk(run_dir),
            pause_mode=rollout.pause_generation_mode,
            api_key=keys["api_key"],
            admin_key=keys["admin_api_key"],
            start_timeout=timedelta(seconds=settings.start_timeout_s),
            request_timeout=timedelta(seconds=settings.request_timeout_s),
            generate_timeout=timedelta(seconds=2 * rollout.task_deadline_s),  # the worker's own comes first
        )
    except BaseException:
        if server is not None:
            server.kill()
        raise


def _server(config: Config, model: Path, run_dir: Path, replica: int) -> Server:
    settings = config.rollout.sglang
    found = _DEVICE.fullmatch(config.model.device)
    device, index = (found[1], found[2]) if found else (config.model.device, None)
    args = ["--dtype", config.model.dtype]
    if index is not None:
        args += ["--base-gpu-id", index]
    return Server(
        model,
        python=settings.python or sys.executable,
        log_file=run_dir / "logs" / f"sglang-{replica}.log",
        device=device,
        port=settings.port + replica if settings.port else 0,
        args=(*args, *settings.args),
        env={ORIGINAL_LOGPROB: "0", **settings.env},
    )
