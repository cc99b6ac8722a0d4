"""Replays one seed and prints what happened: `python -m tests.sim SEED`; exit status 1 if it found something."""

from __future__ import annotations

import sys
import traceback

from prefixcache.core.invariants import InvariantError
from tests.sim.fakes import SimError
from tests.sim.simulator import Simulator


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not arguments[0].lstrip("-").isdigit():
        print("usage: python -m tests.sim SEED")
        return 2
    simulator = Simulator(int(arguments[0]))
    try:
        simulator.run()
    except (SimError, InvariantError, AssertionError) as error:
        print("\n".join(simulator.log))
        traceback.print_exc()
        print(f"seed {arguments[0]}: {error}")
        return 1
    print("\n".join(simulator.log))
    print(f"seed {arguments[0]}: nothing wrong in {len(simulator.log)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
