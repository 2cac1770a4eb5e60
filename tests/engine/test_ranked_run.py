"""A run whose trainer has two ranks: one is killed in the middle of it, it goes on, and the replay is bit-equal."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli import main
from engine.trainer import followers
from engine.trainer.followers import RankLost
from engine.weights.tensors import digest
from tests.engine.ranks_support import torch_as_it_was
from tests.engine.trainer_support import folder_of, tiny_qwen3
from tests.support.rundirs import RunDir


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_two_ranks_goes_on_after_one_is_killed_and_is_replayed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("engine.commands.common.setup_logging", lambda level: None)
    monkeypatch.setattr(followers, "LAST_RESORT", timedelta(hours=1))  # it would end this very process
    model = folder_of(tiny_qwen3(), tmp_path / "model")
    with torch_as_it_was():
        torch.set_num_threads(1)
        with RunDir(
            tmp_path / "run",
            model={"path": str(model)},
            trainer={"backend": "fsdp2", "n_ranks": 2, "lr": 0.01, "packing": True},
        ) as run:
            run.steps(3)
            backend: Any = run.trainer.backend
            next(iter(backend._followers._processes.values())).kill()
            with pytest.raises(RankLost, match=r"rank 1 .*killed by SIGKILL"):
                run.steps(1)  # its batch is cut: the step belongs to the run, whoever takes it
            run.trainer.close()
            backend.close()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            run.take_over()  # checkpoint of step 2, steps 3 and 4 made again
            assert run.trainer.step == 4 and run.trainer.version == 4
            run.steps(1)
            backend = run.trainer.backend
            held = digest(backend.weights())
            backend.close()
        code = main(["replay", str(run.path), "--out", str(tmp_path / "out")])
        report = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert code == 0 and report["equal"], capsys.readouterr().out
    assert report["steps"][-1]["step"] == 5 and report["steps"][-1]["digest"] == held
    assert report["made_with"]["ranks"] == report["replayed_with"]["ranks"] == 2
