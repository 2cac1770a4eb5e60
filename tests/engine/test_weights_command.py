"""`millstream weights`: which versions there are, where from, and any of them as a folder."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from engine import cli
from engine.config import fingerprint, load_config
from engine.trainer.scalar_backend import ScalarBackend
from engine.weights.delta_writer import DeltaPolicy
from engine.weights.materialize import Run, materialize
from engine.weights.published import Publications
from engine.weights.store import WeightStore, digest
from streams import codec
from streams.errors import MillstreamError
from streams.events import (
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineReady,
    EpochStarted,
    Event,
    RunStarted,
    WeightsPublished,
)
from streams.memory import MemoryLog
from streams.open import open_log
from streams.topics import Topics
from tests.support.world import World

CONFIG = """
[run]
name = "run"
dir = "{folder}"
[log]
url = "file://{folder}/log"
partitions = 2
[data]
path = "{folder}/prompts.jsonl"
[reward]
function = "exact"
[rollout]
backend = "scripted"
[trainer]
backend = "scalar"
lr = 0.01
"""


# ---------------------------------------------------------------- a run of the scalar trainer
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 0 to 6 of one epoch, checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    config = load_config(folder)
    with open_log(config.log.url) as log:
        world = World(folder, log=log, limit=30, config_fingerprint=fingerprint(config))
        try:
            world.move("trainer")  # its records come first, so its epoch is 1
            assert world.run(random.Random(0)).step == 6
        finally:
            world.close()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    return folder


def weights(*args: object) -> int:
    return cli.main(["weights", *map(str, args)])


def listed(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert weights(run, "list", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["run"] == "run"
    return {f"e{each['epoch']}-v{each['version']}": each for each in answer["versions"]}


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_list_says_where_each_version_can_be_had_from(run: Path, capsys: pytest.CaptureFixture[str]):
    for version in (0, 3, 5):
        (run / f"weights/e1-v{version}.safetensors").unlink()
    versions = listed(run, capsys)
    assert list(versions) == [f"e1-v{version}" for version in range(7)]
    assert {name: (each["source"], each["detail"]) for name, each in versions.items()} == {
        "e1-v0": ("replay", "the initial weights"),
        "e1-v1": ("file", "e1-v1.safetensors"),
        "e1-v2": ("file", "e1-v2.safetensors"),
        "e1-v3": ("replay", "the checkpoint of step 2 and 1 step made again"),
        "e1-v4": ("file", "e1-v4.safetensors"),
        "e1-v5": ("replay", "the checkpoint of step 4 and 1 step made again"),
        "e1-v6": ("file", "e1-v6.safetensors"),
    }
    third = versions["e1-v3"]
    assert (third["step"], third["kind"], third["nbytes"], third["state"]) == (3, "full", 8, "valid")
    assert third["served_by"] == [] and len(third["digest"]) == 64
    assert weights(run, "list") == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        "VERSION", "STEP", "KIND", "BYTES", "DIGEST", "STATE", "WEIGHTS", "SERVED", "BY", "FROM",
    ]  # fmt: skip
    assert table[4].split()[:7] == ["e1-v3", "3", "full", "8", third["digest"][:12], "valid", "replay"]


@pytest.mark.parametrize(
    ("gone", "source"),
    [
        ([], "the file e1-v3.safetensors"),
        (["weights/e1-v3.safetensors"], "the checkpoint of step 2 and 1 step made again"),
        (
            ["weights/e1-v3.safetensors", "checkpoints/e1-s00000002"],
            "the initial weights and 3 steps made again",
        ),
    ],
)
def test_a_version_is_rebuilt_by_the_shortest_way_that_is_left(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: list[str], source: str
):
    wanted = listed(run, capsys)["e1-v3"]["digest"]
    for name in gone:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before, out = content(run), tmp_path / "out" / "model"
    assert weights(run, "materialize", "3", out) == 0
    said = capsys.readouterr().out
    assert f"{out}: e1-v3, the weights after step 3, from {source};" in said and wanted in said
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert digest(safetensors.numpy.load_file(out / "model.safetensors")) == wanted
    assert content(run) == before


def test_every_way_writes_the_same_file(run: Path, tmp_path: Path):
    assert weights(run, "materialize", "e1-v5", tmp_path / "copied") == 0
    (run / "weights/e1-v5.safetensors").unlink()
    assert weights(run, "materialize", "5", tmp_path / "made") == 0
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("copied", "made"))
    assert one == two


def test_a_damaged_file_is_passed_over_with_a_warning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = run / "weights/e1-v3.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert weights(run, "materialize", "3", tmp_path / "out") == 0
    said = capsys.readouterr()
    assert "from the checkpoint of step 2 and 1 step made again" in said.out
    assert "e1-v3.safetensors: gives weights of digest" in said.err


def test_a_damaged_checkpoint_is_passed_over_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (run / "weights/e1-v3.safetensors").unlink()
    state = run / "checkpoints/e1-s00000002/state/scalar.json"
    state.write_text(state.read_text().replace("1", "2"))
    assert weights(run, "materialize", "3", tmp_path / "out") == 0
    assert "the initial weights and 3 steps made again" in capsys.readouterr().out


def test_a_version_that_cannot_be_made_again_says_why(run: Path, tmp_path: Path, capsys):
    for path in (run / "weights").glob("*.safetensors"):
        path.unlink()
    shutil.rmtree(run / "checkpoints")
    config = load_config(run)
    with open_log(config.log.url) as log:
        # what retention does to a long run: the samples of the first steps are gone
        shortened: Any = Shortened(log, 5)
        publications = Publications(shortened, Topics("run", 2), run)
        versions = publications.list()
        assert [each.source for each in versions] == ["replay", *["gone"] * 6]
        reason = "from the initial weights on, samples of step 1 are no longer in the log"
        assert versions[3].detail == f"its file was removed; {reason}"
        asked = Run(shortened, Topics("run", 2), run, None, ScalarBackend)
        with pytest.raises(
            MillstreamError, match=r"e1-v3 can no longer be had: its file was removed .*samples of step 1"
        ):
            materialize(asked, publications, publications.find("3"), tmp_path / "out")
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


class Shortened:
    """A log of which each partition of `trajectories` begins later."""

    def __init__(self, log: Any, start: int) -> None:
        self._log, self._start = log, start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def start(self, topic: str, partition: int) -> int:
        return self._start if topic.endswith("trajectories") else self._log.start(topic, partition)


def test_steps_that_give_other_weights_here_are_refused(run: Path, tmp_path: Path):
    (run / "weights/e1-v3.safetensors").unlink()
    with open_log(load_config(run).log.url) as log:
        publications = Publications(log, Topics("run", 2), run)
        shutil.rmtree(run / "checkpoints")
        asked = Run(log, Topics("run", 2), run, None, lambda: ScalarBackend(lr=0.5))
        with pytest.raises(
            MillstreamError, match=r"3 steps made again give version 3 of digest .* published was"
        ):
            materialize(asked, publications, publications.find("3"), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        ("99", 1, "99: run run published no such version; it has 0 to 6, nearest: e1-v6 "),
        ("e9-v3", 1, "e9-v3: run run published version 3 only as e1-v3"),
        ("newest", 2, "version 'newest': a version is a number, as in 7, an epoch and a number"),
        ("-1", 2, ""),
    ],
)
def test_a_version_that_is_not_there_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, code: int, message: str
):
    try:
        assert weights(finished, "materialize", asked, tmp_path / "out") == code
    except SystemExit as ended:  # argparse takes -1 for an option
        assert ended.code == code
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_out_must_be_free_and_outside_of_the_run(finished: Path, tmp_path: Path, capsys):
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    file.touch()
    (full / "notes.txt").touch()
    for out, message in (
        (full, "is not empty"),
        (file, "is a file"),
        (finished / "weights" / "x", "the run's own directory; nothing is written there"),
        (file / "x", "cannot be made"),
    ):
        assert weights(finished, "materialize", "3", out) == 2
        assert message in capsys.readouterr().err
    assert weights(finished, "materialize", "latest", empty) == 0
    assert "e1-v6" in capsys.readouterr().out and (empty / "model.safetensors").is_file()


def test_other_settings_of_the_run_are_refused(finished: Path, tmp_path: Path, capsys):
    args = ["--set", "trainer.lr=3.0", "materialize", "3", tmp_path / "out"]
    assert weights(finished, *args) == 2
    assert "trainer.lr: the run has" in capsys.readouterr().err


def test_a_run_that_was_not_started_has_no_weights(tmp_path: Path, capsys):
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(folder=tmp_path / "nothing"))
    assert weights(file, "list") == 2
    assert "this run has not been started" in capsys.readouterr().err


# ---------------------------------------------------------------- a ledger written by hand
TOPICS = Topics("demo", 1)
FIRST, SECOND = 1, 6  # epochs: offsets of their EpochStarted


def ready(engine: str, event: WeightsPublished) -> EngineReady:
    return EngineReady(engine=engine, epoch=event.epoch, version=event.version, digest=event.digest)


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Publications]:
    """Epoch 1 published 0 to 3 as a chain of deltas; epoch 6 went on from 2 and made another 3; then epoch 1 woke."""
    log = MemoryLog()
    TOPICS.create(log)
    store = WeightStore(tmp_path / "run" / "weights", keep=9, deltas=DeltaPolicy())

    def write(event: Event, word: str = "ledger") -> None:
        log.append(TOPICS.name(word), 0, [codec.encode(event, producer="test")])

    def published(epoch: int, version: int, value: float, **fields: Any) -> WeightsPublished:
        state = {"w": np.where(np.arange(100) == version, value, 0.0)}
        event = store.publish(state, epoch=epoch, version=version, step=version)
        return WeightsPublished(**{**{f: getattr(event, f) for f in event.__struct_fields__}, **fields})

    write(
        RunStarted(
            run="demo", config_fingerprint="f", partitions=1, rollout_batch_size=1, n_samples_per_prompt=1,
            seed=0, started_ms=1,
        )
    )  # fmt: skip
    write(EpochStarted(producer="one", started_ms=1))
    old = [published(FIRST, version, 1.0) for version in range(4)]
    for event in old:
        write(event)
    write(EpochStarted(producer="two", started_ms=1))
    new = [published(SECOND, 2, 1.0, forked_at=2), published(SECOND, 3, 7.0)]
    write(new[0])
    write(published(FIRST, 4, 1.0))  # the zombie
    write(new[1])
    write(ready("rollout-0", old[3]), "fleet")
    write(ready("rollout-0", new[1]), "fleet")
    write(ready("rollout-1", new[0]), "fleet")
    write(EngineFailed(engine="rollout-1", reason="weights_unreadable"), "fleet")
    for name, end in (
        ("rollout-2", EngineLeft(engine="rollout-2")),
        ("rollout-3", EngineJoined(engine="rollout-3", replica=3)),
        ("rollout-4", EngineFailed(engine="rollout-4", reason="engine")),
    ):
        write(ready(name, new[1]), "fleet")
        write(end, "fleet")
    yield Publications(log, TOPICS, tmp_path / "run")


def test_void_and_abandoned_versions_are_listed_as_such_with_who_serves_what(forked: Publications):
    assert [(each.name, each.state, each.kind, each.served_by) for each in forked.list()] == [
        ("e1-v0", "valid", "full", []),
        ("e1-v1", "valid", "delta", []),
        ("e1-v2", "valid", "delta", []),
        ("e1-v3", "abandoned", "delta", []),
        ("e6-v2", "valid", "full", ["rollout-1"]),
        ("e1-v4", "void", "full", []),
        ("e6-v3", "valid", "delta", ["rollout-0"]),
    ]
    third = forked.list()[2]
    assert (third.source, third.detail, third.base_version) == ("chain", "e1-v0.safetensors and 2 deltas", 1)


def test_a_number_means_the_version_that_counts(forked: Publications):
    for text, epoch, version in (("3", 6, 3), ("v2", 6, 2), ("1", 1, 1), ("latest", 6, 3), ("e1-v2", 1, 2)):
        found = forked.find(text)
        assert (found.published.epoch, found.published.version, found.warning) == (epoch, version, "")


def test_a_void_or_abandoned_version_must_be_called_by_its_full_name(forked: Publications, tmp_path: Path):
    with pytest.raises(
        MillstreamError, match=r"4: version 4 of epoch 1 is void.*; e1-v4 names it all the same"
    ):
        forked.find("4")
    void, abandoned = forked.find("e1-v4"), forked.find("e1-v3")
    assert void.is_void and "is void: that trainer had been replaced" in void.warning
    assert "is abandoned: a later trainer went on from version 2" in abandoned.warning
    log: Any = MemoryLog()
    made = materialize(
        Run(log, TOPICS, tmp_path / "run", None, ScalarBackend), forked, abandoned, tmp_path / "out"
    )
    assert made.source == "the chain of e1-v0.safetensors and 3 deltas"
    held = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")["w"]
    assert np.flatnonzero(held).tolist() == [3] and digest({"w": held}) == abandoned.published.digest
    (tmp_path / "run/weights/e1-v4.safetensors").unlink()
    with pytest.raises(MillstreamError, match=r"its file was removed.*its steps are no record of this run"):
        materialize(Run(log, TOPICS, tmp_path / "run", None, ScalarBackend), forked, void, tmp_path / "out2")


def test_a_chain_that_lost_a_link_is_gone_and_says_which(forked: Publications, tmp_path: Path):
    (tmp_path / "run/weights/e1-v1.delta").unlink()
    # step 3 was never cut in this ledger, so nothing is missing for making it again; the void one has only its file
    by_name = {each.name: each for each in forked.list()}
    assert by_name["e1-v2"].source == "replay"
    (tmp_path / "run/weights/e1-v4.safetensors").write_bytes(b"torn")
    gone = {each.name: each for each in forked.list()}["e1-v4"]
    assert gone.source == "gone" and "truncated" in gone.detail and "no record of this run" in gone.detail


def test_a_run_without_a_version_says_so(tmp_path: Path):
    log = MemoryLog()
    TOPICS.create(log)
    publications = Publications(log, TOPICS, tmp_path)
    assert publications.list() == []
    with pytest.raises(MillstreamError, match="run demo has published no weights yet"):
        publications.find("latest")


# ---------------------------------------------------------------- a model
def test_the_folder_loads_with_transformers(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from engine.tasks import GUESS, tiny
    from tests.engine.trainer_support import tiny_qwen3

    model_folder, log = tmp_path / "model", MemoryLog()
    model: Any = tiny_qwen3()
    model.save_pretrained(model_folder)
    tiny.build_tokenizer(GUESS).save_pretrained(model_folder)
    (model_folder / "model.safetensors.index.json").write_text("{}")  # of shards: not taken along
    TOPICS.create(log)
    store = WeightStore(tmp_path / "run" / "weights", keep=9, deltas=DeltaPolicy())
    log.append(
        TOPICS.name("ledger"), 0, [codec.encode(EpochStarted(producer="t", started_ms=1), producer="t")]
    )
    for version in range(3):
        with torch.no_grad():
            model.get_input_embeddings().weight[version] += 0.5
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        event = store.publish(state, epoch=0, version=version, step=version)
        log.append(TOPICS.name("ledger"), 0, [codec.encode(event, producer="test")])
    publications = Publications(log, TOPICS, tmp_path / "run")
    run = Run(log, TOPICS, tmp_path / "run", model_folder, ScalarBackend)
    made = materialize(run, publications, publications.find("2"), tmp_path / "out")
    assert made.source == "the chain of e0-v0.safetensors and 2 deltas"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert "model.safetensors.index.json" not in names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([3]) is not None


def test_a_model_folder_that_is_gone_leaves_the_weights_alone(tmp_path: Path, caplog, forked: Publications):
    run = Run(MemoryLog(), TOPICS, tmp_path / "run", tmp_path / "nowhere", ScalarBackend)
    materialize(run, forked, forked.find("2"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert "has no config.json: only model.safetensors is written" in caplog.text
