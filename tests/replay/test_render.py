"""How an entry looks: as a line, with colours, as JSON, in kcat's format."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from consumers.telemetry import SUMS
from replay import render
from replay.records import Entry, entry_of, sealed
from replay.render import Look
from streams import codec, trajectory
from streams.errors import ConfigError
from streams.events import (
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    DeadLetter,
    Drop,
    Event,
    GroupsDropped,
    InputProgress,
    LimitChanged,
    RolloutFailed,
    StepMeasured,
    TrajectoryFinished,
    tag_of,
)
from streams.log import NewRecord, Record
from streams.trajectory import SampleData
from tests.support import recorded as run
from tests.support.recorded import recorded

AT = 1793527200250
WORDS = ["<pad>", "the", "answer", "is", "7", "no", "try", "again"]


def entry_with(record: NewRecord, offset: int = 0) -> Entry:
    return entry_of(Record("run.t", 0, offset, AT, record.headers, record.value))


def entry(event: Event) -> Entry:
    return entry_with(codec.encode(event, producer="test", timestamp_ms=AT))


def line_of(event: Event, look: Look = render.PLAIN) -> str:
    return render.line("t", 0, entry(event), look)


def json_of(event: Event) -> dict:
    return msgspec.json.decode(render.as_json("run.t", 0, entry(event)))


def as_words(ids) -> str:
    return " ".join(WORDS[each] for each in ids)


# ---------------------------------------------------------------- a line
def test_a_line_names_time_place_type_and_what_is_not_a_default():
    assert line_of(run.task(3)) == (
        "2026-11-01T10:00:00.250Z t/0:0 task_dispatched group_id=0-3 seq=3 data_epoch=0 row=3 "
        "n_samples=2 prompt=p next_seq=4"
    )


def test_a_trajectory_is_one_short_line_with_the_first_of_its_columns():
    assert line_of(run.finished(3, 1)) == (
        "2026-11-01T10:00:00.250Z t/0:0 trajectory_finished uid=0-3/1/0 prompt_ids=[1,2] response_ids=[3,4,5,6,…5] "
        "trained=4/5 versions=e1v1×5 finish_reason=stop response=7 engine=rollout-0 logprobs=[-0.1,-0.2,-0.4,-0.5]"
    )


@pytest.mark.parametrize(
    "ids", [[1, 65_535, 2, 3, 4], [70_000, 5, 250_000, 131_072, 9], [300_000, 2, 1 << 30, 4, 5]]
)
@pytest.mark.parametrize("form", ["float32", "fixed1024"])
def test_the_first_values_are_right_in_every_column_format(ids: list[int], form):
    sample = SampleData(
        uid="0-0/0/0",
        group_id="0-0",
        seq=0,
        index=0,
        attempt=0,
        n_samples=1,
        task_offset=0,
        prompt_ids=[1],
        response_ids=ids,
        logprobs=[-0.5, -0.25, -2.0, -1.5, -3.0],
        loss_mask=[1] * 5,
        versions=[(1, 0, 2), (1, 1, 3)],
        finish_reason="stop",
    )
    line = line_of(trajectory.pack(sample, logprob_format=form))
    assert f"response_ids=[{ids[0]},{ids[1]},{ids[2]},{ids[3]},…5] trained=5/5 versions=e1v0×2,e1v1×3" in line
    assert line.endswith("logprobs=[-0.5,-0.25,-2,-1.5,…5]")


def test_a_damaged_column_is_shown_verbatim():
    sample = run.finished(3, 1)
    assert isinstance(sample, TrajectoryFinished)
    damaged = msgspec.structs.replace(sample, response_ids=b"\x01\x02\x09", loss_mask=b"")
    line = line_of(damaged)
    assert r"response_ids=<token ids: unknown column format 9> b'\x01\x02\t'" in line
    assert "trained=<mask: empty column" in line
    assert json_of(damaged)["event"]["response_ids"].startswith("<token ids: unknown column format 9>")


def test_a_cut_says_how_many_and_how_old():
    line = line_of(run.cut(2, [2, 3], [3, 2]))
    assert (
        "step=2 version=1 epoch=1 limit=1 groups=[0-2,0-3] samples=4 tokens=16 reward=0.5 staleness=0..1"
        in line
    )


def measured(sums: bytes, names=SUMS) -> StepMeasured:
    return StepMeasured(
        step=4,
        epoch=1,
        version=3,
        names=list(names),
        n_samples=2,
        sums=sums,
        values={"loss": 0.25, "lr": 1e-4},
    )


def test_a_measured_step_shows_gauges_and_no_bytes():
    # two samples of 4 and 6 tokens: Σ|lr| 1 and 3, w all 1, two of ten tokens clipped
    rows = [[4, 0, 1, 0, 4, 4, 0, 0, 1, 2], [6, 0, 3, 0, 6, 6, 0, 0, 1, 0]]
    rows = [row + [0] * (len(SUMS) - len(row)) for row in rows]
    event = measured(np.array(rows, dtype="<f8").tobytes())
    assert line_of(event).endswith(
        "step_measured step=4 epoch=1 version=3 samples=2 mean_abs_log_ratio=0.4 kl_k3=0 ess_token=1 "
        "clip_fraction=0.2 loss=0.25 lr=0.0001"
    )
    assert json_of(event)["event"]["sums"] == rows


def test_a_measured_step_that_does_not_fit_says_so():
    line = line_of(measured(b"\0" * 24))
    wrong = f"sums=<sums: 24 bytes are not 2 samples of {len(SUMS)} float64 values>"
    assert wrong in line and "loss=0.25" in line


def test_a_measured_step_with_other_columns_shows_what_the_backend_said():
    line = line_of(measured(np.zeros((2, 1)).tobytes(), names=["novel"]))
    assert line.endswith("samples=2 loss=0.25 lr=0.0001")


def test_every_event_type_of_a_run_has_a_line_and_a_json_object():
    log, topics = recorded()
    for word in ("tasks", "trajectories", "groups", "ledger", "fleet"):
        topic = topics.name(word)
        for partition in range(topics.count(word)):
            for record in log.read(topic, partition, 0).records:
                shown = entry_of(record)
                assert shown.event is not None
                assert f" {tag_of(shown.event)} " in render.line(word, partition, shown)
                made = msgspec.json.decode(render.as_json(topic, partition, shown))
                assert (made["type"], made["partition"], made["offset"]) == (
                    tag_of(shown.event),
                    partition,
                    record.offset,
                )


# ---------------------------------------------------------------- verbatim
LEASE = {"type": "lease", "holder": "engine-0", "until": 17}


def test_an_unknown_type_is_shown_verbatim():
    lease = entry_with(NewRecord(msgspec.msgpack.encode(LEASE)))
    assert '?lease {"type": "lease", "holder": "engine-0", "until": 17}' in render.line("t", 0, lease)
    assert msgspec.json.decode(render.as_json("t", 0, lease))["event"] == LEASE
    assert msgspec.json.decode(render.formatter("%s").show("t", 0, lease)) == LEASE


def test_an_unknown_type_may_hold_what_json_has_no_form_for():
    held = {(1, 2): msgspec.msgpack.Ext(5, b"x")}
    lease = entry_with(NewRecord(msgspec.msgpack.encode({"type": "lease", "held": held})))
    assert r"held\x81\x92\x01\x02" in render.line("t", 0, lease), "as its bytes"
    assert list(msgspec.json.decode(render.as_json("t", 0, lease))["event"]["held"]) == ["(1, 2)"]
    assert '"(1, 2)"' in render.formatter("%s").show("t", 0, lease)


def test_an_unknown_type_cannot_reach_the_terminal():
    evil = entry_with(NewRecord(msgspec.msgpack.encode({"type": "a\x1b[2J", "b": "\x9b2J\u2028"})))
    assert render.line("t", 0, evil).isprintable()


def test_a_record_that_cannot_be_read_is_shown_verbatim():
    broken = entry_with(NewRecord(b"\xc1ga\x1b[2J"))
    line = render.line("metrics", 0, broken)
    assert r"UNREADABLE" in line and r"raw=b'\xc1ga\x1b[2J'" in line
    assert line.isprintable(), "nothing that a terminal acts on"
    assert msgspec.json.decode(render.as_json("t", 0, broken))["raw"] == "wWdhG1sySg=="


def test_a_record_of_a_newer_schema_says_what_to_do():
    newer = entry_with(NewRecord(b"\x80", (("schema", b"9.0"), ("type", b"metrics"))))
    line = render.line("metrics", 0, newer)
    assert "UNREADABLE SchemaTooNew: schema 9.0 is newer than this reader's" in line
    assert r"update millstream to read this log raw=b'\x80'" in line


def test_a_dead_letter_shows_the_refused_bytes_and_headers():
    letter = DeadLetter(
        topic="run.tasks",
        partition=1,
        offset=4,
        raw=b"\xc1ga",
        raw_headers=[("id", b"0-3")],
        stage="rollout",
        reason="undecodable",
        detail="not MessagePack",
    )
    line = line_of(letter)
    assert "at=run.tasks/1:4 stage=rollout reason=undecodable" in line
    assert 'detail="not MessagePack"' in line
    assert r"raw=b'\xc1ga'" in line


def test_control_characters_in_a_text_are_escaped():
    line = line_of(msgspec.structs.replace(run.task(0), prompt="a\x1b[2J\nb"))
    assert "\x1b" not in line and "\n" not in line


def test_a_time_beyond_all_years_is_shown_as_a_number():
    far = entry_of(Record("t", 0, 0, 10**17, (), b"\xc1"))
    assert render.line("t", 0, far).startswith("@100000000000000.000Z t/0:0 UNREADABLE")


# ---------------------------------------------------------------- on a terminal
def test_columns_are_filled_up_to_their_width():
    line = line_of(LimitChanged(limit=2), Look(place_width=12, type_width=19))
    assert line == "2026-11-01T10:00:00.250Z t/0:0        limit_changed       limit=2"


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_colours_tell_kinds_and_values_apart_and_change_no_letter():
    look = Look(is_coloured=True)
    failed = RolloutFailed(
        uid="0-3/1/0", group_id="0-3", seq=3, index=1, attempt=0, n_samples=2, task_offset=0, reason="aborted"
    )
    for event, colour in ((run.task(3), 32), (failed, 31), (LimitChanged(limit=2), 33)):
        line = line_of(event, look)
        assert f"\x1b[1m\x1b[{colour}m{tag_of(event)}\x1b[0m" in line
        assert without_colour(line) == line_of(event)
    line = line_of(run.task(3), look)
    assert "\x1b[36m3\x1b[0m" in line, "numbers"
    assert "\x1b[32m0-3\x1b[0m" in line, "texts"


# ---------------------------------------------------------------- tokens as text
def test_with_a_tokenizer_tokens_are_text_and_the_environments_are_told_apart():
    line = line_of(run.finished(3, 1), Look(text=lambda ids: "".join(chr(96 + each) for each in ids)))
    assert "prompt_text=ab response_text=cd⟦e⟧fg trained=4/5" in line
    assert "_ids=" not in line


def test_with_colours_the_environments_tokens_have_one_of_their_own():
    line = line_of(run.finished(3, 1), Look(is_coloured=True, text=as_words))
    assert "\x1b[33m⟦no⟧\x1b[0m" in line
    assert 'response_text="is 7⟦no⟧try again"' in without_colour(line)


def test_of_a_long_text_start_and_end_are_shown():
    look = Look(text=lambda ids: "a" * 1000 + "z")
    assert f'prompt_text="{"a" * 200}…601 more…{"a" * 199}z" ' in line_of(run.finished(3, 1), look)


def test_json_with_a_tokenizer_has_the_text_in_stretches():
    shown = msgspec.json.decode(render.as_json("run.t", 0, entry(run.finished(3, 1)), as_words))
    assert shown["text"] == {
        "prompt": "the answer",
        "response": [
            {"trained": True, "text": "is 7"},
            {"trained": False, "text": "no"},
            {"trained": True, "text": "try again"},
        ],
    }
    assert shown["event"]["response_ids"] == [3, 4, 5, 6, 7], "and the ids as ever"


# ---------------------------------------------------------------- JSON
def test_json_has_columns_whole_and_parts_by_name():
    sample = run.finished(3, 1)
    assert isinstance(sample, TrajectoryFinished)
    shown = json_of(msgspec.structs.replace(sample, progress={"tasks": InputProgress(7, 5, [(6, 7)])}))[
        "event"
    ]
    assert shown["response_ids"] == [3, 4, 5, 6, 7]
    assert shown["loss_mask"] == [True, True, False, True, True]
    assert shown["logprobs"] == pytest.approx([-0.1, -0.2, -0.4, -0.5])
    assert shown["progress"] == {"tasks": {"read_to": 7, "low_water": 5, "finished": [[6, 7]]}}
    cut = json_of(run.cut(2, [2], [3, 2]))["event"]
    assert cut["groups"][0]["group_id"] == "0-2"
    assert cut["groups"][0]["members"][1]["uid"] == "0-2/1/0"
    dropped = GroupsDropped(epoch=1, version=2, frontier=3, drops=[Drop("0-4", 4, "stale", 3)])
    assert json_of(dropped)["event"]["drops"] == [
        {"group_id": "0-4", "seq": 4, "reason": "stale", "staleness": 3, "detail": ""}
    ]


# ---------------------------------------------------------------- kcat's format
def test_the_format_string_is_kcats():
    task = entry(run.task(0))
    assert task.record is not None
    assert render.formatter(r"%t %p %o %k %T %S %%\t%h\n\\").show("run.tasks", 0, task) == (
        f"run.tasks 0 0 0-0 {AT} {len(task.record.value)} %\t"
        f"schema={SCHEMA_MAJOR}.{SCHEMA_MINOR},type=task_dispatched,by=test,id=0-0\n\\"
    )
    event = msgspec.json.decode(render.formatter("%s").show("run.tasks", 0, task))
    assert (event["type"], event["group_id"], event["seq"]) == ("task_dispatched", "0-0", 0)


def test_all_but_the_event_is_shown_of_a_sealed_entry():
    made = codec.encode(run.task(0), producer="test")
    closed = sealed(Record("run.tasks", 1, 7, AT, made.headers, made.value))
    form = render.formatter("%t/%p:%o %k %T %S %h")
    assert not form.needs_event and render.formatter("%o %s").needs_event
    assert form.show("run.tasks", 1, closed).startswith(f"run.tasks/1:7 0-0 {AT} {len(made.value)} schema=")


def test_a_stretch_that_the_log_cannot_read_has_a_place_and_no_more():
    damage = Entry(7, 0, None, "run.t/0: record 7 is damaged")
    assert render.formatter("%o|%k|%S|%h").show("run.t", 0, damage) == "7||0|"
    assert "run.t/0: record 7 is damaged" in render.line("t", 0, damage)


@pytest.mark.parametrize("template", ["%z", "%", "\\", "\\q"])
def test_an_unknown_format_sign_is_refused(template: str):
    with pytest.raises(ConfigError, match="is unknown; known are"):
        render.formatter(template)
