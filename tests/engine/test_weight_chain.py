"""Versions published as deltas: when, on what, how they are read back, and which files must stay."""

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.interfaces import EngineError
from engine.rollout.loading import WEIGHTS_MISMATCH, WEIGHTS_UNREADABLE, Loader
from engine.trainer.loop import Trainer
from engine.trainer.scalar_backend import ScalarBackend
from engine.weights import chain
from engine.weights.chain import link_chain, materialize_to_file, needed_by, resolve
from engine.weights.delta_writer import DeltaPolicy
from engine.weights.store import WeightsConflict, WeightsError, WeightStore, digest, verify
from replay.ledger import read_run
from streams.events import WeightsPublished
from tests.support.world import World

EPOCH = 3


def state(version: int) -> dict[str, np.ndarray]:
    """Version v differs from v−1 in one element of `w` of 100, and never in `still`."""
    w = np.zeros(100, np.float32)
    for earlier in range(version + 1):
        w[earlier % 100] = earlier + 0.5
    return {"w": w, "still": np.ones(300, np.float32)}


def published(store: WeightStore, versions: range, epoch: int = EPOCH) -> dict[int, WeightsPublished]:
    return {
        version: store.publish(state(version), epoch=epoch, version=version, step=version)
        for version in versions
    }


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=2, deltas=DeltaPolicy(full_every=4), clock=lambda: 99)


def path_of(store: WeightStore, version: int) -> Path:
    return store.path(EPOCH, version, ".delta")


# ---------------------------------------------------------------- publishing
def test_every_n_th_version_is_full_and_the_others_are_deltas_on_the_one_before(store: WeightStore):
    events = published(store, range(9))
    assert [version for version, event in events.items() if event.kind == "full"] == [0, 4, 8]
    event = events[3]
    assert (event.kind, event.base_version, event.base_digest) == ("delta", 2, events[2].digest)
    assert event.uris == {"disk": "weights/e3-v3.delta"} and event.digest == digest(state(3))
    assert event.nbytes == path_of(store, 3).stat().st_size and events[4].nbytes == 1600
    assert [info.name for info in event.tensors] == ["w", "still"]
    assert not store.path(EPOCH, 3).exists()


def test_without_a_policy_every_version_is_full(tmp_path: Path):
    store = WeightStore(tmp_path, keep=2)
    assert {event.kind for event in published(store, range(4)).values()} == {"full"}


def test_an_epoch_begins_with_a_full_version(store: WeightStore, tmp_path: Path):
    published(store, range(2))
    assert store.publish(state(2), epoch=9, version=2, step=2).kind == "full"
    again = WeightStore(tmp_path / "weights", keep=2, deltas=DeltaPolicy())  # the next incarnation
    assert again.publish(state(2), epoch=12, version=2, step=2).kind == "full"


def test_a_version_may_skip_numbers(store: WeightStore):
    published(store, range(1))
    event = store.publish(state(5), epoch=EPOCH, version=5, step=5)
    assert (event.kind, event.base_version) == ("delta", 0)
    verify(path_of(store, 5), event.digest)


def test_where_much_changed_the_version_is_full_and_the_log_says_why(
    store: WeightStore, caplog: pytest.LogCaptureFixture
):
    published(store, range(2))
    with caplog.at_level(logging.INFO):
        event = store.publish(
            {"w": np.full(100, 9, np.float32), "still": np.zeros(300, np.float32)},
            epoch=EPOCH, version=2, step=2,
        )  # fmt: skip
    assert event.kind == "full" and event.base_version == -1 and not path_of(store, 2).exists()
    assert "version 2 is published in full: more than 25% of the elements changed" in caplog.text
    assert not list(store.folder.glob(".*"))
    assert store.publish(state(3), epoch=EPOCH, version=3, step=3).kind == "full"  # far from version 2


def test_a_tensor_that_appears_makes_a_full_version(store: WeightStore):
    published(store, range(2))
    assert store.publish(state(2) | {"new": np.ones(1)}, epoch=EPOCH, version=2, step=2).kind == "full"


def test_publishing_the_same_version_again_writes_nothing(store: WeightStore):
    events = published(store, range(3))
    inode = path_of(store, 2).stat().st_ino
    again = store.publish(state(2), epoch=EPOCH, version=2, step=2)
    assert again == events[2] and path_of(store, 2).stat().st_ino == inode
    after = store.publish(state(3), epoch=EPOCH, version=3, step=3)
    assert (after.kind, after.base_version) == ("delta", 2)


def test_other_weights_never_take_the_place_of_a_delta(store: WeightStore, tmp_path: Path):
    published(store, range(3))
    other = WeightStore(tmp_path / "weights", keep=2)
    with pytest.raises(WeightsConflict, match=r"e3-v2\.delta leads to other weights"):
        other.publish(state(7), epoch=EPOCH, version=2, step=2)
    assert other.publish(state(2), epoch=EPOCH, version=2, step=2).kind == "full"


def test_a_delta_that_finds_no_room_leaves_nothing_and_may_be_tried_again(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    import errno
    import os

    published(store, range(1))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsError, match="no room on the disk"):
        store.publish(state(1), epoch=EPOCH, version=1, step=1)
    assert [path.name for path in store.folder.iterdir()] == ["e3-v0.safetensors"]
    monkeypatch.undo()
    assert store.publish(state(1), epoch=EPOCH, version=1, step=1).kind == "delta"


# ---------------------------------------------------------------- reading back
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_chain_every_version_comes_back_bit_for_bit(tmp_path: Path, data: st.DataObject):
    folder = tmp_path / "weights"
    shutil.rmtree(folder, ignore_errors=True)
    store = WeightStore(folder, keep=99, deltas=DeltaPolicy(full_every=data.draw(st.integers(1, 5))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weights = torch.from_numpy(rng.integers(0, 2**16, 80, np.uint16).view(np.int16)).view(torch.bfloat16)
    states, events = [], []
    for version in range(data.draw(st.integers(1, 8))):
        share = data.draw(st.sampled_from([0.0, 0.02, 0.2, 0.9]))
        flips = torch.from_numpy((rng.random(80) < share).astype(np.int16))
        weights = (weights.view(torch.int16) ^ flips).view(torch.bfloat16)
        states.append({"a": weights, "tied": weights, "still": torch.ones(2)})
        events.append(store.publish(states[-1], epoch=1, version=version, step=version))
    loader = Loader("torch")
    seen = sorted(data.draw(st.sets(st.sampled_from(range(len(events))))))
    for version in seen:  # an engine that skips versions
        path = folder.parent / events[version].uris["disk"]
        held = loader.load(events[version], path)
        assert digest(held) == digest(states[version])
        assert held["a"].data_ptr() == held["tied"].data_ptr()
        out = tmp_path / "out.safetensors"
        materialize_to_file(path, out, digest=events[version].digest)
        assert digest(Loader("torch").load(events[version], out)) == digest(states[version])


def test_a_chain_begins_with_the_newest_full_file_or_with_what_is_held(store: WeightStore):
    events = published(store, range(8))
    whole = resolve(path_of(store, 7))
    assert whole.full == store.path(EPOCH, 4) and [delta.head.version for delta in whole.deltas] == [5, 6, 7]
    short = resolve(path_of(store, 7), held=events[5].digest)
    assert short.full is None and [delta.head.version for delta in short.deltas] == [6, 7]
    assert resolve(store.path(EPOCH, 4)) == (store.path(EPOCH, 4), [])
    materialize_to_file(path_of(store, 6), store.path(EPOCH, 6), digest=events[6].digest)
    assert resolve(path_of(store, 7)).full == store.path(EPOCH, 6)


def test_a_materialized_file_is_the_one_that_a_full_publication_writes(store: WeightStore, tmp_path: Path):
    events = published(store, range(4))
    materialize_to_file(path_of(store, 3), tmp_path / "made", digest=events[3].digest)
    other = WeightStore(tmp_path / "other", keep=2)
    other.publish(state(3), epoch=EPOCH, version=3, step=3)
    assert (tmp_path / "made").read_bytes() == other.path(EPOCH, 3).read_bytes()
    assert digest(safetensors.numpy.load_file(tmp_path / "made")) == events[3].digest


def test_a_missing_link_is_named(store: WeightStore, tmp_path: Path):
    events = published(store, range(4))
    path_of(store, 2).unlink()
    with pytest.raises(
        WeightsError, match=r"e3-v3\.delta: is a delta on version 2 of epoch 3, which is not in"
    ):
        materialize_to_file(path_of(store, 3), tmp_path / "out", digest=events[3].digest)


def test_a_link_to_other_weights_is_refused_with_both_digests(store: WeightStore, tmp_path: Path):
    events = published(store, range(4))
    other = WeightStore(tmp_path / "other", keep=2)
    event = other.publish(state(9), epoch=EPOCH, version=0, step=0)
    shutil.copy(other.path(EPOCH, 0), store.path(EPOCH, 0))
    with pytest.raises(WeightsError, match=f"made on digest {events[0].digest}.*holds {event.digest}"):
        resolve(path_of(store, 3))


@pytest.mark.parametrize("name", ["e3-v0.safetensors", "e3-v2.delta"])
def test_damage_anywhere_in_a_chain_is_found_and_leaves_no_file(
    store: WeightStore, tmp_path: Path, name: str
):
    events = published(store, range(4))
    path = store.folder / name
    whole = path.read_bytes()
    place = len(whole) - 1 if name.endswith("safetensors") else 70  # the bytes of a tensor; of a block
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    (tmp_path / "out").mkdir()
    with pytest.raises(WeightsError, match=f"{name}.* is damaged"):
        materialize_to_file(path_of(store, 3), tmp_path / "out" / "made", digest=events[3].digest)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(EngineError):
        Loader("numpy").load(events[3], path_of(store, 3))


def test_the_digest_of_the_ledger_has_the_last_word(store: WeightStore, tmp_path: Path):
    published(store, range(3))
    with pytest.raises(WeightsError, match=f"expected {digest(state(9))}"):
        materialize_to_file(path_of(store, 2), tmp_path / "out", digest=digest(state(9)))
    with pytest.raises(WeightsError, match=f"expected {digest(state(9))}"):
        verify(path_of(store, 2), digest(state(9)))


# ---------------------------------------------------------------- engines
def test_an_engine_that_holds_the_base_needs_nothing_but_the_delta(store: WeightStore):
    events, loader = published(store, range(4)), Loader("numpy")
    loader.load(events[1], path_of(store, 1))
    for name in ("e3-v0.safetensors", "e3-v1.delta"):
        (store.folder / name).unlink()
    third = loader.load(events[3], path_of(store, 3))  # it skips version 2, whose delta is still there
    assert digest(third) == digest(state(3))
    with pytest.raises(EngineError) as caught:
        Loader("numpy").load(events[3], path_of(store, 3))
    assert caught.value.reason == WEIGHTS_UNREADABLE and "is a delta on version" in caught.value.detail


def test_what_an_engine_holds_is_neither_changed_nor_copied_without_need(store: WeightStore):
    events, loader = published(store, range(3)), Loader("torch")
    first = loader.load(events[1], path_of(store, 1))
    kept = {name: tensor.clone() for name, tensor in first.items()}
    second = loader.load(events[2], path_of(store, 2))
    assert all(torch.equal(first[name], kept[name]) for name in kept)
    assert second["still"].data_ptr() == first["still"].data_ptr()
    assert second["w"].data_ptr() != first["w"].data_ptr()


def test_an_engine_whose_weights_were_changed_in_place_reads_the_chain_instead(store: WeightStore):
    events, loader = published(store, range(4)), Loader("torch")
    loader.load(events[1], path_of(store, 1))["still"].zero_()
    assert digest(loader.load(events[2], path_of(store, 2))) == events[2].digest


def test_weights_that_are_not_the_published_ones_are_never_served(store: WeightStore):
    events = published(store, range(3))
    wrong = msgspec.structs.replace(events[2], digest=digest(state(9)))
    for loader in (Loader("numpy"), held := Loader("numpy")):
        if loader is held:
            held.load(events[1], path_of(store, 1))
        with pytest.raises(EngineError) as caught:
            loader.load(wrong, path_of(store, 2))
        assert caught.value.reason == WEIGHTS_MISMATCH
    assert digest(held.load(events[2], path_of(store, 2))) == events[2].digest
    with pytest.raises(EngineError, match="is an adapter, which this engine cannot take"):
        held.load(msgspec.structs.replace(events[2], kind="lora"), path_of(store, 2))


def test_a_model_serves_a_version_that_came_as_a_delta(tmp_path: Path):
    """A real engine: bfloat16, tied embeddings, of which a delta overwrites a few elements."""
    import asyncio

    from engine.rollout.batched import BatchedEngine
    from engine.tasks import GUESS, tiny
    from tests.engine.trainer_support import tiny_qwen3

    model: Any = tiny_qwen3().bfloat16()
    model.save_pretrained(tmp_path / "model")
    tiny.build_tokenizer(GUESS).save_pretrained(tmp_path / "model")
    store = WeightStore(tmp_path / "weights", keep=2, deltas=DeltaPolicy())
    engine = BatchedEngine(tmp_path / "model", dtype="bfloat16", threads=1)

    async def scene() -> None:
        for version in range(3):
            with torch.no_grad():
                model.get_input_embeddings().weight[version, :2] += 1.0
            weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
            event = store.publish(weights, epoch=1, version=version, step=version)
            assert event.kind == ("delta" if version else "full")
            await engine.update(event, tmp_path / event.uris["disk"])
            held = engine._model.model.state_dict()
            assert digest(dict(held)) == event.digest == digest(weights)
            assert engine.held is not None and engine.held.digest == event.digest
        await engine.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


# ---------------------------------------------------------------- a whole run
class SparseBackend(ScalarBackend):
    """As the scalar trainer, with 999 weights beside its one that never change."""

    def weights(self) -> dict[str, np.ndarray]:
        return {"w": np.concatenate([super().weights()["w"], np.ones(999)])}


class SparseWorld(World):
    def trainer(self) -> Trainer:
        store = WeightStore(self.folder / "weights", keep=3, deltas=DeltaPolicy(full_every=3))
        trainer = Trainer(
            *(self.log, self.topics, SparseBackend(), store, self.settings, self.folder / "checkpoints")
        )
        trainer.start()
        return trainer


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_publishes_deltas_survives_crashes_of_every_stage(tmp_path: Path, seed: int):
    world = SparseWorld(tmp_path, limit=30, rows=12)
    try:
        assert world.run(random.Random(seed), crash_rate=0.05).finished is not None
    finally:
        world.close()
    versions = read_run(world.log, world.topics).versions
    assert {event.kind for event in versions} == {"full", "delta"}
    for event, before in zip(versions[1:], versions, strict=False):
        if event.kind == "delta":
            assert (event.epoch, event.base_version, event.base_digest) == (
                *(before.epoch, before.version),
                before.digest,
            )
    there = {
        (event.epoch, event.version): event for event in versions if (tmp_path / event.uris["disk"]).exists()
    }
    newest = sorted({(event.epoch, event.version) for event in versions})[-3:]
    assert set(newest) <= set(there)
    for key in newest:
        verify(tmp_path / there[key].uris["disk"], there[key].digest)


# ---------------------------------------------------------------- which files stay
def test_prune_never_removes_a_base_that_a_kept_delta_needs(store: WeightStore):
    for version in range(11):
        events = published(store, range(version, version + 1))
        store.prune()
        for kept in range(max(0, version - 1), version + 1):  # keep = 2
            suffix = ".delta" if path_of(store, kept).exists() else ".safetensors"
            verify(store.path(EPOCH, kept, suffix), digest(state(kept)))
        assert events[version].version == version
    # of the versions 9 and 10: both are deltas that begin with 8
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "e3-v10.delta", "e3-v8.safetensors", "e3-v9.delta",
    ]  # fmt: skip


def test_a_pinned_delta_keeps_its_chain_and_the_rest_goes(store: WeightStore):
    published(store, range(11))
    removed = store.prune(pinned=["weights/e3-v2.delta", "e3-v99.delta"])
    assert [path.name for path in removed] == [
        "e3-v3.delta", "e3-v4.safetensors", "e3-v5.delta", "e3-v6.delta", "e3-v7.delta",
    ]  # fmt: skip
    verify(path_of(store, 2), digest(state(2)))


def test_a_kept_delta_that_cannot_be_read_keeps_everything_it_may_need(store: WeightStore):
    published(store, range(7))
    path_of(store, 6).write_bytes(b"torn")
    assert store.prune() == []
    assert needed_by(store.folder, ["e3-v5.delta"]) == {"e3-v5.delta", "e3-v4.safetensors"}


def test_leftovers_of_deltas_of_older_epochs_go(store: WeightStore):
    published(store, range(1), epoch=5)
    left, making = store.folder / ".e4-v2.delta.tmp", store.folder / ".e5-v2.delta.tmp"
    left.touch()
    making.touch()
    store.prune()
    assert not left.exists() and making.exists()


def test_links_of_a_chain_survive_retention(store: WeightStore, tmp_path: Path):
    published(store, range(4))
    pin = link_chain(path_of(store, 3), tmp_path / "pins" / "e3-v3")
    for path in list(store.folder.iterdir()):
        path.unlink()
    verify(pin, digest(state(3)))
    assert pin.stat().st_nlink == 1
    with pytest.raises(FileNotFoundError):
        link_chain(store.path(EPOCH, 0), tmp_path / "pins" / "none")
    assert [path.name for path in (tmp_path / "pins").iterdir()] == ["e3-v3"]


def test_a_delta_on_itself_or_on_a_later_version_is_refused(store: WeightStore, tmp_path: Path):
    from engine.weights.delta_writer import state_of, write_delta

    with open(store.folder / "e3-v2.delta", "wb") as file:
        write_delta(file, state_of(state(2)), state_of(state(2)), epoch=3, version=2, base_version=2)
    with pytest.raises(WeightsError, match="says that it is a delta on version 2, a later one"):
        resolve(store.folder / "e3-v2.delta")


def test_names_of_files_say_what_they_hold():
    assert chain.parse_name("e3-v7.delta") == (3, 7, ".delta")
    assert chain.parse_name(chain.file_name(3, 7)) == (3, 7, ".safetensors")
    strange: list[Any] = [
        chain.parse_name(name) for name in (".e3-v7.delta.tmp", "e3-v7", "pinned", "e3-v7.bin")
    ]
    assert strange == [None] * 4
