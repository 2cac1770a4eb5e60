"""The command line as its users meet it: exit codes, what goes where, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.cli import COMMANDS, DONE, FAILED, INTERRUPTED, WRONG_USAGE, main
from engine.commands import common, rundir
from engine.commands.serve import FENCED, parse_replica
from engine.config import build_config, dump_toml, fingerprint, load_config
from streams import codec
from streams.errors import ConfigError, Fenced
from streams.events import RunStarted
from streams.open import open_log
from streams.topics import Topics

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


def millstream(*args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        **options,
    )


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    file = tmp_path / "my.toml"
    file.write_text(
        f"""
[run]
name = "first"
dir = "{tmp_path}/run"
[log]
partitions = 2
[data]
path = "{tmp_path}/prompts.jsonl"
[reward]
function = "exact"
[rollout]
backend = "scripted"
[trainer]
backend = "scalar"
"""
    )
    return file


def start_ledger(config_file: Path, **changes: str) -> None:
    """What a trainer leaves behind that has begun the run."""
    config = load_config(config_file)
    topics = Topics(config.run.name, config.log.partitions)
    started = RunStarted(
        run=config.run.name,
        config_fingerprint=changes.get("config_fingerprint", fingerprint(config)),
        partitions=config.log.partitions,
        rollout_batch_size=config.trainer.rollout_batch_size,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        seed=config.run.seed,
        started_ms=1,
    )
    with open_log(config.log.url) as log:
        topics.create(log)
        log.append(topics.name("ledger"), 0, [codec.encode(started, producer="trainer")])


# ---------------------------------------------------------------- help and exit codes
def test_help_lists_every_command_and_is_quick():
    began = time.monotonic()
    result = millstream("--help")
    assert result.returncode == 0
    assert time.monotonic() - began < 2
    for name in ("demo", "run", "serve", "topics", "tail", "verify", "config"):
        assert f"\n    {name} " in result.stdout
    for code in (DONE, FAILED, WRONG_USAGE, FENCED, INTERRUPTED):
        assert re.search(rf"exit codes:.*\b{code} \w", result.stdout, re.DOTALL), code


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.NAME)
def test_each_command_explains_itself_with_an_example(command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([command.NAME, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert command.DESCRIPTION in text
    assert f"example:\n  millstream {command.NAME}" in text


def test_the_command_line_and_its_log_tools_need_no_torch():
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from engine.cli import main\n"
        "import engine.commands.rundir, engine.launch.local, engine.config, replay.topics\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: sys.exit(end.code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("millstream ")


@pytest.mark.parametrize(
    "args",
    [
        ["fly"],
        [],
        ["serve", "cook", "my.toml"],
        ["serve", "rollout", "my.toml", "--replica", "2/2"],
        ["run", "my.toml", "--threads", "0"],
        ["demo", "--slow-tools", "nan"],
        ["demo", "--task", "reverse", "--slow-tools", "0.9"],
        ["topics"],
    ],
)
def test_wrong_usage_exits_with_2(args: list[str]):
    assert millstream(*args).returncode == 2


def test_replicas_are_counted_from_0():
    assert parse_replica("0/1") == (0, 1)
    assert parse_replica("2/3") == (2, 3)
    for wrong in ("3/3", "0/0", "1", "a/b", "-1/2", "1/2/3", ""):
        with pytest.raises(Exception, match=r"I/N|of 3 replicas|at least 1"):
            parse_replica(wrong)


def test_an_unknown_setting_exits_with_2_and_names_it(config_file: Path):
    result = millstream("config", str(config_file), "--set", "staleness.max_weight_stalenes=2")
    assert (result.returncode, result.stdout) == (2, "")
    assert "staleness.max_weight_stalenes" in result.stderr
    assert "max_weight_staleness" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_fenced_process_exits_with_1_and_its_sentence(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fenced(args):
        raise Fenced("epoch 9 has taken over run first; this trainer (epoch 4) stops at step 3")

    monkeypatch.setattr("engine.commands.config.execute", fenced)
    assert main(["config", str(config_file)]) == 1
    assert capsys.readouterr().err == (
        "millstream: epoch 9 has taken over run first; this trainer (epoch 4) stops at step 3\n"
    )


def test_a_reader_that_closes_the_pipe_early_is_no_error(config_file: Path):
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "engine.cli", "config", str(config_file)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (0, "")


# ---------------------------------------------------------------- config and run directories
def test_config_prints_what_load_config_reads_back(config_file: Path, tmp_path: Path):
    result = millstream("config", str(config_file), "--set", "trainer.lr=0.5")
    assert result.returncode == 0
    assert result.stderr == ""
    printed = tmp_path / "printed.toml"
    printed.write_text(result.stdout)
    assert load_config(printed) == load_config(config_file, ["trainer.lr=0.5"])


def test_a_run_directory_stands_for_its_configuration(config_file: Path):
    config = load_config(config_file)
    run_dir = rundir.adopt(config)
    result = millstream("config", str(run_dir))
    assert (result.returncode, result.stdout) == (0, dump_toml(config))


def test_a_run_directory_of_another_configuration_is_refused_with_what_differs(config_file: Path):
    run_dir = rundir.adopt(load_config(config_file))
    before = (run_dir / "config.toml").read_text()
    result = millstream(
        "run", str(config_file), "--set", "trainer.lr=0.5", "--set", "rollout.max_concurrency=3"
    )
    assert result.returncode == 2
    assert (
        f"{run_dir} is a run of another configuration:\n  trainer.lr: the run has 1e-06, asked for 0.5\n"
        in result.stderr
    )
    assert "max_concurrency" not in result.stderr, "how fast it works is not part of what the run is"
    assert (run_dir / "config.toml").read_text() == before


def test_a_ledger_begun_by_another_configuration_is_refused(config_file: Path):
    start_ledger(config_file, config_fingerprint="0123456789abcdef")
    with pytest.raises(
        ConfigError, match="its ledger was begun by run 'first' with the fingerprint 0123456789ab"
    ):
        rundir.adopt(load_config(config_file))


def test_the_same_run_with_other_speeds_and_limits_is_taken_up_again(config_file: Path):
    rundir.adopt(load_config(config_file))
    start_ledger(config_file)
    changed = load_config(
        config_file, ["staleness.max_weight_staleness=4", "run.steps=500", "supervisor.max_restarts=9"]
    )
    run_dir = rundir.adopt(changed)
    assert load_config(run_dir) == changed


def test_a_log_inside_one_process_is_refused_for_a_run_of_several(config_file: Path):
    result = millstream("run", str(config_file), "--set", "log.url=memory://x")
    assert result.returncode == 2
    assert 'log.url = "memory://x" lives inside one process' in result.stderr


def test_a_missing_dataset_is_refused_before_anything_is_started(config_file: Path, tmp_path: Path):
    (tmp_path / "prompts.jsonl").unlink()
    result = millstream("run", str(config_file))
    assert result.returncode == 2
    assert "no such file" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("reward.function=exat", "did you mean 'exact'"),
        ("reward.function=no_such_module:f", "no module no_such_module"),
        ("rollout.generate=os:getcwd", "needed (context, task, index)"),
        ('collector.filters=["zero_varianse"]', "did you mean 'zero_variance'"),
        (
            "data.prompt_key=question",
            "none of its rows can be used; the first: prompts.jsonl row 0: needs a key",
        ),
        ("eval.path=/nowhere.jsonl", 'eval.path = "/nowhere.jsonl": no such file'),
    ],
)
def test_what_no_daemon_could_use_is_refused_before_the_directory_is_taken(
    setting: str, words: str, config_file: Path, tmp_path: Path
):
    result = millstream("run", str(config_file), "--set", setting)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert not (tmp_path / "run").exists()


def test_what_an_imported_module_prints_does_not_hide_the_problem(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "noisy_rewards.py").write_text(
        "import sys\nprint('hello')\nprint('noise', file=sys.stderr)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = millstream("run", str(config_file), "--set", "reward.function=noisy_rewards:f")
    assert result.returncode == 2
    assert "noisy_rewards has no 'f'" in result.stderr and "noise\n" not in result.stderr


@pytest.mark.parametrize("command", ["run", "serve collector"])
def test_a_run_directory_that_cannot_be_made_is_said_without_a_traceback(
    command: str, config_file: Path, tmp_path: Path
):
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        result = millstream(*command.split(), str(config_file), "--set", f"run.dir={run_dir}")
        assert result.returncode == 2
        assert f'run.dir = "{run_dir}": ' in result.stderr and "Traceback" not in result.stderr


def test_differences_name_paths_that_moved_out_of_the_run_directory(tmp_path: Path):
    def config(data: str, run_dir: str):
        return build_config(
            {
                "run": {"dir": run_dir},
                "data": {"path": data},
                "reward": {"function": "exact"},
                "rollout": {"backend": "scripted"},
                "trainer": {"backend": "scalar"},
            }
        )

    assert (
        rundir.differences(config("/a/run/data.jsonl", "/a/run"), config("/b/run/data.jsonl", "/b/run")) == []
    )
    assert rundir.differences(
        config("/a/run/data.jsonl", "/a/run"), config("/elsewhere.jsonl", "/b/run")
    ) == ["data.path: the run has 'data.jsonl', asked for '/elsewhere.jsonl'"]


# ---------------------------------------------------------------- serve
def serve(role: str, config_file: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine.cli", "serve", role, str(config_file), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def until_it_works(process: subprocess.Popen[str], config_file: Path) -> None:
    """Wait until the feeder has dispatched something."""
    config = load_config(config_file)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if common.has_log(config):
            with common.open_for_reading(config) as log:
                if any(log.end("first.tasks", p) for p in range(2) if "first.tasks" in log.topics()):
                    assert Path(config.run.dir, "config.toml").is_file(), "it leaves its configuration"
                    return
        time.sleep(0.05)
    raise AssertionError(f"nothing was dispatched within {DEADLINE_S} s")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_daemon_ends_cleanly_on_a_signal(number: signal.Signals, code: int, config_file: Path):
    process = serve("feeder", config_file)
    try:
        until_it_works(process, config_file)
        process.send_signal(number)
        process.send_signal(number)  # impatience is harmless
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err


def test_a_second_holder_of_a_share_is_refused_with_exit_code_1(config_file: Path):
    start_ledger(config_file)
    config = load_config(config_file)
    with open_log(config.log.url) as log:
        log.join("first.collector", "first.rewards", replica=0, replicas=1)
        process = serve("collector", config_file)
        try:
            _, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "millstream: " in err and "Traceback" not in err


def test_a_trainer_that_is_fenced_says_by_whom_and_exits_with_3(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fenced(*args, **kwargs) -> int:
        raise Fenced("epoch 9 (trainer-4711-ab on host-b) has taken over run first")

    monkeypatch.setattr("engine.roles.serve", fenced)
    monkeypatch.setattr(
        common.StopFlag, "install", lambda flag: flag
    )  # signals are this process's own business
    assert main(["serve", "trainer", str(config_file)]) == 3
    assert "millstream: epoch 9 (trainer-4711-ab on host-b)" in capsys.readouterr().err


# ---------------------------------------------------------------- config
def test_the_options_of_the_kafka_client_are_shown_and_the_secrets_are_not(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    settings = [
        "log.url=kafka://broker:9092/team.",
        "log.kafka.security_protocol=SASL_SSL",
        "log.kafka.sasl_username=me",
        "log.kafka.sasl_password=env:KAFKA_PASSWORD",
    ]
    shown = millstream("config", str(config_file), *(arg for each in settings for arg in ("--set", each)))
    assert shown.returncode == 0, shown.stderr
    for line in ("#   acks = all", "#   enable_idempotence = True", "#   enable_auto_commit = False"):
        assert line in shown.stdout
    assert "# ingest: process in the trainer, thread elsewhere" in shown.stdout
    assert "hunter2" not in shown.stdout and 'sasl_password = "env:KAFKA_PASSWORD"' in shown.stdout
    read_back = config_file.with_name("back.toml")
    read_back.write_text(shown.stdout)
    assert load_config(read_back) == load_config(config_file, settings)


# ---------------------------------------------------------------- topics
def test_topics_shows_offsets_and_lag(config_file: Path):
    start_ledger(config_file)
    result = millstream("topics", str(config_file))
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["TOPIC", "PARTITION", "START", "END", "RECORDS"]
    assert ["first.tasks", "1", "0", "0", "0"] in lines
    assert ["first.ledger", "0", "0", "1", "1"] in lines


def test_topics_can_be_made_and_are_then_found(config_file: Path, tmp_path: Path):
    made = millstream("topics", str(config_file), "--create")
    assert made.returncode == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    assert lines[0] == ["TOPIC", "PARTITIONS", "RECORDS", "RESULT"]
    assert ["first.tasks", "2", "by", "retention", "made"] in lines
    assert ["first.ledger", "1", "kept", "made"] in lines and len(lines) == 9
    found = millstream("topics", str(config_file), "--create", "--json")
    assert {json.loads(line)["result"] for line in found.stdout.splitlines()} == {"was there"}
    other = millstream("topics", str(config_file), "--create", "--set", "log.partitions=3")
    assert other.returncode == 2
    assert "'first.tasks' has 2 partitions" in other.stderr and "choose another run.name" in other.stderr


@pytest.mark.parametrize("command", [["topics"], ["verify"], ["tail"]], ids=lambda args: args[0])
def test_a_run_that_has_no_log_yet_is_said_to_be_not_started(
    command: list[str], config_file: Path, tmp_path: Path
):
    result = millstream(*command, str(config_file), *(["ledger"] if command == ["tail"] else []))
    assert result.returncode == 2
    assert f"no log at {tmp_path}/run/log: this run has not been started" in result.stderr
    assert not (tmp_path / "run").exists(), "looking leaves nothing behind"


def test_a_stop_while_a_daemon_still_loads_ends_it_at_once():
    """Importing torch takes seconds, in which nobody looks at the flag."""
    code = (
        "import sys, time; from engine.commands.common import StopFlag;"
        "StopFlag(exits_at_start=True).install(); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 130
