"""Which device's memory this process can read beside host memory: the GPU it computes on.

The daemon is told the device's UUID, because indices differ from process to process. Nothing is imported and no device
is touched where none is used. No pools, no calls.
"""

import logging
import sys
from dataclasses import dataclass
from typing import Any, Final

log = logging.getLogger("prefixcache_client")

AUTO: Final = "auto"
CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """`name` as this process calls it (`cuda:0`, or `cpu` for the stand-in), `uuid` as every process does."""

    name: str
    uuid: str


def find(wish: str) -> WorkerDevice | None:
    """The device for `ClientOptions.device`; None where there is none, or where it cannot be used (told in the log)."""
    name = _in_use() if wish == AUTO else wish
    if not name:
        return None
    if name == CPU:
        return WorkerDevice(CPU, CPU)
    from prefixcache_offload.gpu import DeviceError, cuda, driver

    try:
        return WorkerDevice(name, cuda.find(driver.load(), name)[1])
    except DeviceError as error:
        # Without a wish it may well be that nobody wants copies there.
        level = logging.INFO if wish == AUTO else logging.WARNING
        log.log(level, "copies in the memory of %s are not used: %s", name, error)
        return None


def _in_use() -> str:
    """The CUDA device that this thread's torch computes on; empty where torch or CUDA was not begun."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return ""
    return f"cuda:{cuda.current_device()}"
