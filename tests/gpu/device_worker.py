"""A second process that imports a device pool: started by tests/gpu, told what it imports over a socket.

Prints one JSON object: the sum of the first bytes of every slot asked for, whether their generations hold, and what was
wrong instead.
"""

import json
import os
import socket
import sys

import torch

from prefixcache_offload.export import HandleKind, PoolDescriptor, PoolExport, receive_descriptors
from prefixcache_offload.gpu import DeviceError, import_device_pool
from prefixcache_offload.units import SLOT_GRANULE


def main() -> None:
    """Read one message with descriptors, answer on standard output."""
    data, fds = receive_descriptors(socket.socket(fileno=int(sys.argv[1])), 65536)
    told = json.loads(data)
    descriptor = PoolDescriptor(told["pool_id"], "gpu", told["size_bytes"], told["slab_bytes"], writable=False)
    handle = bytes.fromhex(told["ipc_handle"])
    export = PoolExport(descriptor, HandleKind(told["handle"]), (), told["device_uuid"], handle)
    try:
        pool = import_device_pool(export, fds, told["device"])
    except DeviceError as error:
        print(json.dumps({"error": f"{error.reason}: {error}"}))
        return
    finally:
        for fd in fds:
            os.close(fd)
    whole = pool.tensor()
    assert isinstance(whole, torch.Tensor)
    copies = [whole[slot * SLOT_GRANULE :][: told["slot_bytes"]].clone() for slot in told["slots"]]
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    intact = pool.check_generations(told["slots"], told["generations"]).tolist()
    sums = [int(copy.sum(dtype=torch.int64)) for copy in copies]
    pool.close()
    print(json.dumps({"sums": sums, "intact": intact}))


if __name__ == "__main__":
    main()
