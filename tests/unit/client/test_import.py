"""Importing the SDK brings neither an engine nor the server, and no gRPC before it is needed."""

import subprocess
import sys

FORBIDDEN = ("torch", "xxhash", "grpc", "transformers", "prefixcache.server", "prefixcache.core", "aiohttp", "redis")


def test_import_is_light() -> None:
    code = f"import sys, prefixcache_client; print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
