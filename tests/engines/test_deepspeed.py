"""The Transformers adapter under DeepSpeed-Inference, on the CPU: what docs/transformers.md says of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.documents import programs, reused
from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.transformers_side import MAX_KL, TransformersSide
from tests.engines.vllm_engine import OFFLINE

deepspeed = pytest.importorskip("deepspeed", reason="make test-engines installs it")

SHARED = 640


def engine_of(folder: Path, dtype: torch.dtype, **settings: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return deepspeed.init_inference(model, dtype=dtype, **settings)


def test_prefixes_are_reused(shared_daemon: DaemonProcess, checkpoints: Checkpoints) -> None:
    folder, address = checkpoints("llama"), f"unix://{shared_daemon.socket}"
    written = prompt(301, SHARED + 60)
    with (
        TransformersSide.of(engine_of(folder, torch.bfloat16), address) as first,
        TransformersSide.of(engine_of(folder, torch.bfloat16), address) as second,
        TransformersSide(folder, address) as plain,
    ):
        said, _ = first.says(written)
        alone = first.says_alone(written)
        assert said == alone
        columns, kl = second.moved(written)
        assert (columns, kl <= MAX_KL) == (SHARED, True), kl
        # Its frequencies were cast, so its keys are not those of the checkpoint: it must share with its like only.
        assert first.fingerprint == second.fingerprint != plain.fingerprint
        assert plain.moved(written)[0] == 0


def test_in_float32_it_shares_with_all(shared_daemon: DaemonProcess, checkpoints: Checkpoints) -> None:
    folder, address = checkpoints("llama"), f"unix://{shared_daemon.socket}"
    written = prompt(302, SHARED + 60)
    with (
        TransformersSide.of(engine_of(folder, torch.float32), address) as engine,
        TransformersSide(folder, address, torch.float32) as plain,
    ):
        said, _ = engine.says(written)
        assert plain.says(written) == (said, SHARED)


def test_injected_kernels_are_not_for_cpus(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match="not been implemented on CPU"):
        engine_of(checkpoints("llama"), torch.float32, replace_with_kernel_inject=True)


def test_the_documented_program(shared_daemon: DaemonProcess, checkpoints: Checkpoints) -> None:
    blocks = programs("docs/transformers.md", f"unix://{shared_daemon.socket}", checkpoints("llama"))
    done = subprocess.run(
        [sys.executable, "-c", blocks[0] + blocks[2]],
        env=os.environ | OFFLINE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert reused(done.stdout), done.stdout
