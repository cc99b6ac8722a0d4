"""Failures that the command line expects, and how it tells them.

Rules:
1. An expected failure is a `CliError`: one line that says what is wrong and a hint that says what to do next. It never
   shows a traceback. Anything else is a bug and shows one.
2. Exit code 1: the command was understood and failed. Exit code 2: it was not understood.
3. Under `--json` the failure is one object on standard output: {"error": {"message", "hint", "reason"}}.

It must not know the commands, gRPC or the server.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import typer
from typer.core import TyperGroup

FAILED: Final = 1
NOT_UNDERSTOOD: Final = 2
INTERRUPTED: Final = 130

# typer carries its own copy of click since 0.2x and used the real one before; either way this is the base of all
# "the command was not understood" errors.
_USAGE_ERROR: Final = cast(type[Exception], typer.BadParameter.__base__)


class CliError(Exception):
    """An expected failure. `message`: what is wrong, one line. `hint`: what to do next, "" if nothing helps."""

    def __init__(self, message: str, hint: str = "", *, reason: str = "failed", exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reason = reason
        self.exit_code = exit_code


def bad_usage(message: str, hint: str = "") -> CliError:
    """A command that parses but cannot be meant so."""
    return CliError(message, hint, reason="bad_usage", exit_code=NOT_UNDERSTOOD)


class Commands(TyperGroup):
    """The group of all commands: turns every expected failure into its line or its JSON object and its exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command line; with `standalone_mode` it ends in SystemExit, else errors are raised as they are."""
        given = sys.argv[1:] if args is None else list(args)
        run: Callable[..., Any] = super().main
        if not standalone_mode:
            return run(given, *rest, standalone_mode=False, **extra)
        try:
            code = run(given, *rest, standalone_mode=False, **extra)
        except CliError as error:
            code = _report(error, as_json="--json" in given)
        except _USAGE_ERROR as error:
            code = _report(_explain_usage(error), as_json="--json" in given)
        except typer.Abort:
            code = _report(CliError("stopped, nothing was changed", reason="aborted"), as_json="--json" in given)
        sys.exit(code if isinstance(code, int) else 0)


def _explain_usage(error: Exception) -> CliError:
    """The one line of an error of typer's parser."""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "prefixcache"
    return bad_usage(str(text).rstrip("."), f"`{command} --help` shows what it takes")


def _report(error: CliError, *, as_json: bool) -> int:
    if as_json:
        told = {"message": error.message, "hint": error.hint, "reason": error.reason}
        typer.echo(json.dumps({"error": told}))
    else:
        hint = f"\n  {error.hint}" if error.hint else ""
        typer.echo(f"error: {error.message}{hint}", err=True)
    return error.exit_code
