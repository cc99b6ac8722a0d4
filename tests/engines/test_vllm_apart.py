"""Engines that must not share beside each other on one daemon: a model's next revision, and another dtype of it."""

from pathlib import Path

from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import Engine

LONG = prompt(1, 700)


def test_revisions_and_dtypes_never_share(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    address = f"unix://{shared_daemon.socket}"
    seen = set()
    with Engine(checkpoints("llama"), address, log=tmp_path / "first") as first:
        cold = first.one(LONG)
        first.call("settle")
        seen.add(first.call("fingerprint"))
        for name, model, settings in (
            ("revision", "llama-next", {}),
            ("dtype", "llama", {"dtype": "float32"}),
        ):
            with Engine(checkpoints(model), address, log=tmp_path / name, **settings) as other:
                computed = other.one(LONG)
                assert computed.cached == 0, name
                other.call("settle")
                again = other.one(LONG)
                assert (again.cached, again.tokens) == (640, computed.tokens), name
                seen.add(other.call("fingerprint"))
                if name == "revision":
                    assert computed.tokens != cold.tokens
        loaded = first.one(LONG)
        assert (loaded.cached, loaded.tokens) == (640, cold.tokens)
    assert len(seen) == 3
