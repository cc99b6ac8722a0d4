"""`prefixcache clear`: drops cached blocks of one namespace or of all, after asking."""

from __future__ import annotations

import sys

import typer

from prefixcache.cli import namespaces
from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import bad_usage
from prefixcache.cli.output import Settings
from prefixcache.v1 import admin_pb2


def run(settings: Settings, namespace: str | None, *, everything: bool, yes: bool) -> None:
    """Drop and tell how many blocks went and how many stay because they are leased."""
    if everything and namespace is not None:
        raise bad_usage("--all and --namespace exclude each other", "give one of them")
    with connect(settings.address) as daemon:
        stats = daemon.stats()
        chosen = None if everything else namespaces.choose(stats, namespace)
        listed = list(stats.namespaces) if chosen is None else [chosen]
        blocks = sum(item.blocks for item in listed)
        what = f"all {len(listed)} namespaces" if chosen is None else f"namespace {namespaces.name(chosen)}"
        if not yes:
            _ask(f"drop {blocks:,} blocks of {what} at {daemon.address}?", as_json=settings.as_json)
        answer = daemon.evict(admin_pb2.EvictRequest(fingerprint=b"" if chosen is None else chosen.fingerprint))
    told = {
        "cleared_blocks": answer.blocks,
        "kept_blocks": answer.kept,
        "namespaces": [{"label": item.label, "fingerprint": item.fingerprint.hex()} for item in listed],
    }
    kept = f"; {answer.kept:,} stay because they are leased" if answer.kept else ""
    settings.emit(told, lambda: [f"dropped {answer.blocks:,} blocks of {what}{kept}"])


def _ask(question: str, *, as_json: bool) -> None:
    """Return when the user says yes. A script has nobody to ask and must say --yes."""
    if as_json or not sys.stdin.isatty():
        raise bad_usage("clearing needs a yes", "add --yes")
    if not typer.confirm(question, err=True):
        raise typer.Abort
