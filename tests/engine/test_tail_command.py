"""`millstream tail` as its users meet it: what goes where, what is refused, how it looks on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.cli import DONE, FAILED, WRONG_USAGE, main
from engine.commands import tail as command
from engine.roles import open_run_log
from streams.errors import LogError
from streams.events import Drop, LimitChanged
from streams.log import EventLog, NewRecord, TopicPartition
from tests.engine.tail_support import Run
from tests.support import recorded
from tests.support.events import rewarded

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
AT = 1793527200000  # 2026-11-01T10:00:00Z


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Six verdicts over four partitions, a second between them; a ledger and trajectories; no dead letter."""
    made = Run(tmp_path, partitions=4)
    for seq in range(6):
        made.put("rewards", rewarded(seq, 0, seq, seq / 4), seq % 4, AT + 1000 * seq)
    made.put("trajectories", recorded.finished(0, 0), 0, AT)
    made.put("trajectories", recorded.finished(0, 1), 0, AT + 1)
    made.put("ledger", recorded.cut(1, [0, 1], [1, 1], drops=[Drop("0-4", 4, "stale")]), 0, AT)
    made.put("ledger", LimitChanged(limit=3, by="cli"), 0, AT + 5)
    return made


@pytest.fixture
def tail(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], str]]:
    """`tail(*args)` → exit code, lines of stdout, stderr. Each of them must end: -e is set."""

    def done(*args: str) -> tuple[int, list[str], str]:
        capsys.readouterr()
        try:
            code = main(["tail", str(run.config_file), *args, *(["-e"] if "-c" not in args else [])])
        except SystemExit as end:  # argparse
            code = int(str(end.code))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return done


def places(*args: str) -> tuple[str, ...]:
    return (*args, "-f", "%p:%o\\n")


# ---------------------------------------------------------------- where and how much
def test_partitions_are_named_one_by_one(tail):
    assert tail(*places("rewards", "-p", "0,2"))[1] == ["0:0", "2:0", "0:1"]
    assert tail(*places("rewards", "-p", "3"))[1] == ["3:0"]
    assert tail(*places("rewards", "-p", "2,0,2"))[1] == ["0:0", "2:0", "0:1"]


def test_a_partition_that_does_not_exist_is_refused_with_those_that_do(tail):
    code, _, said = tail("rewards", "-p", "1,7")
    assert (code, "-p 7: tail.rewards has partitions 0 to 3" in said) == (WRONG_USAGE, True)
    code, _, said = tail("ledger", "-p", "1")
    assert (code, "-p 1: tail.ledger has partition 0 alone" in said) == (WRONG_USAGE, True)
    for wrong in ("-1", "x", "0,", ""):
        code, _, said = tail("rewards", f"-p={wrong}")
        assert code == WRONG_USAGE and "is no partition and no list of them, such as 0,2" in said


def test_offsets_last_n_and_times(tail):
    assert tail(*places("rewards", "-o", "1"))[1] == ["0:1", "1:1"]
    assert tail(*places("rewards", "-o", "-1"))[1] == ["2:0", "3:0", "0:1", "1:1"]
    assert tail(*places("rewards", "-o", "@2026-11-01T10:00:04Z"))[1] == ["0:1", "1:1"]
    assert tail(*places("rewards", "-o", f"@{AT + 5000}"))[1] == ["1:1"]
    assert tail(*places("rewards", "-c", "2"))[1] == ["0:0", "1:0"]


def test_an_offset_beyond_every_end_is_refused(tail):
    code, out, said = tail("rewards", "-o", "40")
    assert (code, out) == (WRONG_USAGE, [])
    assert (
        "-o 40: beyond the end of tail.rewards, whose next offset is 2 in partition 0, 2 in partition 1"
        in said
    )


def test_a_time_after_the_end_says_so_and_ends(tail):
    code, out, said = tail("rewards", "-o", "@2026-11-01T11:00:00Z")
    assert (code, out) == (DONE, [])
    assert (
        "rewards has no record of 2026-11-01T11:00:00.000Z or later, its newest is of 2026-11-01T10:00:05.000Z"
    ) in said
    assert "waiting" not in said


def test_follow_and_exit_contradict_each_other(tail):
    code, _, said = tail("rewards", "--follow")
    assert code == WRONG_USAGE and "not allowed with argument" in said


# ---------------------------------------------------------------- what is picked
def test_conditions_pick_records(tail):
    assert tail(*places("rewards", "--where", "reward >= 0.75 and partition != 1"))[1] == ["3:0", "0:1"]
    assert tail(*places("ledger", "--where", "type == 'limit_changed'"))[1] == ["0:1"]
    assert tail(*places("ledger", "--where", "'0-4' in drops.group_id and drops.0.reason == 'stale'"))[1] == [
        "0:0"
    ]
    assert tail(*places("trajectories", "--where", "len(response_ids) == 5 and index == 1"))[1] == ["0:1"]


def test_conditions_that_cannot_match_are_refused(tail):
    code, _, said = tail("rewards", "--where", "rewrd > 1")
    assert code == WRONG_USAGE and "character 1: no field 'rewrd' in rewards; did you mean 'reward'?" in said
    code, _, said = tail("rewards", "--where", "limit == 3")
    assert code == WRONG_USAGE and "no field 'limit' in rewards" in said
    code, _, said = tail("rewards", "--where", "reward = 1")
    assert code == WRONG_USAGE and "character 8: '=' has no meaning here; write == to compare" in said


def test_what_is_not_there_is_said_to_be_missing(tail):
    for args, complaint in (
        (("dead",), "dead is empty"),
        (("rewards", "-p", "2", "-o", "1"), "partition 2 of rewards has no record from 1 on"),
        (("rewards", "-g", "9-9"), "none of the 6 records of rewards that were looked at names group 9-9"),
        (
            ("rewards", "-k", "0-0/7/0", "--where", "reward == 5"),
            "none of the 6 records of rewards that were looked at names sample 0-0/7/0 and meets 'reward == 5'",
        ),
    ):
        code, out, said = tail(*args)
        assert (code, out) == (DONE, [])
        assert complaint in said, said


def test_a_topic_that_does_not_exist_is_refused_with_those_that_do(tail):
    code, _, said = tail("reward")
    assert code == WRONG_USAGE
    assert "no topic 'reward' in this run; it has dead, fleet, groups, ledger, metrics, rewards" in said


@pytest.mark.parametrize(
    ("option", "wrong", "hint"),
    [
        ("-g", "0-3/1", "did you mean -g 0-3, or -k for the sample?"),
        ("-k", "0-3", "did you mean -g 0-3 for its group?"),
        ("-k", "0-3/1", "did you mean -k 0-3/1/0?"),
        ("-k", "0-3/1/x", "a sample is group, index and attempt, as in 0-3/1/0"),
    ],
)
def test_an_id_of_another_form_is_refused_with_what_was_meant(tail, option, wrong, hint):
    code, _, said = tail("rewards", option, wrong)
    assert code == WRONG_USAGE and f"{option} {wrong}: " in said and hint in said


def test_who_waits_for_a_record_that_is_not_there_is_told(run: Run, monkeypatch, capsys):
    waited: list[int] = []

    def wait(log: EventLog, *_: object) -> None:
        waited.append(1)
        if len(waited) == 2:
            raise KeyboardInterrupt

    with run.log() as log:
        monkeypatch.setattr(type(log), "wait", wait)
    main(["tail", str(run.config_file), "rewards", "-g", "9-9"])
    said = capsys.readouterr().err
    assert (
        said.count("none of the 6 records of rewards that were looked at names group 9-9; waiting for one")
        == 1
    )


# ---------------------------------------------------------------- how it looks
def test_lines_are_plain_when_they_do_not_go_to_a_terminal(tail):
    assert tail("ledger", "-o", "1")[1] == [
        "2026-11-01T10:00:00.005Z ledger/0:1 limit_changed limit=3 by=cli"
    ]


def on_terminal(run: Run, *args: str, **environment: str) -> str:
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    try:
        subprocess.run(
            [sys.executable, "-m", "engine.cli", "tail", str(run.config_file), *args, "-e"],
            stdout=theirs,
            cwd=ROOT,
            env={**clean, "TERM": "xterm", **environment},
            timeout=DEADLINE_S,
            check=True,
        )
        os.close(theirs)
        theirs = -1
        shown = b""
        while True:
            try:
                part = os.read(ours, 65_536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not part:
                break
            shown += part
        return shown.decode().replace("\r\n", "\n")
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)


def test_lines_have_colours_and_columns_on_a_terminal(run: Run):
    shown = on_terminal(run, "rewards")
    assert "\x1b[36m" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert plain[0].startswith(
        "2026-11-01T10:00:00.000Z rewards/0:0 reward_assigned     uid=0-0/0/0 reward=0 "
    )
    assert len({line.index("uid=") for line in plain}) == 1, "columns"


def test_no_color_is_obeyed(run: Run, monkeypatch: pytest.MonkeyPatch, tail):
    monkeypatch.setattr(command, "_is_terminal", lambda: True)
    for name, value, is_coloured in (
        ("NO_COLOR", "1", False),
        ("NO_COLOR", "", True),
        ("TERM", "dumb", False),
        ("TERM", "xterm", True),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            patch.delenv("TERM", raising=False)
            patch.setenv(name, value)
            assert ("\x1b[" in tail("ledger")[1][0]) is is_coloured, (name, value)


def test_tokens_are_text_with_a_tokenizer_and_the_environments_told_apart(run: Run, tail):
    words = ["<pad>", "the", "answer", "is", "7", "no", "try", "again"]
    run.configure(f"[rollout.options]\nwords = {json.dumps(words)}\n")
    line = tail("trajectories", "-p", "0", "--tokenizer")[1][0]
    assert 'prompt_text="the answer" response_text="is 7⟦no⟧try again" trained=4/5' in line
    shown = json.loads(tail("trajectories", "-p", "0", "--json", "--tokenizer")[1][0])
    assert shown["text"]["response"][1] == {"trained": False, "text": "no"}
    assert shown["event"]["response_ids"] == [3, 4, 5, 6, 7]


def test_a_tokenizer_and_a_format_do_not_go_together(tail):
    code, _, said = tail("trajectories", "-f", "%s", "--tokenizer")
    assert code == WRONG_USAGE and "--tokenizer goes with lines and with --json, not with -f" in said


# ---------------------------------------------------------------- what is damaged or foreign
def test_a_truncated_log_shows_what_is_left_and_names_what_is_lost(run: Run, tail):
    (segment,) = (run.folder / "log/topics/tail.rewards/0").glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-7])
    code, out, _ = tail("rewards", "-p", "0")
    assert code == DONE
    assert out[0].startswith("2026-11-01T10:00:00.000Z rewards/0:0 reward_assigned")
    assert "rewards/0:1 UNREADABLE tail.rewards/0: record 1 is damaged" in out[1] and len(out) == 2


def test_a_segment_that_is_gone_is_said_to_be_missing(run: Run, tail):
    (segment,) = (run.folder / "log/topics/tail.rewards/0").glob("*.log")
    segment.unlink()
    code, out, _ = tail("rewards", "-p", "0")
    assert code == DONE
    assert len(out) == 1 and "its segment file is missing" in out[0]


def test_records_of_a_newer_schema_say_what_to_do_and_stop_nothing(run: Run, tail):
    run.append("ledger", NewRecord(b"\x80", (("schema", b"9.1"), ("type", b"batch_cut"))))
    run.append(
        "ledger", NewRecord(msgspec.msgpack.encode({"type": "lease", "holder": "x"}), (("schema", b"1.99"),))
    )
    code, out, _ = tail("ledger", "-o", "2")
    assert code == DONE and len(out) == 2
    assert "UNREADABLE SchemaTooNew: schema 9.1 is newer than this reader's" in out[0]
    assert 'ledger/0:3 ?lease {"type": "lease", "holder": "x"}' in out[1]
    assert len(tail("ledger", "--where", "event.holder == 'x'")[1]) == 1


def test_a_log_of_a_newer_format_is_refused_by_name(run: Run, tail):
    file = run.folder / "log/format.json"
    file.write_text(file.read_text().replace('"version": "1.', '"version": "9.'))
    code, out, said = tail("ledger")
    assert (code, out) == (FAILED, [])
    assert "9.0" in said and str(run.folder / "log") in said


# ---------------------------------------------------------------- what it leaves behind
def test_it_leaves_hints_groups_and_files_as_they_were(run: Run, tail):
    with run.log() as log:
        log.commit_hint("tail.collector", {TopicPartition("tail.rewards", 0): 1})
        hints = log.hints("tail.collector")
    before = files(run.folder / "log")
    for args in (("rewards",), ("rewards", "--json"), ("trajectories", "-g", "0-0"), ("ledger", "-o", "-1")):
        assert tail(*args)[0] == DONE
    assert files(run.folder / "log") == before, "not one byte of it"
    with open_run_log(run.config, readonly=True) as log:
        assert (log.groups(), log.hints("tail.collector")) == (["tail.collector"], hints)
        with pytest.raises(LogError):
            log.commit_hint("tail.x", {TopicPartition("tail.rewards", 0): 1})


def files(folder: Path) -> dict[str, bytes]:
    """Contents of all but SQLite's own bookkeeping of who reads (-shm)."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }
