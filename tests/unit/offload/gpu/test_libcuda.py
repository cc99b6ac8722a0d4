"""cuda-python itself against a driver in C that has no device: that every call gets the arguments it is meant to.

The fake in Python stands where cuda-python does, so it cannot see what cuda-python makes of a number or a struct; this
one is loaded by it. Needs a C compiler.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = Path(__file__).with_name("fake_libcuda.c")

SCRIPT = """
import json, os
import numpy as np
from prefixcache_offload.gpu import PoolContext, cuda_import, import_device_pool, open_device_pool
from prefixcache_offload.memory import _Raw
from prefixcache_offload.pool import HostPool

cuda_import.tensor_over = lambda address, size, index: np.asarray(_Raw(address, size, None, writable=False))
before, mib = len(os.listdir("/proc/self/fd")), 1 << 20
host = HostPool.create(1, 4 * mib, mib)
host.data[:] = np.random.default_rng(1).integers(0, 256, 4 * mib, dtype=np.uint8)
name = "cuda:GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
pool = open_device_pool(name, 4 * mib, context=PoolContext(3, mib, mib))
into = pool.copy_in(host, [0, 300], [8, 0], 8000)
into.wait(60)
export = pool.export()
worker = import_device_pool(export, export.fds, "cuda:0")
seen = worker.tensor()
arrived = (seen[32768:40768] == host.data[:8000]).all() and (seen[:8000] == host.slot(300, 8000)).all()
out = pool.copy_out(host, [8], [600], 8000)
out.wait(60)
back = (host.slot(600, 8000) == host.slot(0, 8000)).all()
del seen
worker.close()
pool.close()
host.close()
left = len(os.listdir("/proc/self/fd")) - before
print(json.dumps([export.handle, str(into.error), str(out.error), bool(arrived), bool(back), left]))
"""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("handle", ["cuda_fd", "cuda_ipc"])
def test_cuda_python_makes_of_our_arguments_what_the_driver_wants(tmp_path: Path, handle: str) -> None:
    library = tmp_path / "libcuda.so.1"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True, timeout=120)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    if handle == "cuda_ipc":
        environment["FAKE_NO_DESCRIPTORS"] = "1"
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [handle, "None", "None", True, True, 0]
