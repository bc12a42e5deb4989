"""``nightshift schema``: the JSON Schema of a format."""

from __future__ import annotations

import click


@click.command(name="schema")
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Changes nothing: a schema is JSON.")
def command(name: str, as_json: bool) -> None:  # noqa: ARG001  # see its help
    """Print the JSON Schema NAME.

    Formats of files: task, profile, policy, script. Formats of output: plan, policy-check, policy-test,
    result, usage, context, compact, event.
    """
    from runner.config.load import near_miss
    from runner.config.shape import shipped_directory
    from runner.errors import ConfigError

    folder, suffix = shipped_directory() / "schema", ".schema.json"
    known = sorted(path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}"))
    if name not in known:
        near = near_miss(name, known)
        meant = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"there is no schema {name!r}", hint=f"{meant}there are {', '.join(known)}")
    click.echo((folder / f"{name}{suffix}").read_text(encoding="utf-8"), nl=False)
