"""Heavy arrays as raw little-endian columns: token ids, behaviour log-probs, masks, version runs.

Every column is `bytes` and ends with one format byte, so that a reader never guesses from a length, and the values
before it stay aligned and can be looked at without a copy:

    token ids   0: uint16 [L]                       ids below 65,536 (2 bytes a token)
                1: uint16 [L] + packed bits [L] + packed bits [L]   bits 16 and 17 (2.25 bytes a token)
                2: int32 [L]                        anything larger
    log-probs   0: float32 [L]                      exact; the default, they are the behaviour policy
                1: uint8 [2, L] byte planes of q = round(-logprob * 1024), cap 65,535   error ≤ 2**-11 above -64
    mask        0: uint32 run lengths, alternating, the first run is of zeros (possibly 0 long)

Zstandard packs them afterwards (streams/codec.py); the planes keep bytes of one kind together, which is what it
packs best. Sizes measured in the project's encoding study: 5.1 B/token with float32, 2.2 B/token with fixed point.
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
_FIXED_SCALE = 1024.0
MAX_TOKENS = 1 << 26  # of one sample; a mask that claims more is damaged
_UNSIGNED = {
    char: np.dtype(char.upper()) for char in "bhilqBHILQ"
}  # dtype character → the unsigned type of that width
_FORMAT = [bytes([code]) for code in range(3)]

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
    top = int(np.maximum.reduce(array.view(unsigned)))
    if top >= 1 << 31:
        raise CodecError(f"token ids must be in [0, 2**31), got {int(array.min())} … {int(array.max())}")
    if top < 1 << 16:
        return array.astype("<u2").tobytes() + _FORMAT[_IDS_U16]
    if top >= 1 << 18:
        return array.astype("<i4").tobytes() + _FORMAT[_IDS_I32]
    high = (array >> 16).astype(np.uint8)
    low = (array & 0xFFFF).astype("<u2").tobytes()
    return b"".join(
        (low, np.packbits(high & 1).tobytes(), np.packbits(high >> 1).tobytes(), _FORMAT[_IDS_U18])
    )


def decode_ids(column: bytes) -> NDArray[np.int32]:
    """Token ids, int32 [L]. Raises CodecError on a damaged column."""
    code = _code(column, "token ids")
    if code == _IDS_U16:
        return np.frombuffer(column, "<u2", _count(column, 2, "token ids")).astype(np.int32)
    if code == _IDS_I32:
        return np.frombuffer(column, "<i4", _count(column, 4, "token ids")).astype(np.int32)
    if code == _IDS_U18:
        # size = 2 n + 2 ceil(n / 8), solved for n
        size = len(column) - 1
        count = (size * 8) // 18
        while count and 2 * count + 2 * ((count + 7) // 8) > size:
            count -= 1
        planes = (count + 7) // 8
        if 2 * count + 2 * planes != size:
            raise CodecError(f"token ids: {size} bytes fit no number of 18-bit ids")
        ids = np.frombuffer(column, "<u2", count).astype(np.int32)
        bit16 = np.unpackbits(np.frombuffer(column, np.uint8, planes, 2 * count), count=count)
        bit17 = np.unpackbits(np.frombuffer(column, np.uint8, planes, 2 * count + planes), count=count)
        return ids | (bit16.astype(np.int32) << 16) | (bit17.astype(np.int32) << 17)
    raise CodecError(f"token ids: unknown column format {code}")


def encode_logprobs(
    logprobs: NDArray[np.floating] | Sequence[float], form: LogprobFormat = "float32"
) -> bytes:
    """Pack log-probs (float [L]). Fixed point clips at -63.999 and never stores a positive value."""
    array = np.ascontiguousarray(logprobs, dtype="<f4")
    if form == "float32":
        return array.tobytes() + _FORMAT[_LOGPROBS_F32]
    if form != "fixed1024":
        raise CodecError(f"log-probs: unknown column format {form!r}; known: float32, fixed1024")
    scaled = array * np.float32(-_FIXED_SCALE)
    np.rint(scaled, out=scaled)
    np.minimum(np.maximum(scaled, 0, out=scaled), 65_535, out=scaled)
    planes = scaled.astype("<u2").view(np.uint8)
    return b"".join((planes[::2].tobytes(), planes[1::2].tobytes(), _FORMAT[_LOGPROBS_FIXED]))


def decode_logprobs(column: bytes) -> NDArray[np.float32]:
    """Log-probs, float32 [L], read-only. Raises CodecError on a damaged column."""
    code = _code(column, "log-probs")
    if code == _LOGPROBS_F32:
        return np.frombuffer(column, "<f4", _count(column, 4, "log-probs"))
    if code == _LOGPROBS_FIXED:
        count = _count(column, 2, "log-probs")
        steps = np.frombuffer(column, np.uint8, count, count).astype(np.float32)
        steps *= np.float32(256.0)
        steps += np.frombuffer(column, np.uint8, count)
        steps *= np.float32(-1 / _FIXED_SCALE)
        return steps
    raise CodecError(f"log-probs: unknown column format {code}")


def encode_mask(mask: NDArray[np.generic] | Sequence[int]) -> bytes:
    """Pack a loss mask (0/1 [L]) as alternating run lengths."""
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        array = array.astype(bool)
    flags = array.tobytes()  # masks have few runs: finding their ends in bytes beats an array operation
    runs: list[int] = []
    at, size, value = 0, len(flags), 0
    while at < size:
        end = flags.find(1 - value, at)
        end = size if end < 0 else end
        runs.append(end - at)
        at, value = end, 1 - value
    return struct.pack(f"<{len(runs)}I", *runs) + _FORMAT[0]


def is_full(mask: NDArray[np.bool_]) -> bool:
    """Whether every position of a bool mask is True (much quicker than `all` on a few thousand positions)."""
    return 0 not in mask.tobytes()


def decode_mask(column: bytes) -> NDArray[np.bool_]:
    """Loss mask, bool [L]. Raises CodecError on a damaged column."""
    code = _code(column, "mask")
    if code != 0:
        raise CodecError(f"mask: unknown column format {code}")
    runs = struct.unpack_from(f"<{_count(column, 4, 'mask')}I", column)
    total = sum(runs)
    if total > MAX_TOKENS:
        raise CodecError(f"mask: run lengths add up to {total}, over {MAX_TOKENS}")
    mask = np.zeros(total, np.bool_)
    at = 0
    for index, run in enumerate(runs):
        if index & 1:
            mask[at : at + run] = True
        at += run
    return mask


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


def _code(column: bytes, what: str) -> int:
    if not column:
        raise CodecError(f"{what}: empty column, its format byte is missing")
    return column[-1]


def _count(column: bytes, width: int, what: str) -> int:
    """Values of `width` bytes before the format byte."""
    count, rest = divmod(len(column) - 1, width)
    if rest:
        raise CodecError(f"{what}: {len(column) - 1} bytes are no whole number of {width}-byte values")
    return count
