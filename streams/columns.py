"""Heavy arrays as raw little-endian columns: token ids, behaviour log-probs, masks, version runs.

Every column is `bytes` and ends with one format byte, so that a reader never guesses from a length, and the values
before it stay aligned and can be looked at without a copy. L response tokens, T of them sampled by the policy:

    token ids   0: uint16 [L]                       ids below 65,536 (2 bytes a token)
                1: uint16 [L] + packed bits [L] + packed bits [L]   bits 16 and 17 (2.25 bytes a token)
                2: int32 [L]                        anything larger
    log-probs   0: float32 [T]                      exact; the default, they are the behaviour policy
                1: uint16 [T], q = round(-logprob * 1024), cap 65,535   error ≤ 2**-11 above -64
    mask        0: uint32 run lengths, alternating, the first run is of zeros (possibly 0 long)

Log-probs are stored for the T tokens that the mask keeps: what the environment wrote has none, so nothing that must
be zero is stored (and could be something else), and float32 columns are stored uncompressed (streams/codec.py) at
little more than they cost compressed. Zstandard packs the rest. Measured by benchmarks/codec.py: 4.9 … 5.3 B/token
with float32, 1.9 … 2.4 with fixed point. Byte planes of q would be 2 % smaller and cost two strided passes each way.

Most samples have a few thousand tokens, where a numpy call costs as much as its work (0.2 … 1 µs): the functions
below count calls, keep dtypes made beforehand, and build what consists of few runs from bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from streams.errors import CodecError

LogprobFormat = Literal["float32", "fixed1024"]

_IDS_U16, _IDS_U18, _IDS_I32 = 0, 1, 2
_LOGPROBS_F32, _LOGPROBS_FIXED = 0, 1
_TO_STEPS, _FROM_STEPS = np.float32(-1024), np.float32(-1 / 1024)
_FIXED_FLOOR = np.float32(-65_535 / 1024)
_MINUS_INF = -0x800000  # bits of float32 -inf, as int32
MAX_TOKENS = 1 << 26  # of one sample; a mask that claims more is damaged
_UNSIGNED = {
    char: np.dtype(char.upper()) for char in "bhilqBHILQ"
}  # dtype character → the unsigned type of that width
_FORMAT = [bytes([code]) for code in range(3)]
_U16, _I32, _F32 = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<f4")

# (epoch, version, n_tokens): which weights made a stretch of tokens
VersionRun = tuple[int, int, int]


def encode_ids(ids: NDArray[np.integer] | Sequence[int]) -> bytes:
    """Pack token ids (int [L], each in 0 … 2**31-1). Raises CodecError on a negative or larger id."""
    array = np.asarray(ids)
    if array.size == 0:
        return _FORMAT[_IDS_U16]
    unsigned = _UNSIGNED.get(array.dtype.char)
    if unsigned is None:
        raise CodecError(f"token ids must be integers, got dtype {array.dtype}")
    # seen as unsigned, a negative id is larger than any allowed one: one pass checks both ends
    top = _largest(array.view(unsigned))
    if top >= 1 << 31:
        raise CodecError(f"token ids must be in [0, 2**31), got {int(array.min())} … {int(array.max())}")
    if top < 1 << 16:
        return array.astype(_U16).tobytes() + _FORMAT[_IDS_U16]
    if top >= 1 << 18:
        return array.astype(_I32).tobytes() + _FORMAT[_IDS_I32]
    high = (array >> 16).astype(np.uint8)
    low = (array & 0xFFFF).astype(_U16).tobytes()
    return b"".join(
        (low, np.packbits(high & 1).tobytes(), np.packbits(high >> 1).tobytes(), _FORMAT[_IDS_U18])
    )


def decode_ids(column: bytes) -> NDArray[np.int32]:
    """Token ids, int32 [L]. Raises CodecError on a damaged column."""
    code = _code(column, "token ids")
    if code == _IDS_U16:
        return np.frombuffer(column, _U16, _count(column, 2, "token ids")).astype(np.int32)
    if code == _IDS_I32:
        return np.frombuffer(column, _I32, _count(column, 4, "token ids")).astype(np.int32)
    if code == _IDS_U18:
        count = _count_18(column)
        planes = (count + 7) // 8
        ids = np.frombuffer(column, _U16, count).astype(np.int32)
        bit16 = np.unpackbits(np.frombuffer(column, np.uint8, planes, 2 * count), count=count)
        bit17 = np.unpackbits(np.frombuffer(column, np.uint8, planes, 2 * count + planes), count=count)
        return ids | (bit16.astype(np.int32) << 16) | (bit17.astype(np.int32) << 17)
    raise CodecError(f"token ids: unknown column format {code}")


def first_ids(column: bytes, most: int) -> tuple[list[int], int]:
    """The first `most` token ids, and how many there are, without opening the rest. Raises CodecError."""
    code = _code(column, "token ids")
    if code != _IDS_U18:
        width, letter = (2, "H") if code == _IDS_U16 else (4, "I")
        if code not in (_IDS_U16, _IDS_I32):
            raise CodecError(f"token ids: unknown column format {code}")
        count = _count(column, width, "token ids")
        return list(struct.unpack_from(f"<{min(most, count)}{letter}", column)), count
    count = _count_18(column)
    bit16, bit17 = 2 * count, 2 * count + (count + 7) // 8
    ids = list(struct.unpack_from(f"<{min(most, count)}H", column))
    if most <= 8 and count and not column[bit16] | column[bit17]:
        return ids, count
    for place in range(len(ids)):
        byte, shift = place >> 3, 7 - (place & 7)
        ids[place] |= (column[bit16 + byte] >> shift & 1) << 16 | (column[bit17 + byte] >> shift & 1) << 17
    return ids, count


def encode_logprobs(
    logprobs: NDArray[np.floating] | Sequence[float], form: LogprobFormat = "float32"
) -> bytes:
    """Pack log-probs (float [T], each ≤ 0: `trajectory.pack` sees to it). Fixed point clips at -63.999."""
    array = np.ascontiguousarray(logprobs, dtype=_F32)
    if form == "float32":
        return array.tobytes() + _FORMAT[_LOGPROBS_F32]
    if form != "fixed1024":
        raise CodecError(f"log-probs: unknown column format {form!r}; known: float32, fixed1024")
    steps = np.maximum(array, _FIXED_FLOOR)
    steps *= _TO_STEPS
    np.rint(steps, out=steps)
    return steps.astype(_U16).tobytes() + _FORMAT[_LOGPROBS_FIXED]


def decode_logprobs(column: bytes) -> NDArray[np.float32]:
    """Log-probs, float32 [T]; those of a float32 column are read-only. Raises CodecError on a damaged column."""
    code = _code(column, "log-probs")
    if code == _LOGPROBS_F32:
        return np.frombuffer(column, _F32, _count(column, 4, "log-probs"))
    if code == _LOGPROBS_FIXED:
        steps = np.frombuffer(column, _U16, _count(column, 2, "log-probs")).astype(_F32)
        steps *= _FROM_STEPS
        return steps
    raise CodecError(f"log-probs: unknown column format {code}")


def first_logprobs(column: bytes, most: int) -> tuple[list[float], int]:
    """The first `most` log-probs, and how many there are, without opening the rest. Raises CodecError."""
    code = _code(column, "log-probs")
    if code == _LOGPROBS_F32:
        count = _count(column, 4, "log-probs")
        return list(struct.unpack_from(f"<{min(most, count)}f", column)), count
    if code == _LOGPROBS_FIXED:
        count = _count(column, 2, "log-probs")
        return [step / -1024 for step in struct.unpack_from(f"<{min(most, count)}H", column)], count
    raise CodecError(f"log-probs: unknown column format {code}")


def all_negative(values: NDArray[np.float32]) -> bool:
    """Whether all are finite and have the sign bit: as int32 these, and only these, lie below -inf's bits."""
    return not len(values) or _largest(values.view(_I32)) < _MINUS_INF


def holds_float32(column: bytes) -> bool:
    """Whether a log-prob column is float32: full mantissas, which hardly compress and need a check when opened."""
    return column[-1:] == _FORMAT[_LOGPROBS_F32]


def mask_runs(mask: NDArray[np.bool_]) -> list[int]:
    """Alternating run lengths of a mask (bool [L]), the first of zeros; sum = L."""
    flags = mask.tobytes()  # masks have few runs: finding their ends in bytes beats an array operation
    runs: list[int] = []
    at, size, value = 0, len(flags), 0
    while at < size:
        end = flags.find(1 - value, at)
        end = size if end < 0 else end
        runs.append(end - at)
        at, value = end, 1 - value
    return runs


def encode_runs(runs: Sequence[int]) -> bytes:
    """The mask column of alternating run lengths."""
    return struct.pack(f"<{len(runs)}I", *runs) + _FORMAT[0]


def decode_runs(column: bytes) -> Sequence[int]:
    """Alternating run lengths of a mask column, the first of zeros. Raises CodecError on a damaged column."""
    code = _code(column, "mask")
    if code != 0:
        raise CodecError(f"mask: unknown column format {code}")
    runs = struct.unpack_from(f"<{_count(column, 4, 'mask')}I", column)
    total = sum(runs)
    if total > MAX_TOKENS:
        raise CodecError(f"mask: run lengths add up to {total}, over {MAX_TOKENS}")
    return runs


def encode_mask(mask: NDArray[np.generic] | Sequence[int]) -> bytes:
    """Pack a loss mask (0/1 [L]) as alternating run lengths."""
    return encode_runs(mask_runs(np.asarray(mask).astype(bool)))


def decode_mask(column: bytes) -> NDArray[np.bool_]:
    """Loss mask, bool [L]. Raises CodecError on a damaged column."""
    return runs_to_mask(decode_runs(column))


def runs_to_mask(runs: Sequence[int]) -> NDArray[np.bool_]:
    """The mask (bool [L], read-only) of alternating run lengths."""
    flags = b"".join([(b"\1" if index & 1 else b"\0") * run for index, run in enumerate(runs)])
    return np.frombuffer(flags, np.bool_)


def keep(values: NDArray[np.float32], runs: Sequence[int]) -> NDArray[np.float32]:
    """The values [T] at the positions [L] that the mask of those runs keeps; `values` itself when it keeps all."""
    if len(runs) == 2 and runs[0] == 0:
        return values
    data = values.tobytes()
    parts, at = [], 0
    for index, run in enumerate(runs):
        if index & 1:
            parts.append(data[at : at + 4 * run])
        at += 4 * run
    return np.frombuffer(b"".join(parts), _F32)


def spread(kept: NDArray[np.float32], runs: Sequence[int]) -> NDArray[np.float32]:
    """Values [L]: `kept` [T] where the mask of those runs keeps, 0 elsewhere; `kept` itself when it keeps all."""
    if len(runs) == 2 and runs[0] == 0:
        return kept
    data = kept.tobytes()
    parts, at = [], 0
    for index, run in enumerate(runs):
        if index & 1:
            parts.append(data[at : at + 4 * run])
            at += 4 * run
        else:
            parts.append(bytes(4 * run))
    return np.frombuffer(b"".join(parts), _F32)


def merge_runs(runs: Iterable[VersionRun]) -> list[VersionRun]:
    """Join neighbours of the same (epoch, version) and leave out empty runs."""
    merged: list[VersionRun] = []
    for epoch, version, n_tokens in runs:
        if n_tokens == 0:
            continue
        if merged and merged[-1][:2] == (epoch, version):
            merged[-1] = (epoch, version, merged[-1][2] + n_tokens)
        else:
            merged.append((epoch, version, n_tokens))
    return merged


def trainable_runs(runs: Sequence[VersionRun], mask: NDArray[np.bool_]) -> list[VersionRun]:
    """The version runs counted over trainable tokens only (mask bool [L], sum of runs = L)."""
    total = sum(run[2] for run in runs)
    if total != len(mask):
        raise CodecError(f"version runs cover {total} tokens, the mask {len(mask)}")
    kept: list[VersionRun] = []
    at = 0
    for epoch, version, n_tokens in runs:
        kept.append((epoch, version, int(np.count_nonzero(mask[at : at + n_tokens]))))
        at += n_tokens
    return merge_runs(kept)


def _largest(array: NDArray[np.integer]) -> int:
    """The largest value of an array that is not empty: `argmax` starts three times as quickly as `max`."""
    return array.item(array.argmax())


def _code(column: bytes, what: str) -> int:
    if not column:
        raise CodecError(f"{what}: empty column, its format byte is missing")
    return column[-1]


def _count(column: bytes, width: int, what: str) -> int:
    """Values of `width` bytes before the format byte."""
    size = len(column) - 1
    if size % width:
        raise CodecError(f"{what}: {size} bytes are no whole number of {width}-byte values")
    return size // width


def _count_18(column: bytes) -> int:
    """Ids in a column of 18-bit ones: size = 2 n + 2 ceil(n / 8), solved for n."""
    size = len(column) - 1
    count = (size * 8) // 18
    while count and 2 * count + 2 * ((count + 7) // 8) > size:
        count -= 1
    if 2 * count + 2 * ((count + 7) // 8) != size:
        raise CodecError(f"token ids: {size} bytes fit no number of 18-bit ids")
    return count
