"""Which blocks hold a scheduled request's tokens, by KV cache group, whatever this version of vLLM tells.

Newer versions answer for any request of the step (`kv_connector_block_state.get_block_ids`); before, a connector put
the table together from what each step added (0.29 has that state too, but only for requests that got blocks). It must
not know what the pages are used for.
"""

from typing import Any

Table = tuple[list[int], ...]


class BlockTables:
    """Tables of running requests."""

    def __init__(self) -> None:
        self._tables: dict[str, Table] = {}
        self._state: Any = None

    def step(self, scheduler_output: Any) -> None:
        """A step was scheduled."""
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        self._state = state if hasattr(state, "get_block_ids") else None
        if self._state is not None:
            return
        for request in scheduler_output.scheduled_new_reqs:
            self._tables[request.req_id] = _copied(request.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        resumed = _resumed(cached)
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is None:
                continue
            if request_id in resumed or request_id not in self._tables:
                self._tables[request_id] = _copied(new)
            else:
                for table, more in zip(self._tables[request_id], new, strict=True):
                    table.extend(more)

    def get(self, request_id: str) -> Table | None:
        """The table of a request that the step schedules."""
        if self._state is not None:
            table: Table | None = self._state.get_block_ids(request_id)
            return table
        return self._tables.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._tables.pop(request_id, None)


def _copied(block_ids: Any) -> Table:
    groups = block_ids if not block_ids or isinstance(block_ids[0], list | tuple) else (block_ids,)
    return tuple(list(group) for group in groups)


def _resumed(cached: Any) -> set[str]:
    """Requests whose table was made anew: a set, or one flag for each request in older versions."""
    stated = getattr(cached, "resumed_req_ids", None)
    if stated is not None:
        return set(stated)
    flags = getattr(cached, "resumed_from_preemption", ())
    return {request_id for request_id, flag in zip(cached.req_ids, flags, strict=False) if flag}
