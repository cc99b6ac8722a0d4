"""`prefixcache --version`."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prefixcache.cli.output import Settings

UNKNOWN: Final = "unknown"


def release() -> str:
    """The installed release; "unknown" when running from a source tree that was never installed."""
    try:
        return version("prefixcache")
    except PackageNotFoundError:
        return UNKNOWN


def run(settings: Settings) -> None:
    """Print it."""
    told = release()
    settings.emit({"version": told}, lambda: [f"prefixcache {told}"])
