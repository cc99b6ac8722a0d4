"""Which namespace a command means: by label, by the beginning of its fingerprint, or the only one there is."""

from __future__ import annotations

from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.v1 import admin_pb2


def choose(stats: admin_pb2.GetStatsResponse, wanted: str | None) -> admin_pb2.NamespaceStats:
    """The namespace that `wanted` names. Raises CliError when it names none or several."""
    if not stats.namespaces:
        raise CliError("the daemon holds no namespace yet", "run a worker against it first", reason="namespace_unknown")
    found = [item for item in stats.namespaces if wanted is None or matches(item, wanted)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(name(item) for item in (found or stats.namespaces))
    if found:
        what = "several namespaces are there" if wanted is None else f"{wanted!r} names several namespaces"
        raise bad_usage(f"{what}: {listed}", "choose one with --namespace LABEL or --namespace FINGERPRINT")
    raise CliError(f"no namespace is called {wanted!r}", f"there are: {listed}", reason="namespace_unknown")


def matches(namespace: admin_pb2.NamespaceStats, wanted: str) -> bool:
    """Whether `wanted` is the label or begins the fingerprint in hexadecimal."""
    return bool(wanted) and (namespace.label == wanted or namespace.fingerprint.hex().startswith(wanted.lower()))


def name(namespace: admin_pb2.NamespaceStats) -> str:
    """A namespace for people: `SmolLM2 (3fa98b12)`."""
    short = namespace.fingerprint.hex()[:8]
    return f"{namespace.label} ({short})" if namespace.label else short
