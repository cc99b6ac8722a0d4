"""Spreads a pool's pages over the machine's memory nodes, so that no worker's copies all come from the far one.

A hint to the kernel and nothing more: on a machine with one node, on an unknown architecture or in a sandbox that
forbids the call nothing happens, and the answer says so. Must come before the pages are touched.
"""

import ctypes
import os
import platform
from pathlib import Path

from prefixcache_offload.mapping import Mapping

_MPOL_INTERLEAVE = 3
_MBIND = {"x86_64": 237, "aarch64": 235}
_WORD_BITS = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def allowed_nodes(root: Path = Path("/")) -> list[int]:
    """The memory nodes this process may use, ascending; empty where the kernel does not tell."""
    try:
        status = (root / "proc/self/status").read_text()
    except OSError:
        return []
    text = next((line.split(":", 1)[1].strip() for line in status.splitlines() if "Mems_allowed_list:" in line), "")
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def interleave(mapping: Mapping, nodes: list[int] | None = None) -> str:
    """Interleave the pages of `mapping` over `nodes` (default: all allowed); "" when done, else why not."""
    chosen = allowed_nodes() if nodes is None else nodes
    if nodes is None and len(chosen) < len(("near", "far")):
        return "the machine has one memory node"
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"the call is not known on {platform.machine()}"
    words = (ctypes.c_ulong * (max(chosen) // _WORD_BITS + 1))()
    for node in chosen:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel reads one bit less than it is told.
    bits = len(words) * _WORD_BITS + 1
    where = (ctypes.c_void_p(mapping.address), ctypes.c_ulong(mapping.size_bytes))
    if _libc.syscall(ctypes.c_long(number), *where, _MPOL_INTERLEAVE, words, ctypes.c_ulong(bits), 0):
        return f"the kernel refused: {os.strerror(ctypes.get_errno())}"
    return ""
