"""A trainer of two ranks as a process of its own, for tests that end processes: python ranked_trainer.py MODEL

Says `ready <pid of rank 1>`, then `step` as each of its steps begins: long ones, of a hundred forwards each.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from pathlib import Path

from engine.trainer import followers, links, ranks
from engine.trainer.parts import PartSettings
from engine.trainer.ranked_backend import RankedBackend
from engine.trainer.torch_settings import TorchSettings
from tests.engine.trainer_support import batch_of


def main(model: Path) -> None:
    logging.basicConfig(level="INFO")
    links.BEAT, links.SILENT = timedelta(seconds=0.5), timedelta(seconds=15)
    followers.LAST_RESORT = timedelta(seconds=2)
    ranks.COLLECTIVE = timedelta(minutes=5)  # longer than the test: it must not be what ends a hang
    settings = TorchSettings(lr=0.01, threads=1, micro_batch_tokens=1)
    backend = RankedBackend(
        PartSettings(backend="fsdp2", model=str(model), torch=settings, options={}), n_ranks=2
    )
    print("ready", next(iter(backend._followers._processes.values())).pid, flush=True)
    batch = batch_of(200, seed=1)
    while True:
        print("step", flush=True)
        backend.step(batch)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
