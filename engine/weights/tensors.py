"""Named tensors as bytes: one digest for equal bits, and safetensors files that are the same for the same weights.

numpy arrays and torch tensors are told apart by their module, so torch is never imported for an array. Files are
written here and not by the safetensors package for three reasons: the same tensors give the same bytes (that
package orders its metadata at random), bfloat16 needs no torch, and tensors that share memory are stored
once. Any safetensors reader opens the result, `AutoModelForCausalLM.from_pretrained` too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streams.errors import MillstreamError

Framework = Literal["numpy", "torch"]

TIED_KEY = "tied"  # metadata: JSON object, name that is not stored → name that holds its bytes
_WORDS = {  # dtype name in numpy and torch → word in a safetensors header
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {word: name for name, word in _WORDS.items()}
_BITS = {word: word.split("_")[0].lstrip("BFIU") for word in _DTYPES if word != "BOOL"}
_ITEM_BYTES = {"BOOL": 1, **{word: int(bits) // 8 for word, bits in _BITS.items()}}
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors package
_THREADS_FROM_BYTES = 32 << 20  # below this, threads cost more than they save


class WeightsError(MillstreamError):
    """Weights that cannot be written, found or read; the message names the file and the reason."""


class NoRoom(WeightsError):
    """The disk has no room for them; nothing was left behind, and it may be tried again."""


class RawTensor(NamedTuple):
    """One tensor as little-endian bytes, row after row."""

    dtype: str  # word of the safetensors header
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # [nbytes]
    memory: tuple[int, ...] | None = None  # equal for tensors that are the same memory; None: alone


class Layout(Protocol):
    """What is known of a tensor without its bytes. A RawTensor is one."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...


def digest(tensors: Mapping[str, Any]) -> str:
    """Identity of a set of weights: sha256 over name, dtype, shape and bytes, in order of names; hexadecimal.

    Equal bits give equal digests: numpy arrays or torch tensors, from any device, contiguous or not, tied or
    copied. The bytes enter as their own sha256, so that large tensors are hashed side by side.
    """
    return digest_raw({name: raw(tensor) for name, tensor in tensors.items()})


def digest_raw(tensors: Mapping[str, RawTensor]) -> str:
    """`digest` of tensors that are bytes already."""
    return digest_of_parts(tensors, content_digests(tensors))


def digest_of_parts(layouts: Mapping[str, Layout], contents: Mapping[str, bytes]) -> str:
    """`digest` of tensors of which the sha256 of each one's bytes is known already."""
    whole = hashlib.sha256()
    for name in sorted(layouts):
        layout = layouts[name]
        head = json.dumps([name, layout.dtype, list(layout.shape)], separators=(",", ":")).encode()
        whole.update(len(head).to_bytes(8, "little") + head + contents[name])
    return whole.hexdigest()


def content_digests(tensors: Mapping[str, RawTensor]) -> dict[str, bytes]:
    """sha256 of each tensor's bytes; what is tied is hashed once."""
    distinct = {_place(tensor): tensor.data for tensor in tensors.values()}
    digests = dict(zip(distinct, _digests_of(list(distinct.values())), strict=True))
    return {name: digests[_place(tensor)] for name, tensor in tensors.items()}


def item_bytes(dtype: str) -> int:
    """Of one element, by the word of a safetensors header. Raises WeightsError for an unknown one."""
    if dtype not in _ITEM_BYTES:
        raise WeightsError(f"dtype {dtype!r} has no place in a safetensors file")
    return _ITEM_BYTES[dtype]


def word_of(dtype: Any) -> str:
    """`torch.float32` or `float32` → `F32`. Raises WeightsError for a dtype that has no word."""
    word = _WORDS.get(str(dtype).removeprefix("torch."))
    if word is None:
        raise WeightsError(f"dtype {dtype} has no place in a safetensors file")
    return word


def dtype_name(word: str) -> str:
    """`F32` → `float32`: the name in torch and numpy. Raises WeightsError for an unknown word."""
    item_bytes(word)
    return _DTYPES[word]


def size_of(layout: Layout) -> int:
    """Bytes of one tensor."""
    return math.prod(layout.shape) * item_bytes(layout.dtype)


def raw(tensor: Any) -> RawTensor:
    """The bytes of a numpy array or torch tensor, copied only if they do not lie in one piece in main memory."""
    if type(tensor).__module__.partition(".")[0] == "numpy":
        return _raw_array(np.asarray(tensor))
    if hasattr(tensor, "detach"):
        return _raw_torch(tensor)
    raise WeightsError(f"weights must be numpy arrays or torch tensors, got {type(tensor).__name__}")


class Snapshot(dict[str, Any]):
    """Tensors by name, copied to main memory: no step changes them, so that nobody needs to copy them again."""


def snapshot(tensors: Mapping[str, Any]) -> Snapshot:
    """Copies in main memory that later steps do not change. What is tied stays tied.

    They lie one after the other in one piece of memory, so that a broadcast can send many of them as they are.
    """
    if isinstance(tensors, Snapshot):
        return tensors
    copies: dict[tuple[Any, ...], Any] = {}
    taken = Snapshot()
    room = np.empty(sum(_room_for(tensor) for tensor in tensors.values()), np.uint8)
    at = 0
    for name, tensor in tensors.items():
        array = type(tensor).__module__.partition(".")[0] == "numpy"
        memory = _memory_of_array(tensor) if array else _memory_of_torch(tensor)
        key = (memory, str(tensor.dtype), tuple(tensor.shape))
        if key not in copies:
            at += -at % tensor.itemsize
            end = at + tensor.nbytes
            copies[key] = _copy_array(tensor, room[at:end]) if array else _copy_torch(tensor, room[at:end])
            at = end
        taken[name] = copies[key]
    return taken


def _room_for(tensor: Any) -> int:
    """Bytes, with what may be lost before it so that it begins at a multiple of its items."""
    return tensor.nbytes + tensor.itemsize - 1


def _copy_array(array: NDArray[Any], room: NDArray[np.uint8]) -> NDArray[Any]:
    copy = room.view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def _copy_torch(tensor: Any, room: NDArray[np.uint8]) -> Any:
    import torch  # it is loaded already: a tensor came

    copy = torch.from_numpy(room).view(tensor.dtype).reshape(tensor.shape)
    return copy.copy_(tensor.detach())


def write_file(file: BinaryIO, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> int:
    """Write one safetensors file and return the bytes written. Same tensors and metadata, same bytes."""
    stored, tied = split_tied(tensors)
    return write_parts(file, stored, tied, metadata, lambda name: stored[name].data)


def write_parts(
    file: BinaryIO,
    stored: Mapping[str, Layout],
    tied: Mapping[str, str],
    metadata: Mapping[str, str],
    data_of: Callable[[str], NDArray[np.uint8]],
) -> int:
    """As `write_file`, of tensors that `data_of` (name → uint8 [bytes]) gives one by one, as they are written.

    `tied`: name that is not stored → name that holds its bytes.
    """
    order = _order(stored)
    text = header(stored, tied, metadata)
    file.write(text)
    for name in order:
        file.write(data_of(name).data)
    return len(text) + sum(size_of(stored[name]) for name in order)


def header(stored: Mapping[str, Layout], tied: Mapping[str, str], metadata: Mapping[str, str]) -> bytes:
    """What stands before the tensors of a file."""
    notes = dict(sorted(metadata.items()))
    if tied:
        notes[TIED_KEY] = json.dumps(dict(tied), sort_keys=True)
    entries: dict[str, Any] = {"__metadata__": notes}
    at = 0
    for name in _order(stored):
        layout = stored[name]
        end = at + size_of(layout)
        entries[name] = {"dtype": layout.dtype, "shape": list(layout.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _order(stored: Mapping[str, Layout]) -> list[str]:
    """Widest dtypes first keeps each tensor aligned to its items, as readers that map the file expect."""
    return sorted(stored, key=lambda name: (-item_bytes(stored[name].dtype), name))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file. Raises WeightsError when it is missing or its header is damaged."""
    return _read_header(path)[0]


def read_raw(path: Path) -> dict[str, RawTensor]:
    """All tensors of a file, tied names included, mapped from disk: bytes are read when they are touched.

    Raises WeightsError when the file is missing, truncated or damaged in its header.
    """
    metadata, entries, start = _read_header(path)
    if path.stat().st_size > start:
        # copy on write: torch wants writable memory, and the file stays as it is
        data = np.memmap(path, np.uint8, mode="c", offset=start).view(np.ndarray)
    else:
        data = np.empty(0, np.uint8)
    tensors = {}
    for name, (dtype, shape, begin, end) in entries.items():
        tensors[name] = RawTensor(dtype, shape, data[begin:end], (begin, end))
    try:
        for alias, name in json.loads(metadata.get(TIED_KEY, "{}")).items():
            tensors[alias] = tensors[name]
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{path}: its list of tied tensors is damaged ({error!r})") from None
    return tensors


def to_framework(tensors: Mapping[str, RawTensor], framework: Framework) -> dict[str, Any]:
    """numpy arrays or torch tensors over the same bytes; tied names share memory.

    Raises WeightsError for bfloat16 and float8 in numpy, which has no such dtypes.
    """
    made: dict[tuple[int, ...], Any] = {}
    found = {}
    for name, tensor in tensors.items():
        key = (*tensor.memory, *tensor.shape) if tensor.memory is not None and tensor.data.nbytes else None
        if key is None or key not in made:
            value = _as_torch(tensor) if framework == "torch" else _as_array(name, tensor)
            if key is None:
                found[name] = value
                continue
            made[key] = value
        found[name] = made[key]
    return found


def split_tied(tensors: Mapping[str, RawTensor]) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """(tensors to store, {tied name: stored name}): the first name in the mapping's order keeps the bytes."""
    stored: dict[str, RawTensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.memory, tensor.dtype, tensor.shape)
        if tensor.memory is not None and tensor.data.nbytes and first.setdefault(key, name) != name:
            tied[name] = first[key]
        else:
            stored[name] = tensor
    return stored, tied


def _raw_array(array: NDArray[Any]) -> RawTensor:
    word = word_of(array.dtype.name)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    memory = _memory_of_array(array)
    return RawTensor(word, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8), memory)


def _raw_torch(tensor: Any) -> RawTensor:
    import torch  # it is loaded already: a tensor came

    word = word_of(tensor.dtype)
    tensor = tensor.detach()
    memory = _memory_of_torch(tensor)
    if not tensor.numel():  # its strides may be anything
        return RawTensor(word, tuple(tensor.shape), np.empty(0, np.uint8), memory)
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(word, tuple(tensor.shape), flat, memory)


def _memory_of_array(array: NDArray[Any]) -> tuple[int, ...]:
    return (array.__array_interface__["data"][0], *array.strides)


def _memory_of_torch(tensor: Any) -> tuple[int, ...]:
    return (hash(str(tensor.device)), tensor.data_ptr(), *tensor.stride())


def _place(tensor: RawTensor) -> tuple[int, int]:
    """Equal for tensors over the same bytes."""
    return tensor.data.__array_interface__["data"][0], tensor.data.nbytes


def _as_array(name: str, tensor: RawTensor) -> NDArray[Any]:
    dtype = _DTYPES[tensor.dtype]
    try:
        return tensor.data.view(np.dtype(dtype)).reshape(tensor.shape)
    except TypeError:
        raise WeightsError(f"{name} is {dtype}, which numpy does not have; read it with torch") from None


def _as_torch(tensor: RawTensor) -> Any:
    import torch

    dtype = getattr(torch, _DTYPES[tensor.dtype])
    if not tensor.data.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.from_numpy(tensor.data).view(dtype).reshape(tensor.shape)


def _digests_of(contents: list[NDArray[np.uint8]]) -> list[bytes]:
    def one(data: NDArray[np.uint8]) -> bytes:
        return hashlib.sha256(data.data).digest()  # gives the interpreter lock back while it hashes

    if sum(data.nbytes for data in contents) < _THREADS_FROM_BYTES:
        return [one(data) for data in contents]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, contents))


_Entries = dict[str, tuple[str, tuple[int, ...], int, int]]  # name → dtype word, shape, begin, end


def _read_header(path: Path) -> tuple[dict[str, str], _Entries, int]:
    """(metadata, entries, where the data starts), checked against the size of the file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise WeightsError(f"{path}: truncated, {size} bytes do not hold its header of {length}")
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries: _Entries = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            entries[name] = (entry["dtype"], tuple(entry["shape"]), begin, end)
        _check_entries(entries, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: its header is damaged ({error})") from None
    return metadata, entries, 8 + length


def _check_entries(entries: _Entries, data_bytes: int) -> None:
    """Raise ValueError unless the tensors lie side by side and fill the file to its last byte."""
    at = 0
    for name, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        if begin != at or end - begin != nbytes:
            raise ValueError(f"{name} takes bytes {at} to {at + nbytes}, the header says {begin} to {end}")
        at = end
    if at != data_bytes:
        raise ValueError(f"the tensors take {at} bytes, the file holds {data_bytes}")
