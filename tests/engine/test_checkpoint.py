"""Checkpoints are whole or not there, whatever kills the process and whatever happens to the files."""

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import engine.trainer.checkpoint as checkpoint_module
from engine.interfaces import CheckpointError
from engine.trainer.checkpoint import (
    CheckpointFound,
    find_checkpoints,
    open_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

ROOT = Path(checkpoint_module.__file__).parents[2]


def write_state(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 1000)
    (folder / "deep").mkdir()
    (folder / "deep" / "optimizer.bin").write_bytes(b"o" * 10)


def save(folder: Path, step: int, epoch: int = 0, write=write_state, **more) -> tuple[Path, str]:
    return save_checkpoint(
        folder, epoch=epoch, step=step, version=step, ledger_position=10 * step, write=write, **more
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_found_with_all_that_was_said_of_it(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    path, digest = save_checkpoint(
        folder,
        epoch=3,
        step=40,
        version=38,
        ledger_position=99,
        positions=[5, 0, 7],
        frontier=12,
        closed_above=[14, 15],
        write=write_state,
    )
    assert path == folder / "e3-s00000040" and names(folder) == ["e3-s00000040"]
    found = open_checkpoint(path)
    assert found == CheckpointFound(path, 3, 40, 38, 99, [5, 0, 7], 12, [14, 15], digest)
    assert (path / "state" / "deep" / "optimizer.bin").read_bytes() == b"o" * 10
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(files) == {"state/weights.bin", "state/deep/optimizer.bin"}
    assert files["state/weights.bin"][0] == 1000


def test_checkpoints_are_found_newest_first_by_epoch_then_step(tmp_path: Path):
    for epoch, step in ((0, 9), (0, 100), (4, 20), (4, 3)):
        save(tmp_path, step, epoch)
    assert [(found.epoch, found.step) for found in find_checkpoints(tmp_path)] == [
        (4, 20),
        (4, 3),
        (0, 100),
        (0, 9),
    ]
    assert list(find_checkpoints(tmp_path / "nothing here")) == []


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state" / "weights.bin").unlink(), "state/weights.bin is missing"),
        (lambda path: flip_last_bit(path / "state" / "weights.bin"), "state/weights.bin has digest"),
        (lambda path: os.truncate(path / "state" / "weights.bin", 999), "has 999 bytes, saved were 1000"),
        (lambda path: (path / "manifest.json").unlink(), "no manifest.json"),
        (lambda path: os.truncate(path / "manifest.json", 60), "manifest.json is truncated or damaged"),
        (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json is truncated or damaged"),
        (lambda path: (path / "manifest.json").write_text("[]"), "list instead of an object"),
        (
            lambda path: (path / "manifest.json").write_text('{"format": 2}'),
            "has format 2, this version reads 1",
        ),
        (
            lambda path: (path / "manifest.json").write_text(
                (path / "manifest.json").read_text().replace('"version": 2', '"version": 7')
            ),
            "it was changed",
        ),
    ],
)
def test_a_torn_checkpoint_is_passed_over_with_one_warning_and_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, reason: str
):
    save(tmp_path, 1)
    damage(save(tmp_path, 2)[0])
    save(tmp_path, 3)
    with caplog.at_level(logging.WARNING):
        assert [found.step for found in find_checkpoints(tmp_path)] == [3, 1]
    (record,) = [each for each in caplog.records if each.name.startswith("engine.")]
    assert "e0-s00000002 passed over: " in record.getMessage() and reason in record.getMessage()


def test_a_checkpoint_that_is_not_there_says_so(tmp_path: Path):
    assert open_checkpoint(tmp_path / "e0-s00000001") == "it is not there"


def test_saving_the_same_state_again_is_harmless(tmp_path: Path):
    first = save(tmp_path, 1)
    assert save(tmp_path, 1) == first and names(tmp_path) == ["e0-s00000001"]


def test_another_whole_checkpoint_is_never_overwritten(tmp_path: Path):
    path, digest = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="holds another checkpoint"):
        save(tmp_path, 1, write=lambda folder: (folder / "other").touch())
    found = open_checkpoint(path)
    assert isinstance(found, CheckpointFound) and found.digest == digest and names(tmp_path) == [path.name]


def test_a_damaged_checkpoint_of_the_same_name_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, digest = save(tmp_path, 1)
    flip_last_bit(path / "state" / "weights.bin")
    assert save(tmp_path, 1) == (path, digest)
    assert isinstance(open_checkpoint(path), CheckpointFound) and names(tmp_path) == [path.name]
    assert "it is written again" in caplog.text


def test_a_full_disk_gives_a_clear_error_and_leaves_nothing(tmp_path: Path):
    def fills_the_disk(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"e0-s00000001: no room on the disk"):
        save(tmp_path, 1, write=fills_the_disk)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path, 1, write=lambda folder: os.rmdir(folder / "gone"))
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 1, write=lambda folder: 1 / 0)  # pyright: ignore[reportArgumentType]
    assert names(tmp_path) == []


def test_prune_keeps_the_newest_and_every_nth(tmp_path: Path):
    for step in (5, 10, 15, 20, 25):
        save(tmp_path, step)
    save(tmp_path, 20, epoch=7)
    removed = prune_checkpoints(tmp_path, keep_last=2, keep_every=10)
    assert [path.name for path in removed] == ["e0-s00000005", "e0-s00000015"]
    assert names(tmp_path) == ["e0-s00000010", "e0-s00000020", "e0-s00000025", "e7-s00000020"]
    prune_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path) == ["e7-s00000020"]
    assert prune_checkpoints(tmp_path / "none", keep_last=1) == []


def test_prune_never_counts_a_torn_checkpoint_as_one_that_is_kept(tmp_path: Path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (1, 4):
        (tmp_path / f"e0-s{step:08d}" / "manifest.json").unlink()
    assert [path.name for path in prune_checkpoints(tmp_path, keep_last=2)] == ["e0-s00000001"]
    assert names(tmp_path) == ["e0-s00000002", "e0-s00000003", "e0-s00000004"]


def test_prune_removes_what_killed_trainers_left_but_nothing_in_the_making(tmp_path: Path):
    save(tmp_path, 1, epoch=5)
    for name in (".e4-s00000002.tmp", ".e5-s00000002.tmp", ".e5-s00000000.old", "notes"):
        (tmp_path / name).mkdir()
    prune_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path) == [".e5-s00000002.tmp", "e5-s00000001", "notes"]


SAVER = """
import sys
from pathlib import Path
from engine.trainer.checkpoint import prune_checkpoints, save_checkpoint

folder, epoch = Path(sys.argv[1]), int(sys.argv[2])

def write(state):
    for number in range(4):
        (state / f"part{number}").write_bytes(bytes([step % 251]) * 50_000)

step = 0
print("ready", flush=True)
while True:
    step += 1
    save_checkpoint(folder, epoch=epoch, step=step, version=step, ledger_position=step, write=write)
    print(step, flush=True)
    prune_checkpoints(folder, keep_last=2)
"""


def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """kill -9 at random moments. What was acknowledged is there, nothing is torn, and the next trainer cleans up."""
    randomness = random.Random(11)
    for epoch in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), str(epoch)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        watchdog = time.monotonic() + 30
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(
            randomness.uniform(0.001, 0.06)
        )  # the moment is the input of this test, not a wait for something
        child.send_signal(signal.SIGKILL)
        output, _ = child.communicate(timeout=max(0.1, watchdog - time.monotonic()))
        acknowledged = [int(line) for line in output.split()]
        found = list(find_checkpoints(tmp_path))
        assert [each for each in caplog.records if each.name.startswith("engine.")] == [], (
            "a torn checkpoint under a good name"
        )
        newest = max((each.step for each in found if each.epoch == epoch), default=0)
        assert newest in ((acknowledged or [0])[-1], (acknowledged or [0])[-1] + 1)
        for each in found:
            content = (each.state / "part3").read_bytes()
            assert content == bytes([each.step % 251]) * 50_000 and each.version == each.step
    save(tmp_path, 1, epoch=99)
    prune_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path) == ["e99-s00000001"]
