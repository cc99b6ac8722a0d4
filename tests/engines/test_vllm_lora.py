"""One vLLM with several LoRA adapters: requests share blocks with those of the same adapter's bytes and no other. And
prompts that come as embeddings, which share with nobody."""

import shutil
from pathlib import Path

from tests.e2e.processes import DaemonProcess, wait_until
from tests.engines import models
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.test_vllm_server import HITS
from tests.engines.vllm_engine import Engine, Output
from tests.engines.vllm_server import Server, documented_flag

LONG = prompt(31, 700)


def test_adapters_and_embeddings_separate(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    one, other, copy = (str(tmp_path / name) for name in ("one", "other", "copy"))
    models.make_lora(Path(one), 1)
    models.make_lora(Path(other), 2)
    shutil.copytree(one, copy)
    settings = {
        "enable_prompt_embeds": True,
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 8,
        "connector": {"ask_timeout_s": 5.0},
    }
    with Engine(checkpoints("llama"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", **settings) as engine:
        # vLLM gives embeddings tokens that say nothing: they are neither stored nor looked up.
        first, again, another = (Output(**engine.call("embedded", seed=seed, tokens=200)) for seed in (1, 1, 2))
        engine.call("settle")
        assert (again.tokens, again.cached, another.cached) == (first.tokens, 0, 0)
        assert another.tokens != first.tokens
        assert engine.call("counts")["skipped"] == {"prompt_embeds": 3}
        said = {}
        for adapter in (None, one, other):
            computed = _ask(engine, adapter)
            assert computed.cached == 0, adapter
            engine.call("settle")
            said[adapter] = computed.tokens
        assert len({tuple(tokens) for tokens in said.values()}) == 3
        for adapter in (None, one, other):
            loaded = _ask(engine, adapter)
            assert (loaded.cached, loaded.tokens) == (640, said[adapter])
        loaded = _ask(engine, copy)
        assert (loaded.cached, loaded.tokens) == (640, said[one]), "an adapter is its bytes, not its name"
        # The workers keep what they read under a number. Files that changed since say nothing about it.
        for file in Path(other).iterdir():
            shutil.copy(file, one)
        kept = _ask(engine, one)
        assert (kept.cached, kept.tokens) == (0, said[one])
        assert engine.call("counts")["skipped"] == {"prompt_embeds": 3, "lora_changed": 1}
        replaced = _ask(engine, one, load_inplace=True)
        assert (replaced.cached, replaced.tokens) == (640, said[other])
        # Another one under a name that was taken, as after unloading and loading in a server.
        renamed = _ask(engine, copy, lora_name=one, lora_int_id=2000)
        assert (renamed.cached, renamed.tokens) == (640, said[one])


def test_adapters_over_http(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As a user serves them: a model's name is an adapter's, and one that two names lead to is one."""
    one, other = (str(tmp_path / name) for name in ("one", "other"))
    models.make_lora(Path(one), 11)
    models.make_lora(Path(other), 12)
    flags = [
        "--kv-transfer-config", documented_flag(f"unix://{shared_daemon.socket}"), "--no-enable-prefix-caching",
        "--enable-lora", "--max-loras", "3", "--max-lora-rank", "8",
        "--lora-modules", f"one={one}", f"other={other}", f"again={one}",
    ]  # fmt: skip
    tokens = prompt(32, 700)
    with Server(checkpoints("llama"), tmp_path / "server.log", *flags) as server:

        def asked(name: str) -> tuple[tuple[int, ...], float]:
            before = server.metric(HITS)
            said = tuple(server.complete(tokens, model=name))
            return said, server.metric(HITS) - before

        def stored(blocks: int) -> bool:
            return server.metric("vllm:prefixcache_saved_blocks_total") >= blocks

        said = {}
        for number, name in enumerate(("tiny", "one", "other"), 1):
            said[name], hit = asked(name)
            assert hit == 0, f"{name} found what is not its own"
            assert wait_until(lambda number=number: stored(11 * number))
        assert len(set(said.values())) == 3
        for name, known in (("tiny", "tiny"), ("one", "one"), ("other", "other"), ("again", "one")):
            assert asked(name) == (said[known], 640), name


def _ask(engine: Engine, adapter: str | None, **more: object) -> Output:
    return engine.one(LONG, lora=None if adapter is None else {"lora_path": adapter, **more})
