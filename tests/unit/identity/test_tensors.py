"""Reading tensors: what safetensors writes is read, and no hostile header gets further than an error."""

import json
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache.identity.tensors import (
    TensorFileError,
    TensorRecord,
    read_tensors,
    state_dict_tensors,
    weight_files,
)


def write_file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file by hand, so that it can be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: object, end: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def contents(files: list[Path]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with ExitStack() as stack:
        return {t.name: (t.dtype, t.shape, t.read(0, t.nbytes)) for t in read_tensors(files, stack)}


def test_a_file_is_read(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 2], 4, 12),
        "a": entry("F32", [], 0, 4),
        "none": entry("I64", [0, 3], 12, 12),
    }
    file = write_file(tmp_path / "x.safetensors", header, bytes(range(12)))
    assert contents([file]) == {
        "a": ("float32", (), bytes(range(4))),
        "b": ("bfloat16", (2, 2), bytes(range(4, 12))),
        "none": ("int64", (0, 3), b""),
    }


def test_a_dtype_newer_than_the_table_is_kept_by_its_name(tmp_path: Path) -> None:
    file = write_file(tmp_path / "x.safetensors", {"a": entry("F4_E2M1", [3], 0, 2)}, b"ab")
    assert contents([file]) == {"a": ("f4_e2m1", (3,), b"ab")}


@pytest.mark.parametrize("library", ["safetensors.torch", "safetensors.numpy"])
def test_what_the_library_writes_is_read(tmp_path: Path, library: str) -> None:
    save_file = pytest.importorskip(library).save_file
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = pytest.importorskip("torch").from_numpy(array) if library.endswith("torch") else array
    save_file({"x": tensor, "y": tensor * 2}, tmp_path / "f")
    assert contents([tmp_path / "f"])["x"] == ("float32", (2, 3), array.tobytes())


HOSTILE: dict[str, tuple[object, bytes, int | None]] = {
    "not JSON": (b"{nonsense", b"", None),
    "not an object": ([], b"", None),
    "deeply nested": (b"[" * 100_000, b"", None),
    "a number of a million digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", b"", None),
    "not UTF-8": (b'{"\xff": 1}', b"", None),
    "a name twice": (b'{"a": {}, "a": {}}', b"", None),
    "longer than the file": ({}, b"", 1 << 20),
    "longer than any header": ({}, b"", 1 << 62),
    "empty": (b"", b"", 0),
    "entry without fields": ({"a": {}}, b"", None),
    "entry with more fields": ({"a": {**entry("U8", [1], 0, 1), "more": 1}}, b"x", None),
    "entry is a list": ({"a": [1]}, b"", None),
    "offsets reversed": ({"a": entry("U8", [1], 1, 0)}, b"x", None),
    "offsets negative": ({"a": entry("U8", [1], -1, 0)}, b"x", None),
    "offsets not integers": ({"a": entry("U8", [1], 0.0, 1.0)}, b"x", None),
    "offsets are text": ({"a": entry("U8", [1], "0", "1")}, b"x", None),
    "offsets past u63": ({"a": entry("U8", [1], 0, 1 << 70)}, b"x", None),
    "tensor beyond the file": ({"a": entry("U8", [9], 0, 9)}, b"x", None),
    "bytes behind the last tensor": ({"a": entry("U8", [1], 0, 1)}, b"xy", None),
    "a hole": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xyz", None),
    "two tensors over each other": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xyz", None),
    "shape and bytes differ": ({"a": entry("F32", [2], 0, 4)}, b"abcd", None),
    "shape overflows": ({"a": entry("U8", [1 << 62, 1 << 62], 0, 1)}, b"x", None),
    "dimension past u63": ({"a": entry("U8", [1 << 64], 0, 1)}, b"x", None),
    "dimension negative": ({"a": entry("U8", [-1, -1], 0, 1)}, b"x", None),
    "dimension true": ({"a": entry("U8", [True], 0, 1)}, b"x", None),
    "too many dimensions": ({"a": entry("U8", [1] * 17, 0, 1)}, b"x", None),
    "shape is text": ({"a": {**entry("U8", [], 0, 1), "shape": "1"}}, b"x", None),
    "dtype is a number": ({"a": {**entry("U8", [1], 0, 1), "dtype": 1}}, b"x", None),
    "dtype with odd letters": ({"a": entry("u8\n", [1], 0, 1)}, b"x", None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    header, data, length = HOSTILE[case]
    file = write_file(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(TensorFileError, match=r"x\.safetensors"):
        contents([file])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=200), prefix=st.sampled_from([b"", struct.pack("<Q", 20), struct.pack("<Q", 9) + b"{"]))
def test_noise_is_refused(tmp_path: Path, noise: bytes, prefix: bytes) -> None:
    file = tmp_path / "noise"
    file.write_bytes(prefix + noise)
    try:
        assert contents([file]) == {}
    except TensorFileError:
        return


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(8, 100), value=st.integers(0, 255))
def test_a_changed_byte_of_a_header_never_reads_outside(tmp_path: Path, position: int, value: int) -> None:
    header = {"a": entry("U8", [4], 0, 4), "b": entry("F32", [1], 4, 8)}
    file = write_file(tmp_path / "x.safetensors", header, bytes(range(8)))
    data = bytearray(file.read_bytes())
    data[position] = value
    file.write_bytes(data)
    try:
        found = contents([file])
    except TensorFileError:
        return
    assert sum(len(content) for _, _, content in found.values()) == 8


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    file = write_file(tmp_path / "x.safetensors", {"a": entry("U8", [4], 0, 4)}, b"abcd")
    with ExitStack() as stack:
        (record,) = read_tensors([file], stack)
        os.truncate(file, file.stat().st_size - 2)
        with pytest.raises(TensorFileError, match="shorter"):
            record.read(0, 4)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(TensorFileError, match="not a regular file"):
            contents([path])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    files = [write_file(tmp_path / name, {"a": entry("U8", [1], 0, 1)}, b"x") for name in ("1", "2")]
    with pytest.raises(TensorFileError, match="earlier file"):
        contents(files)


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="0 safetensors files"):
        weight_files(tmp_path)
    odd = write_file(tmp_path / "odd.safetensors", {})
    assert weight_files(tmp_path) == weight_files(odd) == (odd,)
    write_file(tmp_path / "other.safetensors", {})
    with pytest.raises(TensorFileError, match="2 safetensors files"):
        weight_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "other.safetensors", "b": "odd.safetensors", "c": "odd.safetensors"}}')
    assert weight_files(tmp_path) == (odd, tmp_path / "other.safetensors")
    model = write_file(tmp_path / "model.safetensors", {})
    assert weight_files(tmp_path) == (model,)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../secret.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "missing.safetensors"}}',
    ],
)  # fmt: skip
def test_a_hostile_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(TensorFileError, match="index"):
        weight_files(tmp_path)


def test_tensors_in_memory() -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "plain": values,
        "half": values.to(torch.bfloat16),
        "strided": values.t(),
        "scalar": torch.tensor(1.5),
        "array": values.numpy(),
        "not a tensor": 7,
    }
    records: dict[str, TensorRecord] = {record.name: record for record in state_dict_tensors(state)}
    assert set(records) == set(state) - {"not a tensor"}
    assert records["half"][1:4] == ("bfloat16", (4, 6), 48)
    assert records["scalar"][1:4] == ("float32", (), 4)
    assert records["strided"].read(0, 96) == values.t().contiguous().numpy().tobytes()
    assert records["plain"].read(0, 96) == records["array"].read(0, 96) == values.numpy().tobytes()
    assert records["plain"].read(5, 30) == values.numpy().tobytes()[5:35]
