"""Where tensors can be read from: safetensors files, and state dicts in memory.

Rules:
1. A file is not trusted: its header is bounded, must describe exactly the bytes that follow, and is read without
   loading any tensor. Nothing outside the given folder is opened.
2. Every source yields the same `TensorRecord`s for the same tensors, so that one digest function serves them all.

What belongs here: names, dtypes, shapes and ranges of bytes. It must not know what is hashed.
"""

import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

if TYPE_CHECKING:
    import torch

# The limit that the safetensors library has too; the largest real header (90,000 tensors) is 12 MB.
MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIMS: Final = 16
MAX_DIM: Final = 1 << 63

# safetensors' names, as torch writes them, with the bits of an element.
_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64), "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
}  # fmt: skip
_DTYPE_NAME = re.compile(r"[A-Z0-9_]{1,16}")
_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")


class TensorFileError(ValueError):
    """A file that is not what its header says, or a folder without weights. Says which file and what is wrong."""


class TensorRecord(NamedTuple):
    """One tensor. `dtype`: torch's name. `read(offset, size)`: that many of its bytes, little-endian, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[int, int], bytes]


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint: `path` itself, or those of the folder, by its index where it has one.

    Raises TensorFileError when there are none, or several without an index to say which belong together.
    """
    if not path.is_dir():
        return (path,)
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if index.is_file():
        return _indexed_files(index)
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise TensorFileError(f"{path}: {len(found)} safetensors files and no model.safetensors.index.json")
    return (found[0],)


def read_tensors(files: Iterable[Path], stack: ExitStack) -> Iterator[TensorRecord]:
    """Every tensor of the files, in no particular order; readable until `stack` closes. Raises TensorFileError."""
    seen: set[str] = set()
    for file in files:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TensorFileError(f"{file}: not a regular file")
        for record in _read_file(file, descriptor):
            if record.name in seen:
                raise TensorFileError(f"{file}: tensor {record.name!r} is in an earlier file as well")
            seen.add(record.name)
            yield record


def state_dict_tensors(state_dict: Mapping[str, Any]) -> Iterator[TensorRecord]:
    """The tensors of a torch state dict (on any device) or of a map of numpy arrays; others are left out.

    Reads only what is asked for: a tensor on a GPU is not copied as a whole.
    """
    for name, tensor in state_dict.items():
        if isinstance(tensor, np.ndarray):
            flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
            yield TensorRecord(name, str(tensor.dtype), tensor.shape, tensor.nbytes, _numpy_reader(flat))
        elif hasattr(tensor, "detach"):
            size = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield TensorRecord(name, dtype, tuple(tensor.shape), size, _torch_reader(tensor.detach()))


def _numpy_reader(flat: np.ndarray[Any, np.dtype[np.uint8]]) -> Callable[[int, int], bytes]:
    return lambda offset, size: flat[offset : offset + size].tobytes()


def _torch_reader(tensor: "torch.Tensor") -> Callable[[int, int], bytes]:
    def read(offset: int, size: int) -> bytes:
        import torch  # only here, where the caller has a tensor and so has torch

        item = tensor.element_size()
        first, last = offset // item, -(-(offset + size) // item)
        part = tensor.reshape(-1)[first:last].cpu().contiguous().view(torch.uint8)
        return part.numpy().tobytes()[offset - first * item :][:size]

    return read


def _indexed_files(index: Path) -> tuple[Path, ...]:
    """The files an index names, next to it."""
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise TensorFileError(f"{index}: larger than {MAX_HEADER_BYTES} bytes")
    content = _json_object(index.read_bytes(), index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TensorFileError(f"{index}: no weight_map")
    names = set(weight_map.values())
    for name in names:
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name in {".", ".."}:
            raise TensorFileError(f"{index}: {name!r} is not the name of a file next to it")
    files = tuple(index.parent / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise TensorFileError(f"{index}: {file.name} is missing")
    return files


def _read_file(file: Path, descriptor: int) -> list[TensorRecord]:
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, 8, 0)
    if len(head) < 8:
        raise TensorFileError(f"{file}: too short for a safetensors header")
    (length,) = struct.unpack("<Q", head)
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise TensorFileError(f"{file}: a header of {length} bytes in a file of {size}")
    header = _json_object(_read_exactly(descriptor, 8, length), file)
    header.pop("__metadata__", None)
    data, end = 8 + length, 0
    records = []
    for begin, stop, name, entry in sorted(_ranges(header, file), key=lambda item: item[:3]):
        if begin != end:
            raise TensorFileError(f"{file}: tensor {name!r} begins at {begin}, where {end} was expected")
        end = stop
        dtype, shape = _described(entry, stop - begin, f"{file}: tensor {name!r}")
        records.append(TensorRecord(name, dtype, shape, stop - begin, _file_reader(descriptor, data + begin)))
    if data + end != size:
        raise TensorFileError(f"{file}: the header describes {data + end} bytes of {size}")
    return records


def _ranges(header: Mapping[str, object], file: Path) -> Iterator[tuple[int, int, str, dict[str, object]]]:
    """(first byte, end, name, entry) of every tensor, as the header says."""
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise TensorFileError(f"{file}: tensor {name!r} is not described by dtype, shape and data_offsets")
        match entry["data_offsets"]:
            case [int(begin), int(stop)] if 0 <= begin <= stop < MAX_DIM:
                yield begin, stop, name, entry
            case offsets:
                raise TensorFileError(f"{file}: tensor {name!r} has data_offsets {str(offsets)[:80]}")


def _described(entry: Mapping[str, object], nbytes: int, where: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a header's entry, checked against the bytes it claims."""
    stated, shape = entry["dtype"], entry["shape"]
    if not isinstance(stated, str) or not _DTYPE_NAME.fullmatch(stated):
        raise TensorFileError(f"{where} has dtype {str(stated)[:80]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise TensorFileError(f"{where} has shape {str(shape)[:80]}")
    if any(type(dim) is not int or not 0 <= dim < MAX_DIM for dim in shape):
        raise TensorFileError(f"{where} has shape {str(shape)[:80]}")
    # A dtype newer than this table keeps its own name; its size is then only bounded by the file.
    name, bits = _DTYPES.get(stated, (stated.lower(), 0))
    if bits and math.prod(shape) * bits != nbytes * 8:
        raise TensorFileError(f"{where} of shape {shape} and dtype {name} cannot be {nbytes} bytes")
    return name, tuple(shape)


def _json_object(data: bytes, where: Path) -> dict[str, object]:
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{where}: not a JSON header: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise TensorFileError(f"{where}: the header is not a JSON object")
    return cast("dict[str, object]", value)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _file_reader(descriptor: int, begin: int) -> Callable[[int, int], bytes]:
    return lambda offset, size: _read_exactly(descriptor, begin + offset, size)


def _read_exactly(descriptor: int, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`; one read may return fewer. Raises TensorFileError at the end of the file."""
    chunks = []
    while size:
        chunk = os.pread(descriptor, size, offset)
        if not chunk:
            raise TensorFileError("the file became shorter while it was read")
        chunks.append(chunk)
        offset, size = offset + len(chunk), size - len(chunk)
    return b"".join(chunks)
