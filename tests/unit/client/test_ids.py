"""Ids are never given twice, by no thread and no forked child."""

import os
from concurrent.futures import ThreadPoolExecutor

from prefixcache_client.ids import ID_BYTES, new_id


def test_ids_are_sixteen_bytes_and_all_different() -> None:
    with ThreadPoolExecutor(4) as pool:
        made = [one for many in pool.map(lambda _: [new_id() for _ in range(500)], range(8)) for one in many]
    assert len(set(made)) == len(made)
    assert {len(one) for one in made} == {ID_BYTES}


def test_a_forked_child_draws_ids_of_its_own() -> None:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, b"".join(new_id() for _ in range(4)))
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(readable, 4 * ID_BYTES)
    ours = [new_id() for _ in range(4)]
    os.close(readable)
    os.close(writable)
    assert {theirs[at : at + 8] for at in range(0, 4 * ID_BYTES, ID_BYTES)}.isdisjoint(one[:8] for one in ours)
