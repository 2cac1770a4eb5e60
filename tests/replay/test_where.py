"""Conditions: what they mean, what they are asked of, and what is refused by its place."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from consumers.telemetry import SUMS
from replay.records import Entry, entry_of, sealed
from replay.where import names_of, parse_where
from streams import codec
from streams.errors import ConfigError
from streams.events import DeadLetter, Event, RewardAssigned, StepMeasured, TrajectoryFinished
from streams.log import NewRecord, Record
from tests.support import recorded as run
from tests.support.events import rewarded

ROW = {
    "reward": 1.0,
    "step": 7,
    "last": False,
    "reason": "stale",
    "metadata": {"level": 3, "a key": "x", "tags": ["hard", "long"]},
    "members": [{"uid": "0-1/0/0", "reward": 0.0}, {"uid": "0-1/1/0", "reward": 1.0}],
    "versions": [(1, 4, 100), (1, 5, 20)],
    "raw": b"\xc1ga",
    "empty": [],
    "nothing": None,
}


@pytest.mark.parametrize(
    "text",
    [
        "reward == 1",
        "reward >= 0.5 and step < 8",
        "reward < 0.5 or step == 7",
        "not reward < 0.5",
        "not (reward < 0.5 or step != 7)",
        "step > -1",
        "step == 7e0",
        "last == false",
        "not last",
        "reason == 'stale'",
        'reason != "future"',
        "reason < 'tale'",
        r"reason =~ '^st.le$'",
        "raw =~ 'xc1ga$'",
        "reason in ['stale', 'future']",
        "reason not in ['future']",
        "'tal' in reason",
        "'hard' in metadata.tags",
        "metadata.level == 3",
        "metadata['a key'] == 'x'",
        "metadata['tags'][1] == 'long'",
        "metadata.tags.0 == 'hard'",
        "metadata.tags == ['hard', 'long']",
        "'0-1/1/0' in members.uid",
        "members.reward == [0.0, 1.0]",
        "members.1.reward == 1",
        "len(members) == 2",
        "len(reason) > 4 and len(metadata) == 3",
        "versions.1 == [1, 5, 20]",
        "[1, 4, 100] in versions",
        "len(empty) == 0",
        "members",
        "step == step",
        # `and` binds closer than `or`, `not` closer than both
        "true or false and false",
        "not false and true",
        "not not true",
    ],
)
def test_conditions_that_hold(text: str):
    assert parse_where(text).matches_row(ROW)


@pytest.mark.parametrize(
    "text",
    [
        "reward == 0",
        "reason == 'fresh'",
        "reason == step",
        "reason > 3",
        "3 in reason",
        "reason in step",
        "step =~ '7'",
        "not metadata",
        "len(step) == 1",
        "metadata.level.deeper == 3",
        "members.7.reward == 1",
        "members.upper == 1",
        "reason.upper",
        "empty",
    ],
)
def test_conditions_that_do_not_hold(text: str):
    assert not parse_where(text).matches_row(ROW)


@pytest.mark.parametrize("operator", ["==", "!=", "<", "<=", ">", ">=", "in", "not in"])
def test_a_missing_field_compares_false_with_everything(operator: str):
    right = "[1, null]" if "in" in operator else "1"
    assert not parse_where(f"missing {operator} {right}").matches_row(ROW)
    assert not parse_where(f"nothing {operator} {right}").matches_row(ROW)


def test_null_asks_whether_a_field_is_missing():
    assert parse_where("missing == null and nothing == null and null != reason").matches_row(ROW)
    assert not parse_where("missing != null or reason == null").matches_row(ROW)


def test_a_column_whose_name_holds_dots_is_found_in_a_row():
    row = {"components.format": 0.5, "components": {"answer": 1.0}}
    assert parse_where("components.format == 0.5 and components.answer == 1").matches_row(row)


@pytest.mark.parametrize(
    ("text", "place", "complaint"),
    [
        ("", 1, "the condition is empty"),
        ("  ", 1, "the condition is empty"),
        ("reward = 1", 8, "'=' has no meaning here; write == to compare"),
        ("a && b", 3, "write and"),
        ("a || b", 3, "write or"),
        ("!a", 1, "write not"),
        ("a == 'open", 6, "this text has no end"),
        ("reward >", 9, "needed a value, got the end"),
        ("and a", 1, "needed a value, got 'and'"),
        ("a b", 3, "needed and, or, or the end, got 'b'"),
        ("(a or b", 8, "needed ')', got the end"),
        ("a < b < c", 3, "two comparisons in a row; write a < x and x < b"),
        ("a in 5", 6, "in wants a list, a text or a field on its right"),
        ("a =~ b", 6, "=~ wants a text, the regular expression"),
        ("a =~ '('", 6, "not a regular expression"),
        ("a < null", 3, "null is only compared with == and !=, not with <"),
        ("a in [1, b]", 10, "needed a number, a text, true, false or null, got 'b'"),
        ("len a", 5, "needed '(', got 'a'"),
        ("a[b] == 1", 3, "needed a text or a number, as in metadata['level'], got 'b'"),
        ("f(x)", 2, "needed and, or, or the end, got '('"),
        ("(" * 51 + "a" + ")" * 51, 51, "more than 50 brackets within one another"),
        ("[" * 5000, 51, "more than 50 brackets within one another"),
    ],
)
def test_what_has_no_meaning_is_refused_by_its_place(text: str, place: int, complaint: str):
    with pytest.raises(ConfigError) as refusal:
        parse_where(text)
    assert f", character {place}: " in str(refusal.value)
    assert complaint in str(refusal.value)


def test_nothing_of_python_can_be_reached():
    for text in ("reason.__class__ != null", "members.0.__len__ != null", "metadata.keys != null"):
        assert not parse_where(text).matches_row(ROW)
    with pytest.raises(ConfigError):
        parse_where("__import__('os')")


# ---------------------------------------------------------------- over entries
def entry(event: Event, *, partition: int = 1, offset: int = 5) -> Entry:
    made = codec.encode(event, producer="rollout-0", timestamp_ms=1793527200250)
    return entry_of(Record("run.t", partition, offset, 1793527200250, made.headers, made.value))


def test_fields_of_an_event_and_of_its_record():
    verdict = entry(msgspec.structs.replace(rewarded(3, 1, 0, 1.0), components={"format": 0.5}))
    for text in (
        "reward == 1 and components.format == 0.5 and uid == '0-3/1/0'",
        "partition == 1 and offset == 5 and timestamp_ms == 1793527200250",
        "type == 'reward_assigned' and headers.by == 'rollout-0' and headers.id == uid",
        "event.reward == 1",
        "problem == null",
    ):
        assert parse_where(text).matches(verdict), text


def test_the_places_own_names_are_the_records_and_event_reaches_the_events():
    letter = DeadLetter(
        topic="run.tasks", partition=0, offset=4, raw=b"", stage="reward", reason="undecodable"
    )
    assert parse_where("offset == 5 and event.offset == 4 and event.partition == 0").matches(entry(letter))


def test_columns_are_opened_when_they_are_named():
    sample = entry(run.finished(3, 1))
    for text in (
        "len(response_ids) == 5 and 7 in response_ids and prompt_ids == [1, 2]",
        "loss_mask == [true, true, false, true, true]",
        "len(logprobs) == 4 and logprobs.0 < -0.09",
        "versions.0 == [1, 1, 5]",
    ):
        assert parse_where(text).matches(sample), text


def test_a_damaged_column_is_a_missing_field():
    sample = run.finished(3, 1)
    assert isinstance(sample, TrajectoryFinished)
    damaged = entry(msgspec.structs.replace(sample, response_ids=b"\x09"))
    assert parse_where("response_ids == null and uid == '0-3/1/0'").matches(damaged)


def test_the_trainers_sums_are_rows():
    sums = np.arange(2 * len(SUMS), dtype="<f8").reshape(2, -1)
    measured = StepMeasured(
        step=4, epoch=1, version=3, names=list(SUMS), n_samples=2, sums=sums.tobytes(), values={"loss": 0.25}
    )
    assert parse_where(f"len(sums) == 2 and sums.1.0 == {len(SUMS)} and values.loss == 0.25").matches(
        entry(measured)
    )


def test_an_unknown_type_is_asked_by_what_it_holds():
    made = NewRecord(msgspec.msgpack.encode({"type": "lease", "holder": "engine-0", "until": 17}))
    lease = entry_of(Record("run.t", 0, 0, 1, made.headers, made.value))
    assert parse_where("type == 'lease' and until > 16 and event.holder == 'engine-0'").matches(lease)


def test_a_record_that_cannot_be_read_has_a_problem_and_no_fields():
    broken = entry_of(Record("run.t", 0, 3, 1, (), b"\xc1ga"))
    assert parse_where("problem =~ 'CodecError' and offset == 3 and reward == null").matches(broken)
    damage = Entry(7, 0, None, "record 7 is damaged")
    assert parse_where("offset == 7 and partition == null and headers.id == null").matches(damage)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("type == 'reward_assigned' and partition in [0, 1]", False),
        ("headers.by == 'rollout-0' and offset > 3 and timestamp_ms > 5", False),
        ("type == 'reward_assigned' and reward > 0", True),
        ("problem != null", True),
    ],
)
def test_it_knows_whether_the_event_is_needed(text: str, needs: bool):
    assert parse_where(text).needs_event is needs


def test_place_and_headers_are_known_without_decoding():
    made = codec.encode(rewarded(3, 1, 0, 1.0), producer="reward-0")
    closed = sealed(Record("run.t", 2, 9, 5, made.headers, made.value))
    assert parse_where("type == 'reward_assigned' and headers.by == 'reward-0' and offset == 9").matches(
        closed
    )


def test_a_name_that_no_event_has_is_refused_with_the_nearest():
    known = names_of([RewardAssigned])
    parse_where("reward > 0 and event.whatever == 1 and headers.by == 'x' and components.y == 1").check(
        known, "rewards"
    )
    with pytest.raises(ConfigError, match="character 16: no field 'rewrd' in rewards; did you mean 'reward'"):
        parse_where("offset > 1 and rewrd > 0").check(known, "rewards")
    with pytest.raises(ConfigError, match="no field 'xyzzy' in rewards; there are attempt, components"):
        parse_where("xyzzy == 1").check(known, "rewards")
