"""Raw or coded: what lies between slots and a caller's tensors, for namespaces of either kind.

Callers describe their tensors as raw, always; whether slots hold a smaller form is the namespace's business, and is
seen here only. No leases, no calls, no generations.
"""

from collections.abc import Iterator, Sequence

from prefixcache_client.blocks import BlockFormat
from prefixcache_client.runs import SlotRun
from prefixcache_client.tensors import KvTensors, Slots
from prefixcache_offload import transfer
from prefixcache_offload.codecs import moves
from prefixcache_offload.codecs.apart import raw_stride
from prefixcache_offload.codecs.moves import CodedJob
from prefixcache_offload.engine import Job
from prefixcache_offload.memory import Memory

AnyJob = Job | CodedJob


def plan(form: BlockFormat, run: SlotRun, slots: Slots, tensors: KvTensors) -> list[AnyJob]:
    """What moves between `slots` (one per block of the run) and the tensors. Raises ValueError where sizes differ."""
    if form.coder is None:
        return list(tensors.jobs(form, run.part, run.blocks, slots))
    shape, dtype = form.shapes[run.part], form.dtype_of(run.part)
    step = max(1, moves.AT_ONCE_BYTES // raw_stride(shape))
    jobs: list[AnyJob] = []
    for first in range(0, run.count, step):
        some = slice(first, first + step)
        raw = moves.raw_slots(shape, len(slots[some]))
        planned = tensors.jobs(form.source, run.part, run.blocks[some], raw)
        jobs.append(CodedJob(form.coder, shape, dtype, slots[some], planned, run.heads, run.layers))
    return jobs


def load(pool: Memory, jobs: Sequence[AnyJob]) -> int:
    """From the pool to the tensors; see `transfer.load`."""
    plain, coded = _parted(jobs)
    return transfer.load(pool, plain) + moves.load(pool, coded)


def store(pool: Memory, jobs: Sequence[AnyJob]) -> int:
    """From the tensors to the pool; see `transfer.store`."""
    plain, coded = _parted(jobs)
    return transfer.store(pool, plain) + moves.store(pool, coded)


def memories(jobs: Sequence[AnyJob]) -> Iterator[Memory]:
    """The callers' memory that the jobs touch."""
    for job in jobs:
        if isinstance(job, CodedJob):
            yield from (each.memory for each in job.jobs)
        else:
            yield job.memory


def _parted(jobs: Sequence[AnyJob]) -> tuple[list[Job], list[CodedJob]]:
    plain = [job for job in jobs if not isinstance(job, CodedJob)]
    return plain, [job for job in jobs if isinstance(job, CodedJob)]
