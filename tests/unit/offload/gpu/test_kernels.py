"""The kernel, interpreted on host memory, beside the plain copies: the same bytes, for every layout and dtype.

And compiled for real devices, which shows that triton takes it; that it runs on them is shown by tests/gpu.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache_offload import transfer
from prefixcache_offload.engine import Job, Move
from prefixcache_offload.gpu import kernels
from prefixcache_offload.memory import Memory
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch
from prefixcache_offload.strides import PartShape, Strided

GRANULE, PAGES = 4096, 6
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.float32]
LAYOUTS = ["cbthd", "cbhtd", "bcthd", "bhtd", "blcthd", "btd", "bhdt"]


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """The kernel as triton's interpreter makes it, for these tests alone; it is asked for when the kernel is made."""
    name = "prefixcache_offload.gpu.move_kernel"
    with pytest.MonkeyPatch.context() as patch:
        sys.modules.pop(name, None)
        kernels._kernel.cache_clear()
        patch.setenv("TRITON_INTERPRET", "1")
        kernels._kernel(8)
        yield
    sys.modules.pop(name, None)
    kernels._kernel.cache_clear()


@st.composite
def caches(draw: st.DrawFn, axes: str) -> tuple[PagedCache, list[torch.Tensor], list[Stretch]]:
    dtype = draw(st.sampled_from(DTYPES))
    dim, block = draw(st.sampled_from([2, 3, 8, 16])), draw(st.sampled_from([4, 6, 8]))
    mla, apart = axes == "btd", axes == "bhdt"
    heads = 1 if mla else draw(st.integers(1, 3))
    first_head = 0 if mla else draw(st.integers(0, 1))
    layers, page_tokens = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8, 16]))
    part = PartShape(heads + first_head, layers, block, dim, 0 if mla else dim, dtype.itemsize)
    sizes = {"c": 2, "b": PAGES, "h": heads, "l": layers, "t": page_tokens, "d": dim * (2 if axes == "bhtd" else 1)}
    tensors, members = [], []
    for layer in range(1 if "l" in axes else layers):
        for holds in ("k", "v") if apart else ("k",) if mla else ("kv",):
            raw = torch.randint(0, 256, (*(sizes[a] for a in axes), dtype.itemsize), dtype=torch.uint8)
            tensors.append(raw.view(dtype)[..., 0])
            members.append(PagedTensor(tensors[-1], axes, holds, layer))  # type: ignore[arg-type]  # of literals
    stop = draw(st.integers(0, 3 * page_tokens))
    start = draw(st.integers(0, stop))
    first_block = start // block
    slots = draw(st.permutations(range(14)))[: -(-stop // block) - first_block]
    stretch = Stretch(slots, draw(st.permutations(range(PAGES)))[:3], start, stop, first_block)
    if len(slots) < -(-stop // block) - first_block:
        stretch = Stretch([], [], 0, 0)
    return PagedCache(part, members, first_head=first_head), tensors, [stretch]


@pytest.mark.parametrize("axes", LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_kernel_moves_the_bytes_that_plain_copies_do(axes: str, data: st.DataObject) -> None:
    cache, tensors, stretches = data.draw(caches(axes))
    fresh = np.random.default_rng(3).integers(0, 256, 16 * GRANULE, dtype=np.uint8)
    plain, pool = fresh.copy(), fresh.copy()
    transfer.store(Memory.of_bytes(plain), cache.jobs(stretches))
    memory, jobs = Memory.of_bytes(pool), cache.jobs(stretches)
    found = kernels.launches(memory, jobs)
    assert found is not None
    kernels.move(found, "cpu", to_engine=False)
    assert np.array_equal(pool, plain)

    pool[:] = fresh[::-1]
    raw = [tensor.view(torch.uint8) if tensor.dtype.itemsize > 1 else tensor for tensor in tensors]
    before = [each.clone() for each in raw]
    transfer.load(memory, jobs)
    wanted = [each.clone() for each in raw]
    for each, was in zip(raw, before, strict=True):
        each.copy_(was)
    kernels.move(kernels.launches(memory, jobs) or [], "cpu", to_engine=True)
    for each, want in zip(raw, wanted, strict=True):
        assert torch.equal(each.view(torch.uint8), want.view(torch.uint8))


def moved(axes: str, tensors: int = 4, **sizes: int) -> list[kernels.Launch]:
    sizes = {"c": 2, "b": PAGES, "h": 2, "t": 4, "d": 16, **sizes}
    part = PartShape(2, tensors, 8, 16, 16, 2)
    members = [
        PagedTensor(torch.zeros([sizes[a] for a in axes], dtype=torch.bfloat16), axes, first_layer=i)
        for i in range(tensors)
    ]
    pool = Memory.of_bytes(np.zeros(16 * GRANULE, np.uint8))
    found = kernels.launches(pool, PagedCache(part, members).jobs([Stretch([1, 5, 9], [5, 0, 2, 4, 1, 3], 0, 24)]))
    assert found is not None
    return found


def test_one_launch_for_all_layers_and_both_components() -> None:
    (only,) = moved("cbthd")
    assert (len(only.pool), only.pool_at.size, only.shape.word) == (8, 6, 8)
    (only,) = moved("bhtd", d=32)
    assert len(only.pool) == 8
    (only,) = moved("cbhtd")  # tokens and values are one stretch on both sides
    assert only.shape.axes[-1] == kernels.Axis(4 * 16 * 2 // 8, 8, 8)


def test_words_are_as_large_as_everything_is_aligned_to() -> None:
    memory = Memory.of_bytes(np.zeros(4096, np.uint8))
    for offset, word in ((0, 8), (8, 8), (4, 4), (2, 2), (1, 1)):
        move = Move(Strided(0, (4, 8), (64, 1)), Strided(offset, (4, 8), (128, 1)))
        (launch,) = kernels.launches(memory, [Job(memory, [move], 1)]) or []
        assert launch.shape.word == word


def test_too_many_axes_are_left_to_torch_and_pieces_outside_are_refused() -> None:
    memory = Memory.of_bytes(np.zeros(4096, np.uint8))
    steps = (1024, 512, 128, 32, 4)
    tangled = Strided(0, (2, 2, 2, 2, 2), tuple(reversed(steps)))
    assert kernels.launches(memory, [Job(memory, [Move(Strided(0, (2,) * 5, steps), tangled)], 1)]) is None
    inside = Strided(0, (4,), (1,))
    for outside in (Strided(4093, (4,), (1,)), Strided(-1, (4,), (1,)), Strided(8, (4,), (-1,))):
        for move in (Move(outside, inside), Move(inside, outside)):
            with pytest.raises(ValueError, match="reaches out"):
                kernels.launches(memory, [Job(memory, [move], 1)])
    assert kernels.launches(memory, []) == []
    assert kernels.launches(memory, [Job(memory, [Move(Strided(0, (0,), (1,)), Strided(0, (0,), (1,)))], 1)]) == []


def test_transfer_launches_on_a_device_and_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that says it is on a device, and a kernel that is told it is not."""

    class OnDevice(Memory):
        on_host = property(lambda self: False)  # type: ignore[assignment]  # a plain property there too
        identity = property(lambda self: ("cuda:0", self.address))  # type: ignore[assignment]  # likewise

    ran: list[str] = []
    move = kernels.move

    def interpreted(found: Any, device: str, *, to_engine: bool) -> None:
        ran.append(device)
        move(found, "cpu", to_engine=to_engine)

    monkeypatch.setattr(kernels, "move", interpreted)
    data = np.arange(256, dtype=np.uint8)
    ours, theirs = OnDevice.of_bytes(data), OnDevice.of_bytes(np.zeros(256, np.uint8))
    job = Job(theirs, [Move(Strided(16, (4, 8), (16, 1)), Strided(0, (4, 8), (8, 1)))], 1)
    for usable in (True, False):
        monkeypatch.setattr(kernels, "_installed", lambda usable=usable: usable)
        assert transfer.load(ours, [job]) == 32
        assert np.array_equal(theirs.array(Strided(0, (4, 8), (8, 1)), 1), data[16:80].reshape(4, 16)[:, :8])
        theirs.array(Strided(0, (256,), (1,)), 1)[:] = 0
    assert ran == ["cuda:0"]
    assert not kernels.can_run_on("cpu")


COMPILE = """
import triton.language as tl, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from prefixcache_offload.gpu.move_kernel import move_pieces
for capability in (80, 90):
    for word in (tl.int8, tl.int64):
        types = {"table": "*i64", "pieces": "i32", "tensors": "i32"}
        fixed = {"WORD": word, "BLOCK": 1024, "TO_ENGINE": word is tl.int8}
        signature = {name: types.get(name, "constexpr") for name in move_pieces.arg_names}
        source = ASTSource(move_pieces, signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(capability, len(made.asm["cubin"]) > 0)
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_devices_that_are_not_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines() == ["80 True", "80 True", "90 True", "90 True"], done.stderr
