"""The `prefixcache` command: what there is to run and what each command takes.

Rules: declarations only. Whatever a command needs is imported when it runs, because `prefixcache --help` and a shell's
completion must be instant. `--json` and `--address` are taken before and behind a command's name.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixcache.cli import prefix_commands
from prefixcache.cli.errors import Commands
from prefixcache.cli.options import NamespaceOption, PromptFile, SaltOption, TenantKeyOption, TokenizerOption
from prefixcache.cli.output import AddressOption, JsonFlag, Settings
from prefixcache.cli.serve_command import ConfigFile, with_config_flags

app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Prefix caching and KV offloading for LLM inference: one daemon per host, shared by every worker.",
)
config_app = typer.Typer(help="The daemon's configuration.")
app.add_typer(config_app, name="config")


class Section(StrEnum):
    """What `bench` can measure."""

    ACQUIRE = "acquire"
    LOAD = "load"
    STORE = "store"
    INDEX = "index"
    OVERHEAD = "overhead"
    DISK = "disk"
    RESTART = "restart"
    CODEC = "codec"
    ALL = "all"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    *,
    json: JsonFlag = False,
    address: AddressOption = None,
    version: Annotated[bool, typer.Option("--version", help="Print the release and end.", show_default=False)] = False,
) -> None:
    context.obj = Settings(as_json=json, address=address)
    if version:
        from prefixcache.cli.version import run

        run(context.obj)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@with_config_flags
def serve(*, config: ConfigFile = None, **flags: Any) -> None:
    """Run the daemon. Without arguments it serves this user on a unix socket."""
    from prefixcache.cli.serve_command import run

    raise typer.Exit(run(flags, config))


@app.command()
def status(context: typer.Context, *, json: JsonFlag = False, address: AddressOption = None) -> None:
    """Show tiers, namespaces, hit rate, sessions and health."""
    from prefixcache.cli.status import run

    run(Settings.of(context, as_json=json, address=address))


@app.command()
def describe(
    context: typer.Context,
    file: PromptFile,
    *,
    tokenizer: TokenizerOption = None,
    namespace: NamespaceOption = None,
    cache_salt: SaltOption = "",
    tenant_key_file: TenantKeyOption = None,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Show how much of a prompt is cached, and in which tiers."""
    from prefixcache.cli.describe import run
    from prefixcache.cli.prompts import Prompt

    prompt = Prompt(file, tokenizer, cache_salt, tenant_key_file, namespace)
    run(Settings.of(context, as_json=json, address=address), prompt)


@app.command()
def clear(
    context: typer.Context,
    *,
    namespace: NamespaceOption = None,
    everything: Annotated[bool, typer.Option("--all", help="All namespaces.", show_default=False)] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", show_default=False)] = False,
    json: JsonFlag = False,
    address: AddressOption = None,
) -> None:
    """Drop the cached blocks of a namespace, or of all; leased ones stay."""
    from prefixcache.cli.clear import run

    run(Settings.of(context, as_json=json, address=address), namespace, everything=everything, yes=yes)


prefix_commands.add_to(app)


@config_app.callback(invoke_without_command=True)
def config_root(context: typer.Context, *, json: JsonFlag = False) -> None:
    context.obj = Settings.of(context, as_json=json)
    if context.invoked_subcommand is None:
        from prefixcache.cli.config_command import show

        show(context.obj, {}, None)


@config_app.command("show")
@with_config_flags
def config_show(context: typer.Context, *, config: ConfigFile = None, json: JsonFlag = False, **flags: Any) -> None:
    """Show every setting, its value and who set it. Takes the flags of `serve`."""
    from prefixcache.cli.config_command import show

    show(Settings.of(context, as_json=json), flags, config)


@app.command()
def bench(
    context: typer.Context,
    sections: Annotated[
        list[Section] | None,
        typer.Argument(metavar="[acquire|load|store|index|overhead|disk|restart|codec|all]...", show_default="all"),
    ] = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds and small sizes: shows that it works, not how fast.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Measure what the cache costs, beside the limit of each figure. Starts its own daemon."""
    from prefixcache.cli.bench.command import run

    run(Settings.of(context, as_json=json), {section.value for section in sections or []}, quick=quick)


@app.command()
def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="Trace: JSON lines, plain or gzipped.")],
    *,
    policy: Annotated[str, typer.Option(metavar="NAMES", help="Policies, comma between.")] = "lru,tg,optimum",
    capacity: Annotated[
        str, typer.Option(metavar="SIZES", help="Shares of unique blocks (0.05), blocks (2000) or bytes (4GiB).")
    ] = "0.01,0.05,0.1,0.2",
    block_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, max=65_536, help="Tokens of a block of the trace.")
    ] = 512,
    block_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes of a block.")] = None,
    gpu_capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A GPU pool above memory, as large as this.")
    ] = None,
    disk_capacity: Annotated[
        str | None, typer.Option(metavar="SIZES", help="A disk below memory, as large as this; 0 for none.")
    ] = None,
    disk_bandwidth: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second that the disk reads, and writes.")
    ] = "3GB",
    host_bandwidth: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second that workers copy out of memory.")
    ] = "20GB",
    prefill_rate: Annotated[
        float, typer.Option(metavar="TOKENS", min=1, help="Tokens a second that prefill computes.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of policies that draw lots.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the sweep into a PNG.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Go on without malformed lines.")] = False,
    json: JsonFlag = False,
) -> None:
    """Replay a trace: what would caches of some sizes have hit, under which policy?"""
    from prefixcache.cli.simulate import Options, run

    options = Options(
        policy, capacity, block_tokens, block_bytes, gpu_capacity, disk_capacity, disk_bandwidth, host_bandwidth,
        prefill_rate, seed, plot, skip_bad,
    )  # fmt: skip
    run(Settings.of(context, as_json=json), trace, options)


@app.command()
def demo(
    context: typer.Context,
    *,
    prompts: Annotated[int, typer.Option(metavar="N", min=2, help="Prompts that share the system prompt.")] = 8,
    json: JsonFlag = False,
) -> None:
    """Let two workers with a real model share a system prompt. Starts its own daemon and leaves nothing behind."""
    from prefixcache.cli.demo import run

    run(Settings.of(context, as_json=json), prompts)


def main() -> None:
    """Entry point of the `prefixcache` script."""
    app()


if __name__ == "__main__":
    main()
