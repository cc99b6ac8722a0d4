"""`python -m prefixcache.server`: the daemon without the command line's comforts, for tests and supervisors.

Every key of the configuration is a flag; `prefixcache serve` is the same with help, JSON errors and colours.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from prefixcache.server import app
from prefixcache.server.config import Config, ConfigError, load


def main(arguments: list[str] | None = None) -> int:
    """Parse flags and serve; the exit code (2: a configuration that cannot be used)."""
    parser = argparse.ArgumentParser(prog="python -m prefixcache.server", allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="TOML file; PREFIXCACHE_CONFIG otherwise")
    parser.add_argument("--ready-fd", type=int, help="gets a newline when the server is ready")
    for item in fields(Config):
        action = "append" if item.metadata.get("repeatable") else "store"
        parser.add_argument(f"--{item.name.replace('_', '-')}", help=item.metadata["doc"], action=action)
    flags = vars(parser.parse_args(arguments))
    file, ready_fd = flags.pop("config"), flags.pop("ready_fd")
    try:
        return app.run(load(flags, file=file), ready_fd)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
