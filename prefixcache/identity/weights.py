"""The weights digest: which weights a model was loaded from, without reading all of them.

Rules:
1. digest = SHA-256 over the tensors in the order of their names (UTF-8 bytes), each as
   `le_u32(len) || name || le_u32(len) || dtype || le_u32(dims) || le_u64 of each dim || le_u64(bytes) || samples`.
   `samples` is the whole tensor up to 12 KiB, else 4 KiB at its start, at `(bytes - 4096) // 2` rounded down to a
   multiple of 64, and at its end. Names and dtypes as torch has them, bytes little-endian and row-major.
2. Files, shards and a state dict in memory give the same digest, where names and dtypes agree: the files' layout takes
   no part. An output head that equals another tensor is left out, because safetensors stores tied weights once; so are
   rotary frequencies, which are computed and not learnt.
3. One function for all adapters. A digest of files is remembered by device, inode, mtime and size of each.

What belongs here: what is hashed. How tensors are read is in tensors, how digests are remembered in digestcache.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from prefixcache.identity.digestcache import DigestCache, file_stamp
from prefixcache.identity.tensors import TensorRecord, read_tensors, state_dict_tensors, weight_files

SAMPLE_BYTES: Final = 4096
WHOLE_BYTES: Final = 3 * SAMPLE_BYTES
_ALIGNMENT: Final = 64

_COMPUTED = (".rotary_emb.inv_freq",)


def weights_digest(path: str | Path, *, cache: DigestCache | None = None) -> bytes:
    """The digest (32 bytes) of a checkpoint: a folder with safetensors files, or one such file.

    `cache`: where digests are remembered; None for the user's own. Raises TensorFileError for a file that is not whole,
    OSError when one cannot be read. Reads at most 12 KiB of each tensor.
    """
    files = weight_files(Path(path))
    cache = DigestCache() if cache is None else cache
    stamp = file_stamp(files)
    known = cache.get(stamp)
    if known is not None:
        return known
    with ExitStack() as stack:
        digest = digest_tensors(read_tensors(files, stack))
    if file_stamp(files) == stamp:  # else somebody wrote meanwhile, and the digest may be of a mixture
        cache.put(stamp, digest)
    return digest


def state_dict_digest(state_dict: Mapping[str, Any]) -> bytes:
    """The digest (32 bytes) of weights in memory: `model.state_dict()`, or a map of numpy arrays. Never cached."""
    return digest_tensors(state_dict_tensors(state_dict))


def digest_tensors(tensors: Iterable[TensorRecord]) -> bytes:
    """The digest (32 bytes) of any source of tensors, such as a reader of GGUF.

    The records are listed first and read afterwards, in the order of their names. Raises ValueError for none at all and
    for a name that occurs twice.
    """
    records = {tensor.name.encode(): tensor for tensor in _learnt(tensors)}
    if not records:
        raise ValueError("no tensors, so no weights digest")
    tied = _tied_heads(records.values())
    digest = hashlib.sha256()
    for name in sorted(records):
        tensor = records[name]
        if tensor.name not in tied:
            digest.update(_frame(name) + _frame(tensor.dtype.encode()) + _shape(tensor) + _samples(tensor))
    return digest.digest()


def _learnt(tensors: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    """The records without those that are computed. Raises ValueError for a name that occurs twice."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"tensor {tensor.name!r} occurs twice")
        seen.add(tensor.name)
        if not tensor.name.endswith(_COMPUTED):
            yield tensor


def _tied_heads(tensors: Iterable[TensorRecord]) -> set[str]:
    """Names of output heads that equal another tensor, told by dtype, shape and samples."""
    listed = list(tensors)
    heads = [tensor for tensor in listed if _is_head(tensor.name)]
    tied = set()
    for head in heads:
        alike = (other for other in listed if (other.dtype, other.shape) == (head.dtype, head.shape))
        if any(_samples(other) == _samples(head) for other in alike if not _is_head(other.name)):
            tied.add(head.name)
    return tied


def _is_head(name: str) -> bool:
    return name == "output.weight" or name.endswith(("lm_head.weight", "embed_out.weight"))


def _frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _shape(tensor: TensorRecord) -> bytes:
    return struct.pack(f"<I{len(tensor.shape)}QQ", len(tensor.shape), *tensor.shape, tensor.nbytes)


def _samples(tensor: TensorRecord) -> bytes:
    if tensor.nbytes <= WHOLE_BYTES:
        return tensor.read(0, tensor.nbytes)
    last = tensor.nbytes - SAMPLE_BYTES
    middle = last // 2 // _ALIGNMENT * _ALIGNMENT
    return b"".join(tensor.read(offset, SAMPLE_BYTES) for offset in (0, middle, last))
