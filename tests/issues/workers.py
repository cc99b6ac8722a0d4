"""Workers in processes of their own, which stop where a test wants them: in mid-fill, or with a lease in hand.

`python -m tests.issues.workers fill|read ADDRESS [TTL_S]` prints "there" when it has arrived and goes on at a line on
stdin; then it prints its result.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Blocks, Client, ClientOptions, Namespace
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.tensors import Places, Slots
from prefixcache_offload.engine import Job

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = Layout.of(LayerGroup(GroupKind.FULL, (0, 1, 2, 3), 4, 64, 64, "float32"))
BLOCK_TOKENS = 16
BLOCK_BYTES = 4 * 4 * BLOCK_TOKENS * 128 * 4
TOKENS = list(range(1, 8 * BLOCK_TOKENS + 1))
BLOCKS = 8


def namespace(client: Client) -> Namespace:
    """A namespace with blocks of 128 KiB."""
    return client.namespace(LAYOUT, b"w" * 32, block_tokens=BLOCK_TOKENS)


def bytes_of(seed: int, blocks: int = BLOCKS) -> npt.NDArray[np.uint8]:
    """u8[blocks, block bytes]."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)


class Paused:
    """Blocks that stop whoever copies them between the grant and the first byte."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def covers(self, form: BlockFormat, part: int) -> range:
        """See KvTensors."""
        return self._blocks.covers(form, part)

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See KvTensors; waits here."""
        planned = self._blocks.jobs(form, part, blocks, slots)
        self.pause()
        return planned

    def pause(self) -> None:
        """Say so and wait for a line."""
        print("there", flush=True)
        sys.stdin.readline()


class WorkerProcess:
    """A worker that has arrived."""

    def __init__(self, scenario: str, socket: Path, ttl_s: float = 0.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.issues.workers", scenario, f"unix://{socket}", str(ttl_s)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self.read() != "there":
            self.kill()
            raise RuntimeError("the worker did not arrive")

    def read(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> str:
        """Let it go on; its result."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main(scenario: str, address: str, ttl_s: float) -> None:
    """Run a scenario."""
    client = Client(address, ClientOptions(timeout_s=20, store_timeout_s=20, reservation_ttl_s=ttl_s))
    ns = namespace(client)
    if scenario == "fill":
        result = client.store(ns, TOKENS, Paused(Blocks(bytes_of(666))))
        print(result.stored_blocks, result.reason, flush=True)
    else:
        with client.acquire(ns, TOKENS) as lease:
            copied = lease.copy_to(Paused(Blocks(bytes_of(0))))
            print(copied.tokens, copied.reason, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
