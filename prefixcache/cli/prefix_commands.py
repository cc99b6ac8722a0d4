"""Commands about single prefixes: pin, unpin, pins, prefetch, prefixes, evict; and drain and flush.

Rules: as in `main`, which adds them to the app: declarations only, everything else is imported when a command runs.
"""

from typing import Annotated

import typer

from prefixcache.cli.options import (
    FirstTokensOption,
    NamespaceOption,
    PromptFile,
    SaltOption,
    TenantKeyOption,
    TokenizerOption,
)
from prefixcache.cli.output import AddressOption, JsonFlag, Settings


def add_to(app: typer.Typer) -> None:
    """Make them commands of `app`."""
    for command in (lookup, watch, pin, unpin, pins, prefetch, prefixes, evict, drain, flush):
        app.command()(command)


def lookup(
    context: typer.Context,
    file: PromptFile,
    *,
    tokens: FirstTokensOption = None,
    tokenizer: TokenizerOption = None,
    namespace: NamespaceOption = None,
    cache_salt: SaltOption = "",
    tenant_key_file: TenantKeyOption = None,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Show what a router is told of a prompt: tokens by node and tier, and how long those on disk take to load."""
    from prefixcache.cli.lookup import run
    from prefixcache.cli.prompts import Prompt

    prompt = Prompt(file, tokenizer, cache_salt, tenant_key_file, namespace, tokens)
    run(Settings.of(context, as_json=json, address=address), prompt)


def watch(
    context: typer.Context,
    *,
    namespace: NamespaceOption = None,
    kind: Annotated[str, typer.Option(metavar="KINDS", help="stored, removed, moved, cleared; comma between.")] = "",
    tier: Annotated[str, typer.Option(metavar="TIERS", help="host, disk, gpu; comma between.")] = "",
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="First what is held already.", show_default=False)
    ] = False,
    count: Annotated[int, typer.Option(metavar="N", min=0, help="End after N events; 0 never.")] = 0,
    lasts: Annotated[str | None, typer.Option("--for", metavar="TIME", help="End after a time, e.g. 30s.")] = None,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Show blocks as they are stored, moved and removed, a line each; Ctrl-C ends it with a summary."""
    from prefixcache.cli.watch import run, wish_of

    wish = wish_of(namespace, kind, tier, (count, lasts), snapshot=snapshot)
    run(Settings.of(context, as_json=json, address=address), wish)


def pin(
    context: typer.Context,
    file: PromptFile,
    *,
    label: Annotated[str, typer.Option(help="For people, e.g. 'system prompt v3'.", show_default=False)] = "",
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long, e.g. 12h. Default: the daemon's (a day).")
    ] = None,
    forever: Annotated[
        bool, typer.Option("--forever", help="Until it is unpinned or cleared.", show_default=False)
    ] = False,
    tokens: FirstTokensOption = None,
    tokenizer: TokenizerOption = None,
    namespace: NamespaceOption = None,
    cache_salt: SaltOption = "",
    tenant_key_file: TenantKeyOption = None,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Keep a prompt's blocks in memory, stored or not yet; over restarts too."""
    from prefixcache.cli.pins import pin as run
    from prefixcache.cli.prompts import Prompt

    prompt = Prompt(file, tokenizer, cache_salt, tenant_key_file, namespace, tokens)
    run(Settings.of(context, as_json=json, address=address), prompt, label, ttl, forever=forever)


def unpin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Label of the pin, or the beginning of its id.")],
    *,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """End a pin. Its blocks stay cached until something else needs the room."""
    from prefixcache.cli.pins import unpin as run

    run(Settings.of(context, as_json=json, address=address), name)


def pins(context: typer.Context, *, json: JsonFlag = False, address: AddressOption = None) -> None:
    """List what is pinned, and what it takes."""
    from prefixcache.cli.pins import pins as run

    run(Settings.of(context, as_json=json, address=address))


def prefetch(
    context: typer.Context,
    file: PromptFile,
    *,
    tokens: FirstTokensOption = None,
    tokenizer: TokenizerOption = None,
    namespace: NamespaceOption = None,
    cache_salt: SaltOption = "",
    tenant_key_file: TenantKeyOption = None,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Begin to bring a prompt's blocks from disk to memory."""
    from prefixcache.cli.pins import prefetch as run
    from prefixcache.cli.prompts import Prompt

    prompt = Prompt(file, tokenizer, cache_salt, tenant_key_file, namespace, tokens)
    run(Settings.of(context, as_json=json, address=address), prompt)


def prefixes(
    context: typer.Context,
    *,
    namespace: NamespaceOption = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Most bytes first, not most tokens served.", show_default=False)
    ] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="At most so many.")] = 20,
    offset: Annotated[int, typer.Option(metavar="N", min=0, help="Leave out the first N.")] = 0,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """List the hottest or largest prefixes."""
    from prefixcache.cli.prefixes import prefixes as run

    page = range(offset, offset + limit)
    run(Settings.of(context, as_json=json, address=address), namespace, page, largest=largest)


def evict(
    context: typer.Context,
    file: PromptFile,
    *,
    subtree: Annotated[
        bool,
        typer.Option("--subtree", help="Everything that begins with this prompt (or --from-token), others' too."),
    ] = False,
    from_token: Annotated[
        int | None,
        typer.Option("--from-token", metavar="N", min=0, help="With --subtree: from its block on."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also what is leased (goes with its lease) or pinned.", show_default=False)
    ] = False,
    tokens: FirstTokensOption = None,
    tokenizer: TokenizerOption = None,
    namespace: NamespaceOption = None,
    cache_salt: SaltOption = "",
    tenant_key_file: TenantKeyOption = None,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Drop the blocks of a prompt that no other prompt goes through; refused while they are leased or pinned."""
    from prefixcache.cli.prefixes import evict as run
    from prefixcache.cli.prompts import Prompt

    prompt = Prompt(file, tokenizer, cache_salt, tenant_key_file, namespace, tokens)
    run(Settings.of(context, as_json=json, address=address), prompt, from_token, subtree=subtree, force=force)


def drain(
    context: typer.Context,
    *,
    timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long to wait. Default: the daemon's drain_timeout.")
    ] = None,
    shutdown: Annotated[
        bool, typer.Option("--shutdown", help="End the daemon afterwards.", show_default=False)
    ] = False,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Have the daemon take no new work, and wait for what runs."""
    from prefixcache.cli.draining import drain as run

    run(Settings.of(context, as_json=json, address=address), timeout, shutdown=shutdown)


def flush(context: typer.Context, *, json: JsonFlag = False, address: AddressOption = None) -> None:
    """Write what only memory holds to disk."""
    from prefixcache.cli.draining import flush as run

    run(Settings.of(context, as_json=json, address=address))
