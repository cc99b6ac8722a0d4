"""Generate prefixcache/v1 from proto/prefixcache/v1, or with --check tell whether the committed code is up to date.

The generator is pinned and lives in a virtual environment of its own (.venv-proto), because code from newer
generators refuses the protobuf 5.x and 6.x runtimes that inference engines pin, while code from this one runs on all
of protobuf 5.29 to 7.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TARGET = ROOT / "prefixcache" / "v1"
VENV = Path(os.environ.get("PREFIXCACHE_PROTO_VENV", ROOT / ".venv-proto"))
PINS = ("grpcio-tools==1.71.2", "mypy-protobuf==3.6.0", "setuptools<81")
INIT = '"""Generated messages and stubs of proto/prefixcache/v1; `python proto/generate.py` makes them."""\n'


def generator() -> Path:
    """Python of the generator's environment, made at first use."""
    python = VENV / "bin" / "python"
    stamp = VENV / "pins.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(PINS):
        venv.create(VENV, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS], check=True)
        stamp.write_text("\n".join(PINS))
    return python


def generate(target: Path) -> None:
    """Write the generated files below `target`, which becomes the parent of `prefixcache/v1`."""
    python = generator()
    sources = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ.get('PATH', '')}"}
    command = [python, "-m", "grpc_tools.protoc", "-I", PROTO]
    command += [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run([*command, *sources], check=True, env=environment, capture_output=True)
    (target / "prefixcache" / "v1" / "__init__.py").write_text(INIT)


def main() -> int:
    """Generate, or compare with what is committed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the code is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        (fresh / "prefixcache" / "v1").mkdir(parents=True)
        generate(fresh)
        made = sorted((fresh / "prefixcache" / "v1").iterdir())
        old = {p.name for p in TARGET.glob("*.py*")} - {p.name for p in made}
        stale = [p.name for p in made if not (TARGET / p.name).exists() or not filecmp.cmp(p, TARGET / p.name, False)]
        if check:
            for name in [*stale, *sorted(old)]:
                print(f"prefixcache/v1/{name} is stale; run `python proto/generate.py`", file=sys.stderr)
            return 1 if stale or old else 0
        for name in old:
            (TARGET / name).unlink()
        for path in made:
            (TARGET / path.name).write_bytes(path.read_bytes())
        print(f"{len(made)} files in {TARGET.relative_to(ROOT)}, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
