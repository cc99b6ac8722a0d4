"""Bytes that views can be made of, whether numpy or torch owns them; torch is imported only if a torch tensor comes in.

`Memory.array` and `Memory.tensor` realise one `Strided` on either side. Tensors made here are for copying only and must
not be handed out: over a read-only mapping an in-place operation would be SIGSEGV, which is why such a tensor can only
be had with `as_source=True`.
"""

import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from prefixcache_offload.mapping import Bytes
from prefixcache_offload.strides import Strided

if TYPE_CHECKING:
    import torch

WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""numpy's unsigned integers by their size."""


def is_tensor(thing: object) -> bool:
    """Whether `thing` is a torch tensor; does not import torch."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(thing, torch_module.Tensor)


class Memory:
    """A flat range of bytes, in this process or on a device."""

    def __init__(self, flat: "Bytes | None", tensor: "torch.Tensor | None") -> None:
        """Use `of_bytes` or `of_tensor`."""
        self._flat = flat
        self._tensor = tensor
        self._words: dict[int, torch.Tensor] = {}

    @classmethod
    def of_bytes(cls, flat: Bytes) -> "Memory":
        """Over contiguous u8[n], for example a mapped pool; it is kept alive."""
        if flat.dtype != np.uint8 or flat.ndim != 1 or not flat.flags.c_contiguous:
            raise ValueError("memory is described by contiguous u8[n]")
        return cls(flat, None)

    @classmethod
    def of_array(cls, array: npt.NDArray[Any]) -> tuple["Memory", Strided]:
        """The memory under any array, and where the array lies in it."""
        reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
        before = -sum(step for step in reach if step < 0) if array.size else 0
        size = before + sum(step for step in reach if step > 0) + array.itemsize if array.size else 0
        raw = _Raw(array.__array_interface__["data"][0] - before, size, array, writable=array.flags.writeable)
        return cls(np.asarray(raw), None), Strided(before, array.shape, array.strides)

    @classmethod
    def of_tensor(cls, tensor: "torch.Tensor") -> tuple["Memory", Strided]:
        """The storage under a torch tensor on any device, and where the tensor lies in it."""
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        place = Strided(start, tuple(tensor.shape), tuple(stride * size for stride in tensor.stride()))
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu":
            return cls(np.asarray(_Raw(storage.data_ptr(), storage.nbytes(), storage, writable=True)), None), place
        import torch

        return cls(None, torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)), place

    @property
    def on_host(self) -> bool:
        """Whether numpy can reach it."""
        return self._flat is not None

    @property
    def address(self) -> int:
        """Where it begins. Raises ValueError for device memory."""
        if self._flat is None:
            raise ValueError("device memory has no address here")
        return int(self._flat.__array_interface__["data"][0])

    @property
    def identity(self) -> tuple[str, int]:
        """Equal for two views of one allocation of one device: where it begins, and which memory that is."""
        if self._flat is not None:
            return "host", self.address
        tensor = cast("torch.Tensor", self._tensor)
        return str(tensor.device), tensor.data_ptr()

    @property
    def flat(self) -> Bytes:
        """All of it, u8[size_bytes]. Raises ValueError for device memory."""
        if self._flat is None:
            raise ValueError("numpy cannot reach device memory")
        return self._flat

    @property
    def device(self) -> "torch.device":
        """torch's name of where it is."""
        import torch

        return torch.device("cpu") if self._flat is not None else cast("torch.Tensor", self._tensor).device

    @property
    def writable(self) -> bool:
        """Whether it may be the target of a copy."""
        return self._flat is None or bool(self._flat.flags.writeable)

    @property
    def size_bytes(self) -> int:
        """Bytes."""
        return self._flat.size if self._flat is not None else cast("torch.Tensor", self._tensor).numel()

    def array(self, view: Strided, itemsize: int) -> npt.NDArray[Any]:
        """`view` as unsigned integers of `itemsize`. Raises ValueError when it reaches out of the memory."""
        if self._flat is None:
            raise ValueError("numpy cannot reach device memory")
        return np.ndarray(view.shape, WORDS[itemsize], self._flat, view.offset, view.strides)

    def tensor(self, view: Strided, itemsize: int, *, as_source: bool) -> "torch.Tensor":
        """`view` as torch integers of `itemsize`, for one copy and nothing else.

        Raises ValueError when it reaches out of the memory, or when read-only memory is not wanted `as_source`.
        """
        if not as_source and not self.writable:
            raise ValueError("read-only memory cannot be the target of a copy")
        _check_inside(view, itemsize, self.size_bytes)
        strides = [stride // itemsize for stride in view.strides]
        return self._base(itemsize).as_strided(view.shape, strides, view.offset // itemsize)

    def wait(self) -> None:
        """Wait until the copies queued on the current stream of this memory's device are over; at once on the host."""
        if self._flat is None:
            import torch

            device = cast("torch.Tensor", self._tensor).device
            torch.get_device_module(device).current_stream(device).synchronize()

    def _base(self, itemsize: int) -> "torch.Tensor":
        if itemsize not in self._words:
            import torch

            words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            if self._tensor is None:
                self._tensor = _tensor_over(cast(Bytes, self._flat))
            whole = self.size_bytes - self.size_bytes % itemsize
            self._words[itemsize] = self._tensor[:whole].view(words[itemsize])
        return self._words[itemsize]


class _Raw:
    """An address range that numpy makes u8[size_bytes] of, keeping its owner alive; the owner named it a moment ago."""

    def __init__(self, address: int, size_bytes: int, owner: object, *, writable: bool) -> None:
        self.owner = owner
        data = (address, not writable)
        self.__array_interface__ = {"version": 3, "shape": (size_bytes,), "typestr": "|u1", "data": data}


def _tensor_over(flat: Bytes) -> "torch.Tensor":
    """A torch tensor over `flat`, also when it is read-only: torch has no such notion, so it stays in this file."""
    import torch

    return torch.from_numpy(np.asarray(_Raw(flat.ctypes.data, flat.size, flat, writable=True)))


def _check_inside(view: Strided, itemsize: int, size_bytes: int) -> None:
    if any(stride % itemsize or stride < 0 for stride in view.strides) or view.offset % itemsize:
        raise ValueError(f"{view} is not made of forward steps of {itemsize} bytes")
    last = sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True))
    if view.offset < 0 or (view.elements and view.offset + last + itemsize > size_bytes):
        raise ValueError(f"{view} reaches out of {size_bytes} bytes")
