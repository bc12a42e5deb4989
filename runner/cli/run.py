"""``nightshift run``: one task, unattended, to its artifacts and exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runner.cli.options import Function, load_command, read_options, run_options
from runner.cli.output import put, put_json, say, say_error
from runner.errors import SOFT_FAIL_CLASSES, ConfigError
from runner.figures import counted, decimals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.cancellation import Cancellation
    from runner.messages import JsonObject
    from runner.run import FinishedRun, RunOptions


def check_classes(classes: Sequence[str]) -> None:
    """Refuse what ``--soft-fail`` cannot soften.

    Raises:
        ConfigError: CONFIG_INVALID, a class is unknown or may not be softened.
    """
    for name in classes:
        if name not in SOFT_FAIL_CLASSES:
            raise ConfigError(
                f"--soft-fail {name}: no class that may be softened", hint=f"one of {', '.join(SOFT_FAIL_CLASSES)}"
            )


def _cost(result: JsonObject) -> str:
    from runner.artifacts.usage import INPUT_BUCKETS

    usage = result["usage"]
    tokens = sum(usage[bucket] or 0 for bucket in INPUT_BUCKETS)
    money = "cost unknown" if result["costUsd"] is None else f"{decimals(result['costUsd'], 4)} USD"
    return f"{money}, {tokens:,} tokens in, {usage['output'] or 0:,} out, {counted(result['steps'], 'step')}"


def _show_text(result: JsonObject, directory: Path) -> None:
    """The final message on stdout; outcome, cost and where the report is on stderr."""
    if result["finalMessage"]:
        put(result["finalMessage"])
    say(
        f"{result['code']} (exit code {result['exitCode']}): {_cost(result)}",
        code=result["code"],
        exitCode=result["exitCode"],
    )
    say(f"report: {directory / 'summary.md'}")


def _show_failure(result: JsonObject) -> None:
    error = result["error"]
    if error is not None:
        say_error(error["code"], error["message"], error.get("hint"))


_OUTPUT_OPTIONS = (
    click.option(
        "--output-format",
        type=click.Choice(["text", "json", "stream-json"]),
        default="text",
        show_default=True,
        help="What stands on stdout: the final message, result.json, or a line for each event.",
    ),
    click.option("--soft-fail", "soft_fail", metavar="CLASS", multiple=True, help="Exit 0 for this class of failure."),
    click.option("--paranoid", is_flag=True, help="Compare every request with its rebuild from the log."),
)


def output_options(function: Function) -> Function:
    """Give a command that runs a task the options ``output_format, soft_fail, paranoid``."""
    for option in reversed(_OUTPUT_OPTIONS):
        function = option(function)
    return function


@click.command("run")
@run_options
@output_options
def command(task: str | None, artifacts: str | None, **options: Any) -> int:
    """Run TASK (a YAML file), or the task in --prompt, without asking anybody anything."""
    output = {key: options.pop(key) for key in ("output_format", "soft_fail", "paranoid")}
    check_classes(output["soft_fail"])
    noted = read_options(task=task, **options)
    spec = load_command(noted, check_credentials=True)

    from runner.run import run_task

    def start(run_options: RunOptions, cancellation: Cancellation) -> FinishedRun:
        return run_task(spec, run_options, environ=os.environ, cancellation=cancellation)

    return carry_out(start, noted, artifacts=None if artifacts is None else Path(artifacts), **output)


def carry_out(
    start: Callable[[RunOptions, Cancellation], FinishedRun],
    noted: JsonObject,
    *,
    output_format: str,
    soft_fail: Sequence[str],
    paranoid: bool,
    artifacts: Path | None = None,
) -> int:
    """Carry out one run with its output and signals; returns the exit code.

    Args:
        start: Runs it.
        noted: Options of the command line, for whoever goes on with it.
        output_format: What stands on stdout.
        soft_fail: Failure classes that exit 0.
        paranoid: Compare every request with its rebuild.
        artifacts: Where the artifacts go; None for the default place.
    """
    from runner.artifacts.stream import StreamJson
    from runner.cancellation import Cancellation
    from runner.run import RunOptions
    from runner.sandbox.process import harden_self
    from runner.signals import CancelOnSignal

    streams: list[StreamJson] = []

    def begin_stream(session_id: str, workspace: str) -> StreamJson:
        streams.append(StreamJson(session_id=session_id, cwd=workspace, write=put_json))
        return streams[-1]

    harden_self()
    cancellation = Cancellation()
    with CancelOnSignal(cancellation, say=say):
        finished = start(
            RunOptions(
                artifacts=artifacts,
                soft_fail=tuple(soft_fail),
                paranoid=paranoid,
                observe=begin_stream if output_format == "stream-json" else None,
                command=noted,
            ),
            cancellation,
        )
    for stream in streams:
        stream.finish(finished.result)
    if output_format == "json":
        put_json(json.dumps(finished.result, indent=2, ensure_ascii=False))
    if output_format == "text":
        _show_text(finished.result, finished.directory)
    _show_failure(finished.result)
    if finished.softened:
        say(
            f"soft-fail: the class {finished.result['failureClass']} is softened, "
            f"so the process exits 0 in place of {finished.result['exitCode']}"
        )
    return finished.exit_code
