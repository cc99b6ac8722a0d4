"""The benchmark's worker: a process of its own, as an engine's is, that measures through the SDK.

It gets its orders as one JSON object on standard input and answers with one on standard output. Started anew, because
GLIBC_TUNABLES is read once, when a process begins: with it numpy's copies of whole blocks bypass the caches, which is
worth a factor of 1.6 to the limit and to the cache alike.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from prefixcache.cli.bench.daemon import BenchDaemon
from prefixcache.cli.bench.plan import Plan
from prefixcache.cli.errors import CliError

TUNABLES: Final = "glibc.cpu.x86_non_temporal_threshold=0x40000"
Measure = Callable[[str, Path, Plan], Any]


def ask(section: str, daemon: BenchDaemon, plan: Plan) -> Any:
    """What a new worker process measures of `section` against `daemon`. Raises CliError when it fails."""
    order = {"address": daemon.address, "folder": str(daemon.folder), "plan": dataclasses.asdict(plan)}
    done = subprocess.run(
        [sys.executable, "-m", __name__, section],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"GLIBC_TUNABLES": TUNABLES},
    )
    if done.returncode:
        raise CliError(f"the benchmark's worker failed at {section}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main(section: str) -> None:
    """Take the order, measure, answer."""
    order = json.load(sys.stdin)
    plan = Plan(**{name: _frozen(value) for name, value in order["plan"].items()})
    print(json.dumps(_measure(section)(order["address"], Path(order["folder"]), plan)))


def _measure(section: str) -> Measure:
    if section == "acquire":
        from prefixcache.cli.bench import acquire

        return acquire.measure
    if section == "codec":
        from prefixcache.cli.bench import codec

        return codec.measure
    if section == "overhead":
        from prefixcache.cli.bench import overhead

        return overhead.measure
    from prefixcache.cli.bench import transfer

    return transfer.measure


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main(sys.argv[1])
