"""The connection broke while a worker was filling slots. The worker lived on and had stopped writing, but could not say
so in its next session: the slots stayed quarantined until it exited, and a few breaks later the pool was gone."""

from prefixcache.v1 import cache_pb2
from prefixcache_client import Blocks, Client, ClientOptions, Namespace
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.tensors import Places, Slots
from prefixcache_client.transport import RESERVE
from prefixcache_offload.engine import Job
from tests.e2e.processes import DaemonProcess
from tests.issues.conftest import store_soon
from tests.issues.workers import TOKENS, bytes_of, namespace


class Breaking:
    """Blocks that break the connection between the grant and the first byte."""

    def __init__(self, blocks: Blocks, client: Client) -> None:
        self._blocks = blocks
        self._client = client

    def covers(self, form: BlockFormat, part: int) -> range:
        """See KvTensors."""
        return self._blocks.covers(form, part)

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See KvTensors; the connection ends here."""
        planned = self._blocks.jobs(form, part, blocks, slots)
        session = self._client._link.session
        assert session is not None
        session.transport.close()
        return planned


def test_the_slots_come_back_while_the_worker_lives(client: Client, ns: Namespace) -> None:
    for attempt in range(3):  # 8 blocks each, of 16
        tokens = [attempt, *TOKENS[1:]]
        result = client.store(ns, tokens, Breaking(Blocks(bytes_of(attempt)), client))
        assert result.stored_blocks == 0
        assert store_soon(client, ns, tokens, attempt)


def test_another_process_cannot_abort(daemon: DaemonProcess, client: Client) -> None:
    """Over gRPC nobody knows which process is calling, so an id of somebody else's is refused there."""
    with Client(f"unix://{daemon.socket}", ClientOptions(timeout_s=20, local_channel=False)) as stranger:
        ns = namespace(client)
        stranger.lookup(ns, TOKENS)

        class Aborted(Breaking):
            def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
                planned = self._blocks.jobs(form, part, blocks, slots)
                (reservation,) = reserved
                stranger._link.abort(reservation)
                stranger.lookup(ns, TOKENS)
                return planned

        reserved = _watch_reservations(client)
        assert client.store(ns, TOKENS, Aborted(Blocks(bytes_of(1)), client)).stored_blocks == len(bytes_of(1))


def _watch_reservations(client: Client) -> list[bytes]:
    """Ids of the reservations that `client` asks for from now on."""
    client.lookup(namespace(client), TOKENS)
    session = client._link.session
    assert session is not None
    seen: list[bytes] = []
    send = session.transport.call

    def call(method: int, payload: bytes, timeout_s: float) -> bytes:
        if method == RESERVE:
            seen.append(cache_pb2.ReserveRequest.FromString(payload).reservation)
        return send(method, payload, timeout_s)

    session.transport.call = call  # type: ignore[method-assign]  # the test listens in
    return seen
