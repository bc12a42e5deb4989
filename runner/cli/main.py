"""The ``nightshift`` command: finds the command group, shows errors, sets the exit code.

Expected errors are one message with a code and a hint on stderr. Data goes to stdout only.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import click

from runner import __version__, diagnostics
from runner.cli.output import NO_SPACE, lost_output, say_error, show_error, show_traceback
from runner.errors import ErrorCode, RunnerError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "doctor": "Say which sandbox backends work here, why others do not, and what to do.",
    "plan": "Show the effective configuration of a task. Makes no model call.",
    "policy": "Check policies, and test them on recorded sessions.",
    "recover": "Seal and publish what a killed run left.",
    "resume": "Go on with a session whose run was killed or failed.",
    "run": "Run a task, unattended.",
    "schema": "Print the JSON Schema of a format.",
    "session": "Show, measure, verify and export session logs.",
}
"""Command group → one line for ``--help``. Each lives in ``runner.cli.<group>`` as ``command``."""

_EXIT_GRACE = 5.0
"""Seconds until a process that does not end by itself is ended."""


def _set_format(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value:
        diagnostics.configure(log_format=value)


def _set_level(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value:
        diagnostics.configure(level=value)


def _diagnostic_options() -> list[click.Option]:
    return [
        click.Option(
            ["--log-format"],
            type=click.Choice(["text", "json"]),
            expose_value=False,
            callback=_set_format,
            help="Format of the diagnostics on stderr.",
        ),
        click.Option(
            ["--log-level"],
            type=click.Choice(list(diagnostics.LEVELS)),
            expose_value=False,
            callback=_set_level,
            help="Lowest level of the diagnostics on stderr; warning if not given.",
        ),
    ]


def _add_options(command: click.Command) -> None:
    if isinstance(command, click.Group):
        for sub in command.commands.values():
            _add_options(sub)
    else:
        known = {name for parameter in command.params for name in parameter.opts}
        command.params.extend(option for option in _diagnostic_options() if not known & set(option.opts))


class _Commands(click.Group):
    """Loads a command group only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's signature
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"runner.cli.{cmd_name}").command
        if cmd_name not in ("resume", "run"):  # which import more before they begin
            gc.enable()
        _add_options(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's signature
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            also = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"no command {args[0]!r}.{also}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nightshift")
def cli() -> None:
    """Run LLM agents unattended: declared authority, a real sandbox, a log you can rely on."""


def run_cli(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        result: Any = cli.main(args=list(arguments), prog_name="nightshift", standalone_mode=False)
    except getattr(click.exceptions, "NoArgsIsHelpError", ()) as error:  # older versions of click print it themselves
        error.show()
        return ErrorCode.CONFIG_INVALID.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "nightshift"
        say_error(ErrorCode.CONFIG_INVALID.name, error.format_message(), f"see '{command} --help'")
        return ErrorCode.CONFIG_INVALID.exit_code
    except click.ClickException as error:
        say_error(ErrorCode.CONFIG_INVALID.name, error.format_message(), None)
        return ErrorCode.CONFIG_INVALID.exit_code
    except (click.Abort, KeyboardInterrupt):
        return ErrorCode.CANCELLED.exit_code
    except RunnerError as error:
        show_error(error)
        return error.code.exit_code
    except BrokenPipeError:
        return 0
    except SystemExit:
        return 0  # click's answer to a reader that went away
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        return _output_lost(error)
    code = result if isinstance(result, int) else 0
    lost = lost_output()
    if lost is not None:
        lost_code = _output_lost(lost)
        return code or lost_code  # what a run came to says more
    return code


def _output_lost(error: OSError) -> int:
    """Say that whoever asked for data on stdout does not have it, and return the exit code."""
    say_error(ErrorCode.STORAGE_FAILED.name, f"the output cannot be written: {error.strerror}", "free space there")
    return ErrorCode.STORAGE_FAILED.exit_code


def _open_standard_streams() -> None:
    """Make descriptors 0 to 2 exist, so that no file of ours is taken for one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is this one


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue  # it was closed when the process began
        try:
            stream.flush()
        except (OSError, ValueError):
            # The reader is gone. Python would complain again at exit, so point the descriptor elsewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> NoReturn:
    """Entry point of the installed command."""
    _open_standard_streams()
    try:
        code = run_cli(sys.argv[1:])
    except Exception as error:  # noqa: BLE001  # the last resort: our bug, said as such
        show_traceback(error)
        say_error(
            ErrorCode.INTERNAL.name, repr(error), "this is a bug in nightshift; please report it with the lines above"
        )
        code = ErrorCode.INTERNAL.exit_code
    _flush()
    from runner.signals import ignore_signals

    ignore_signals()
    watchdog = threading.Timer(_EXIT_GRACE, os._exit, [code])
    watchdog.daemon = True
    watchdog.start()
    sys.exit(code)
