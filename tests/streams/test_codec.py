"""Records of events: caps, damaged frames, schema changes (cases O10, O11)."""

from __future__ import annotations

import io
import resource

import msgspec
import numpy as np
import pytest
import zstandard

from streams import codec, trajectory
from streams.codec import Known, Unknown
from streams.columns import LogprobFormat
from streams.errors import CodecError, OverCap, SchemaTooNew
from streams.events import (
    EVENT_TYPES,
    DataEnded,
    LimitChanged,
    Metrics,
    Paused,
    Resumed,
    TrajectoryFinished,
    tag_of,
)
from streams.log import Record
from streams.trajectory import SampleData

MIB = 1 << 20


def record(value: bytes, **headers: bytes) -> Record:
    return Record("run.t", 0, 4, 0, tuple(headers.items()), value)


def encoded(event) -> Record:
    made = codec.encode(event, producer="test")
    return Record("run.t", 0, 0, 0, made.headers, made.value)


def test_a_zip_bomb_that_states_its_size_is_refused_before_memory_grows():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 * MIB))
    assert len(bomb) < 8192
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OverCap, match="67108864 bytes once opened, the cap is 16777216"):
        codec.decompress(bomb, cap=16 * MIB)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


def unsized(data: bytes) -> bytes:
    """A frame as a streaming writer makes it: without its size."""
    sink = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(sink, closefd=False) as writer:
        writer.write(data)
    return sink.getvalue()


def test_a_zip_bomb_that_states_no_size_is_refused_as_well():
    with pytest.raises(OverCap, match="grows beyond the cap"):
        codec.decompress(unsized(bytes(64 * MIB)), cap=16 * MIB)


def test_a_frame_without_a_stated_size_opens():
    frame = unsized(b"9 bytes..")
    assert zstandard.frame_content_size(frame) == -1
    assert codec.decompress(frame) == b"9 bytes.."


@pytest.mark.parametrize("frame", [zstandard.compress(b"x" * 4000), unsized(b"x" * 4000)])
def test_a_truncated_frame_is_an_error_and_not_an_empty_value(frame):
    with pytest.raises(CodecError):
        codec.decompress(frame[:-3])


@pytest.mark.parametrize("frame", [zstandard.compress(b"x" * 4000), unsized(b"x" * 4000)])
def test_bytes_after_the_frame_are_an_error(frame):
    with pytest.raises(CodecError):
        codec.decompress(frame + b"tail")


def test_bytes_that_are_no_frame_are_an_error():
    with pytest.raises(CodecError, match="damaged zstd frame"):
        codec.decompress(b"not a frame at all")


def test_a_value_that_is_no_messagepack_is_refused_with_its_reason():
    with pytest.raises(CodecError):
        codec.decode(record(bytes.fromhex("c16761"), type=b"data_ended", schema=b"1.0"))


def test_an_older_reader_passes_over_unknown_types_and_unknown_fields():
    lease = msgspec.msgpack.encode({"type": "lease", "holder": "rollout-3", "until": 12})
    newer = msgspec.msgpack.encode({"type": "data_ended", "count": 7, "added_in_1_1": "x"})
    decoded = [
        codec.decode(encoded(DataEnded(count=1))),
        codec.decode(encoded(Paused(by="me"))),
        codec.decode(record(lease, type=b"lease", schema=b"1.1")),
        codec.decode(encoded(Resumed(by="me"))),
        codec.decode(encoded(LimitChanged(limit=4))),
        codec.decode(record(newer, type=b"data_ended", schema=b"1.1")),
    ]
    assert [type(each) for each in decoded] == [Known, Known, Unknown, Known, Known, Known]
    assert decoded[2] == Unknown("lease", {"type": "lease", "holder": "rollout-3", "until": 12})
    assert decoded[5] == Known(DataEnded(count=7))


def test_a_higher_major_is_refused_by_name():
    swapped = msgspec.msgpack.encode([2, 1])
    with pytest.raises(SchemaTooNew, match=r"schema 2\.0 is newer than this reader's 1\."):
        codec.decode(record(swapped, type=b"data_ended", schema=b"2.0"))


def test_a_lower_major_is_upcast_one_version_at_a_time(monkeypatch):
    monkeypatch.setitem(
        codec.upcasts, (0, "data_ended"), lambda old: {"type": "data_ended", "count": old["n"]}
    )
    value = msgspec.msgpack.encode({"type": "data_ended", "n": 5})
    assert codec.decode(record(value, type=b"data_ended", schema=b"0.9")) == Known(DataEnded(count=5))


def test_an_upcast_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setitem(codec.upcasts, (0, "data_ended"), lambda old: {"type": "data_ended", "count": "many"})
    value = msgspec.msgpack.encode({"type": "data_ended", "n": 5})
    with pytest.raises(CodecError, match="upcast from schema 0"):
        codec.decode(record(value, type=b"data_ended", schema=b"0.9"))


def test_a_header_and_a_value_that_disagree_are_refused():
    value = msgspec.msgpack.encode({"type": "paused", "by": "x"})
    with pytest.raises(CodecError):
        codec.decode(record(value, type=b"resumed", schema=b"1.0"))


def test_a_record_without_headers_is_judged_by_its_value():
    value = msgspec.msgpack.encode({"type": "data_ended", "count": 3})
    assert codec.decode(record(value)) == Known(DataEnded(count=3))
    with pytest.raises(CodecError, match="not an event"):
        codec.decode(record(msgspec.msgpack.encode([1, 2])))


def test_an_unknown_content_encoding_is_refused():
    with pytest.raises(CodecError, match="unknown content encoding"):
        codec.decode(record(b"..", type=b"data_ended", schema=b"1.0", enc=b"brotli"))


def test_large_values_are_compressed_and_headers_stay_short():
    event = Metrics(source="s", values={f"name/{index}": 1.0 for index in range(500)})
    made = codec.encode(event, producer="p" * 200)
    assert dict(made.headers)["enc"] == b"zstd"
    assert len(made.value) < len(msgspec.msgpack.encode(event))
    assert sum(len(name) + len(value) for name, value in made.headers) < 300
    assert codec.decode(encoded(event)) == Known(event)


def trajectory_record(
    n_tokens: int = 900, form: LogprobFormat = "float32"
) -> tuple[TrajectoryFinished, Record]:
    sample = SampleData(
        uid="0-7/1/0",
        group_id="0-7",
        seq=7,
        index=1,
        attempt=0,
        n_samples=4,
        task_offset=3,
        prompt_ids=np.arange(60),
        response_ids=np.arange(n_tokens) % 97,
        logprobs=-np.random.default_rng(0).exponential(size=n_tokens),
        loss_mask=np.ones(n_tokens, bool),
        versions=[(1, 3, n_tokens)],
        finish_reason="stop",
    )
    event = trajectory.pack(sample, logprob_format=form)
    return event, encoded(event)


def with_header(made: Record, name: str, value: bytes) -> Record:
    return made._replace(headers=tuple({**dict(made.headers), name: value}.items()))


def test_float32_logprobs_follow_the_frame_as_they_are():
    event, made = trajectory_record()
    assert msgspec.structs.fields(TrajectoryFinished)[-1].name == "logprobs"  # so they end the map
    headers = dict(made.headers)
    assert (headers["enc"], headers["raw"]) == (b"zstd", b"3601")
    assert made.value.endswith(event.logprobs)
    opened = zstandard.decompress(made.value[:-3601]) + made.value[-3601:]
    assert opened == msgspec.msgpack.encode(event)
    assert codec.decode(made) == Known(event)
    assert sum(len(name) + len(value) for name, value in made.headers) < 300


def test_fixed_point_logprobs_are_compressed_with_the_rest():
    event, made = trajectory_record(form="fixed1024")
    assert dict(made.headers)["enc"] == b"zstd"
    assert "raw" not in dict(made.headers)
    assert codec.decode(made) == Known(event)


def test_the_cap_counts_the_frame_and_what_follows_it():
    event, made = trajectory_record()
    size = len(msgspec.msgpack.encode(event))
    assert codec.decode(made, cap=size) == Known(event)
    with pytest.raises(OverCap):
        codec.decode(made, cap=size - 1)
    with pytest.raises(OverCap, match="3601 raw bytes"):
        codec.decode(made, cap=3600)


@pytest.mark.parametrize(
    "raw", [b"", b"-1", b"3600", b"3602", b"0", b"9999999", b"1" * 400, b"3601.0", "٣".encode()]
)
def test_a_raw_header_that_does_not_fit_its_value_is_refused(raw):
    with pytest.raises(CodecError):
        codec.decode(with_header(trajectory_record()[1], "raw", raw))


@pytest.mark.parametrize("cut", [slice(1, None), slice(None, -1), slice(None, -3601)])
def test_a_value_with_a_raw_tail_that_lost_bytes_is_refused(cut):
    made = trajectory_record()[1]
    with pytest.raises(CodecError):
        codec.decode(made._replace(value=made.value[cut]))


def test_a_raw_tail_after_a_frame_without_a_stated_size_opens_and_is_capped():
    event, made = trajectory_record()
    plain = msgspec.msgpack.encode(event)
    streamed = made._replace(value=unsized(plain[:-3601]) + plain[-3601:])
    assert codec.decode(streamed, cap=len(plain)) == Known(event)
    with pytest.raises(OverCap):
        codec.decode(streamed, cap=len(plain) - 1)


def test_a_raw_tail_without_a_frame_is_refused():
    value = msgspec.msgpack.encode({"type": "data_ended", "count": 3})
    with pytest.raises(CodecError, match="raw"):
        codec.decode(record(value, type=b"data_ended", schema=b"1.0", raw=b"3"))


def test_every_event_type_has_one_fixed_word():
    assert len(EVENT_TYPES) == len(set(EVENT_TYPES.values()))
    for tag, kind in EVENT_TYPES.items():
        assert tag == tag_of(kind) and tag.islower() and "." not in tag


def test_fields_are_stored_by_name_so_that_swapped_ones_cannot_decode_silently():
    made = codec.encode(DataEnded(count=3, producer="f"), producer="f")
    assert msgspec.msgpack.decode(made.value) == {"type": "data_ended", "count": 3, "producer": "f"}
