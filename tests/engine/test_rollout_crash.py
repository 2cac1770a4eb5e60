"""A rollout worker that is killed with SIGKILL, again and again, on the embedded log."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from streams.events import RolloutFailed, TrajectoryFinished
from streams.open import open_log
from tests.engine.rollout_support import DEADLINE_S, Run, eventually

GROUPS, MEMBERS = 60, 4

PROGRAM = textwrap.dedent(
    """
    import sys
    from datetime import timedelta
    from pathlib import Path
    from engine.interfaces import Sampling
    from engine.rollout.generate import single_turn
    from engine.rollout.loading import on_disk
    from engine.rollout.scripted import scripted_engine
    from engine.rollout.worker import RolloutWorker
    from streams.open import open_log
    from streams.topics import Topics

    folder = Path(sys.argv[1])
    options = {"answers": {}, "default": "abcdef", "token_s": 0.005, "fault": "nan", "fault_share": 0.1}
    with open_log(f"file://{folder}/log") as log:
        worker = RolloutWorker(
            log, Topics("test", 2), scripted_engine(options, name="e", seed=0), single_turn,
            locate=on_disk(folder), sampling=Sampling(6), max_concurrency=8,
        )
        sys.exit(worker.run(lambda: False))
    """
)


def start(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "worker.err").open("ab") as errors:
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=errors)


def test_every_member_has_one_outcome_over_kills(tmp_path: Path) -> None:
    with open_log(f"file://{tmp_path}/log") as log:
        run = Run(tmp_path, partitions=2, log=log)
        run.publish(0)
        for number in range(GROUPS):
            run.dispatch(f"p{number}", n_samples=MEMBERS, partition=number % 2)
        wanted, process = GROUPS * MEMBERS, start(tmp_path)
        try:
            for share in (0.15, 0.4, 0.7):
                eventually(lambda share=share: len(run.events("trajectories")) > share * wanted, "progress")
                os.kill(process.pid, signal.SIGKILL)
                process.wait(DEADLINE_S)
                process = start(tmp_path)
            eventually(lambda: len(run.events("trajectories")) >= wanted, "every outcome")
            run.finish()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait(DEADLINE_S)
        outcomes = run.events("trajectories")
    uids = collections.Counter(event.uid for event in outcomes)
    assert set(uids.values()) == {1}
    assert set(uids) == {f"0-{group}/{index}/0" for group in range(GROUPS) for index in range(MEMBERS)}
    kinds = collections.Counter(type(event) for event in outcomes)
    assert kinds[RolloutFailed] > 0 and kinds[TrajectoryFinished] > kinds[RolloutFailed]
