"""vLLM's own tiered CPU offload on a CPU: its spec with a worker that copies between two places in host memory.

vLLM's worker needs a GPU. Everything above it (scheduler side, primary tier, secondary tiers) is vLLM's own.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc] # no vLLM where types are checked
    """Loaded with `spec_name` and `spec_module_path`."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """See the base class, which refuses CPUs."""
        if self._worker is None:
            chunks = getattr(self, "num_chunks", None) or self.num_blocks  # versions name them in two ways
            rank, page = getattr(self.config.parallel, "rank", 0), self.cpu_page_size_per_worker
            region = SharedOffloadRegion(self._engine_id, chunks, rank, self.kv_bytes_per_chunk, page)
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CpuWorker(OffloadingWorker):  # type: ignore[misc] # as above
    """Copies in `submit_store` and `submit_load`, which are therefore done at once."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._pages = [each.tensor for each in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._chunks = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk) for each in kv_caches.tensors
        ]
        self._region = region
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See the base class."""
        for page, chunk in self._pairs(src_spec, dst_spec):
            chunk.copy_(page)
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See the base class."""
        for page, chunk in self._pairs(dst_spec, src_spec):
            page.copy_(chunk)
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        """See the base class."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: everything is done."""

    def shutdown(self) -> None:
        """See the base class."""
        self._pages, self._chunks = [], []
        self._region.cleanup()

    def _pairs(self, pages: Any, chunks: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same size: a page of the engine, and its place in a chunk."""
        pairs, page_ids, chunk_ids = [], pages.block_ids.tolist(), chunks.block_ids.tolist()
        per_chunk = self._blocks_per_chunk
        for group, (count, first) in enumerate(zip(pages.group_sizes, pages.block_indices, strict=True)):
            skipped = first % per_chunk
            used = -(-(skipped + count) // per_chunk) if count else 0
            for at, page_id in enumerate(page_ids[:count]):
                chunk_at, place = divmod(skipped + at, per_chunk)
                for ref in self._refs[group]:
                    size = self._chunks[ref.tensor_idx].shape[1] // per_chunk
                    chunk = self._chunks[ref.tensor_idx][chunk_ids[chunk_at]]
                    page = self._pages[ref.tensor_idx][page_id]
                    part = slice(0, ref.page_size_bytes)
                    pairs.append((page[part], chunk[place * size : (place + 1) * size][part]))
            page_ids, chunk_ids = page_ids[count:], chunk_ids[used:]
        return pairs
