"""Checkpoints are written beside the training step, and a disk that has no room costs one, not the run."""

from __future__ import annotations

import errno
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from engine.trainer.checkpoint import save_checkpoint
from engine.trainer.publisher import Publisher
from engine.trainer.saver import Saver
from engine.weights.store import NoRoom, WeightStore

SOON = timedelta(seconds=10)


def test_the_caller_goes_on_while_a_checkpoint_is_written_and_waits_only_for_the_one_before() -> None:
    saver, gate, order = Saver(), threading.Event(), []

    def slow() -> None:
        gate.wait(10)
        order.append("first")

    started = time.monotonic()
    saver.save(slow)
    assert time.monotonic() - started < 1
    assert saver.is_busy
    threading.Timer(0.2, gate.set).start()
    saver.save(lambda: order.append("second"))  # waits for the first
    saver.flush(SOON)
    assert order == ["first", "second"]
    assert not saver.is_busy


def test_a_wait_for_the_checkpoint_before_can_be_asked_to_stop() -> None:
    class Stopped(Exception):
        pass

    saver, gate = Saver(), threading.Event()

    def slow() -> None:
        gate.wait(10)

    saver.save(slow)

    def beat() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        saver.save(lambda: None, beat=beat)
    with pytest.raises(TimeoutError, match="not written within 0 s"):
        saver.flush(timedelta(seconds=0.1))
    gate.set()
    saver.flush(SOON)


def test_a_checkpoint_that_finds_no_room_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "half").write_bytes(b"x" * 10)
        raise OSError(errno.ENOSPC, "No space left on device")

    def job() -> None:
        save_checkpoint(tmp_path, epoch=0, step=1, version=1, ledger_position=0, write=full)

    saver = Saver()
    saver.save(job)
    saver.flush(SOON)
    assert saver.failed == 1
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_saving_reaches_the_trainer() -> None:
    def job() -> None:
        raise ZeroDivisionError

    saver = Saver()
    saver.save(job)
    with pytest.raises(ZeroDivisionError):
        saver.flush(SOON)
    with pytest.raises(ZeroDivisionError):
        saver.check()


def test_a_version_waits_for_room_on_the_disk_and_is_then_published(tmp_path: Path) -> None:
    import numpy as np

    store, tries, told = WeightStore(tmp_path / "weights", keep=2), [], []

    def write(tensors, version, step):
        tries.append(version)
        if len(tries) < 3:
            raise NoRoom("full")
        return store.publish(tensors, epoch=0, version=version, step=step)

    publisher = Publisher(write, told.append)
    publisher.publish({"w": np.zeros(2)}, 1, 1)
    publisher.publish({"w": np.ones(2)}, 2, 2)
    publisher.flush(SOON)
    publisher.close()
    assert tries == [1, 1, 1, 2]
    assert [event.version for event in told] == [1, 2]


def test_a_trainer_that_is_asked_to_stop_gives_up_a_version_that_finds_no_room(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def full(tensors, version, step):
        raise NoRoom("full")

    def beat() -> None:
        raise Stopped

    publisher = Publisher(full, lambda event: None)
    publisher.publish({}, 1, 1)
    publisher.publish({}, 2, 2)
    with pytest.raises(Stopped):
        publisher.publish({}, 3, 3, beat=beat)  # the third would wait for the first
    with pytest.raises(Stopped):
        publisher.flush(SOON, beat=beat)
    started = time.monotonic()
    publisher.close()
    assert time.monotonic() - started < 2
