"""What a transfer on another thread must wait for on the device: the work the engine had queued when it was ordered.

On the CPU there is nothing to wait for. On CUDA the transfer runs on a stream of its own behind an event, so that it
neither overtakes the engine's kernels nor holds them up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in the engine's stream. Made by `here`."""

    device: torch.device | None
    event: Any

    @classmethod
    def here(cls, tensor: torch.Tensor | None) -> "Fence":
        """The point that the current stream of the tensor's device has come to."""
        if tensor is None or tensor.device.type != "cuda":
            return cls(None, None)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        return cls(tensor.device, event)

    @contextmanager
    def after(self) -> Iterator[None]:
        """Device work in this context comes behind the point."""
        if self.device is None:
            yield
            return
        stream = _stream(self.device)
        stream.wait_event(self.event)
        with torch.cuda.stream(stream):
            yield


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
