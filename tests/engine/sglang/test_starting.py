"""From the configuration to an engine with its server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from engine import roles
from engine.config import Config, build_config
from engine.rollout.sglang.engine import SGLangEngine
from engine.rollout.sglang.starting import sglang_engine
from streams.errors import ConfigError
from tests.support.sglang import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model-0", 0)


def config_of(tmp_path: Path, model: Path, sglang: dict[str, Any], **model_settings: Any) -> Config:
    table = {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "model": {"path": str(model), **model_settings},
        "rollout": {"backend": "sglang", "replicas": 2, "sglang": sglang},
        "reward": {"function": "exact"},
    }
    return build_config(table)


def asleep(tmp_path: Path) -> str:
    """An "interpreter" that never serves anything."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    return str(script)


def closed(engine: SGLangEngine) -> None:
    asyncio.run(asyncio.wait_for(engine.close(), 20))


def test_each_daemon_joins_the_server_of_its_number(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, {"url": "http://node-{replica}:30000", "api_key": "env:KEY"})
    os.environ["KEY"] = "hush"
    try:
        engine = roles._engine(config, 1)
    finally:
        del os.environ["KEY"]
    assert isinstance(engine, SGLangEngine)
    assert (engine.name, engine._client.url, engine.pause_mode) == (
        "rollout-1",
        "http://node-1:30000",
        "retract",
    )
    assert engine.held is None
    closed(engine)


def test_each_daemon_starts_a_server_with_the_models_type_and_device(tmp_path: Path, model: Path) -> None:
    settings = {"python": asleep(tmp_path), "port": 31000, "args": ["--max-running-requests", "8"]}
    config = config_of(tmp_path, model, settings, dtype="bfloat16", device="cuda:3")
    engine = sglang_engine(config, name="rollout-1", replica=1)
    server = engine._server
    assert server is not None and server.exited is None
    command = " ".join(server.command)
    assert f"--model-path {model} --host 127.0.0.1 --port 31001" in command
    assert command.endswith("--dtype bfloat16 --base-gpu-id 3 --max-running-requests 8")
    assert server.log_file == tmp_path / "run" / "logs" / "sglang-1.log"
    assert (engine.device, engine.n_ranks) == ("cuda", 1)  # of ranks in a group
    closed(engine)
    assert server.exited is not None, "it ends with its engine"


def test_an_interpreter_that_cannot_be_run_is_refused_with_the_fix(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, {"python": str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python: .*nothing cannot be run"):
        sglang_engine(config, name="rollout-0", replica=0)


def test_a_model_that_cannot_be_used_leaves_no_server_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.rollout.sglang import starting

    (tmp_path / "empty").mkdir()
    started = []
    real = starting._server
    monkeypatch.setattr(starting, "_server", lambda *given: started.append(real(*given)) or started[-1])
    config = config_of(tmp_path, tmp_path / "empty", {"python": asleep(tmp_path)})
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        sglang_engine(config, name="rollout-0", replica=0)
    assert started[0].exited is not None


def test_the_ranks_of_a_server_that_the_daemon_starts_are_known_before_it_is_ready(
    tmp_path: Path, model: Path
) -> None:
    settings = {"python": asleep(tmp_path), "args": ["--tp-size", "4"]}
    engine = sglang_engine(config_of(tmp_path, model, settings, device="cuda"), name="rollout-0", replica=0)
    try:
        assert engine.n_ranks == 4
    finally:
        closed(engine)


def test_broadcasts_to_servers_with_pipeline_stages_are_refused(tmp_path: Path, model: Path) -> None:
    table: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "model": {"path": str(model)},
        "rollout": {"backend": "sglang", "sglang": {"args": ["--pp-size=2"]}},
        "reward": {"function": "exact"},
        "weights": {"transport": "distributed"},
    }
    with pytest.raises(ConfigError, match="--pp-size 2: SGLang gives the stages of a pipeline one rank"):
        build_config(table)
    table["rollout"]["sglang"]["args"] = ["--tp-size=2"]
    build_config(table)
