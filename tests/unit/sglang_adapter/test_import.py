"""The package is imported without SGLang, and says what it does not have."""

import subprocess
import sys

import pytest

import prefixcache_sglang


def test_importing_it_needs_neither_sglang_nor_torch() -> None:
    code = "import prefixcache_sglang, sys; assert not {'sglang', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        prefixcache_sglang.Nothing  # noqa: B018 # the access is the test
