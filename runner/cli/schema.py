"""``nightshift schema``: the JSON Schema of a format."""

from __future__ import annotations

import json

import click

NAMES = ("task", "profile", "policy", "script")


@click.command()
@click.argument("name", type=click.Choice(NAMES))
@click.option("--json", "as_json", is_flag=True, help="Accepted for uniformity: a schema is JSON anyway.")
def command(name: str, as_json: bool) -> None:  # noqa: ARG001  # see its help
    """Print the JSON Schema of a YAML format: task, profile, policy or script."""
    from runner.config.shape import schema_of
    from runner.errors import ConfigError

    schema = schema_of(name)
    if not schema:
        raise ConfigError(f"the schema of {name} is not in this installation", hint="install nightshift anew")
    click.echo(json.dumps(schema, indent=2, ensure_ascii=False))
