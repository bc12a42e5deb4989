"""Writes pages of ``docs/reference`` from the code: errors, exit codes, events, commands, formats.

A tool for working on this project: ``python -m runner.reference --write`` writes the pages,
``--check`` fails when one differs from what the code says. Pure apart from those two; writes no
events and has no effect on the prefix cache.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import SIGNAL_EXIT_CODES, SOFT_FAIL_CLASSES, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import click

ROOT = Path(__file__).resolve().parent.parent

NOTE = "<!-- Generated from the code by `make docs WRITE=1`. Do not edit. -->"

FORMATS = {
    "task": "`*.task.yaml`: what to do, on which workspace, and what counts as done.",
    "profile": "`*.profile.yaml`: with which model, sandbox, tools, approvals and limits.",
    "policy": "`*.policy.yaml`: which tool calls are allowed.",
    "script": "`*.script.yaml`: the answers of the `scripted` provider.",
}
"""The YAML formats, each with a JSON Schema in ``configs/schema``."""

_OWN_PAGE = frozenset({"Policy"})
"""Definitions of a schema that have a page of their own and are not spelled out in another."""

_ENVELOPE = """\
One JSON object a line. The envelope is `type`, `seq` (from 0, without gaps), `time` (epoch milliseconds), `data`,
and where it applies `ignorable`, `sourceEventSeqs` and `surfaceOp`. A reader skips an unknown event that is
`ignorable` and refuses any other."""


def errors_page() -> str:
    """The page of all error codes, in three groups."""
    outcomes = [code for code in ErrorCode if code.value.exit_code is not None]
    refined = [code for code in ErrorCode if code.value.parent is not None]
    results = [code for code in ErrorCode if code not in outcomes and code not in refined]
    return _page(
        "Error codes",
        "Codes are API: they are never renamed and never reused. Route on the code, never on the text of a message.",
        "## Outcomes",
        "How a run, or another command, can end. Each has an exit code of its own, see [exit codes](exit-codes.md).",
        _table(("code", "class", "meaning"), [(f"`{c}`", _class(c), c.meaning) for c in outcomes]),
        "## Finer codes",
        "They stand in messages and logs and take the exit code of the outcome they belong to.",
        _table(("code", "outcome", "meaning"), [(f"`{c}`", f"`{c.outcome}`", c.meaning) for c in refined]),
        "## Codes of tool results",
        "The model reads them in the result of a call; they end nothing by themselves. `POLICY_DENIED` is one, too.",
        _table(("code", "meaning"), [(f"`{c}`", c.meaning) for c in results]),
    )


def exit_codes_page() -> str:
    """The page of process exit codes."""
    rows = []
    for code in ErrorCode:
        if code.value.exit_code is None:
            continue
        numbers = SIGNAL_EXIT_CODES.values() if code is ErrorCode.CANCELLED else [code.exit_code]
        rows.append((", ".join(map(str, numbers)), f"`{code}`", _class(code), code.meaning))
    return _page(
        "Exit codes",
        "Every command uses this table. `result.json` holds the same name, class and number.",
        _table(("exit code", "name", "class", "meaning"), rows),
        "## Soft failures",
        "`--soft-fail CLASS` makes one class exit 0; `result.json` keeps the number and says `softFailed: true`. "
        f"The classes that allow it: {', '.join(f'`{name}`' for name in SOFT_FAIL_CLASSES)}.",
    )


def events_page() -> str:
    """The page of the session log's events: fields, writers, readers."""
    from runner.session.events import EVENT_TYPES

    parts = [
        _ENVELOPE,
        _table(
            ("event", "written by", "read by", "surface", "ignorable"),
            [
                (f"[`{name}`](#{_anchor(name)})", cls.WRITER, cls.READERS, _yes(cls.SURFACE), _yes(cls.IGNORABLE))
                for name, cls in EVENT_TYPES.items()
            ],
        ),
    ]
    for name, cls in EVENT_TYPES.items():
        parts += [f"## {name}", inspect.cleandoc(cls.__doc__ or "").replace("``", "`")]
        if cls.FIELDS:
            rows = [(f"`{field.name}`", field.kind, _yes(field.required)) for field in cls.FIELDS]
            parts.append(_table(("field of `data`", "type", "required"), rows))
    return _page("Events of the session log", *parts)


_STREAMS = """\
Data goes to stdout, everything else to stderr. Nothing ever prompts.

Data that a full disk does not take is an error for whoever asked for it: STORAGE_FAILED (15), also where a run itself
is COMPLETED; its artifacts are whole nevertheless. A run that failed keeps its own exit code. A reader that goes away
is no error."""


def commands_page() -> str:
    """The page of the command line, one section a command."""
    from runner.cli.main import cli

    parts = [_STREAMS]
    for path, command in _commands(cli, ("nightshift",)):
        parts += [f"## {' '.join(path)}", inspect.cleandoc(command.help or "").replace("``", "`")]
        arguments, options = _parameters(command)
        usage = " ".join([*path, *arguments, *(["[OPTIONS]"] if options else [])])
        parts.append(f"```\n{usage}\n```")
        if options:
            parts.append(_table(("option", "meaning"), options))
    return _page("Commands", *parts)


def artifacts_page() -> str:
    """The page of the artifacts directory, with the fields of ``result.json`` and ``usage.json``."""
    from runner.artifacts.schema import reference_parts

    parts = [part if isinstance(part, str) else _table(*part) for part in reference_parts()]
    return _page("Artifacts", *parts)


def format_page(name: str) -> str:
    """The page of one YAML format, from its JSON Schema.

    Args:
        name: A key of ``FORMATS``.
    """
    schema = json.loads((ROOT / "configs" / "schema" / f"{name}.schema.json").read_text(encoding="utf-8"))
    rows = [
        (f"`{key}`", kind, default, text)
        for key, kind, default, text in _schema_rows(schema, schema, prefix="", seen=())
    ]
    return _page(
        f"{name.capitalize()} file",
        FORMATS[name],
        f"Unknown keys are errors. JSON Schema: `configs/schema/{name}.schema.json`, or `nightshift schema {name}`.",
        _table(("key", "type", "default", "meaning"), rows),
    )


def pages(written: Mapping[str, str]) -> dict[str, str]:
    """File name in ``docs/reference`` → its whole text, for each page that is generated.

    Args:
        written: Name and text of the pages that people write; the index lists them, too.
    """
    builders: dict[str, Callable[[], str]] = {
        "artifacts.md": artifacts_page,
        "commands.md": commands_page,
        "errors.md": errors_page,
        "events.md": events_page,
        "exit-codes.md": exit_codes_page,
    }
    texts = {name: build() for name, build in builders.items()}
    texts |= {f"{name}.md": format_page(name) for name in FORMATS}
    titles = {name: text.splitlines()[0].removeprefix("# ") for name, text in {**written, **texts}.items()}
    index = "\n".join(f"- [{title}]({name})" for name, title in sorted(titles.items()))
    return {**texts, "README.md": _page("Reference", index)}


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; returns the exit code. Pages without the note at their top are left alone."""
    if list(arguments) not in (["--write"], ["--check"]):
        print("usage: python -m runner.reference --write | --check", file=sys.stderr)
        return ErrorCode.CONFIG_INVALID.exit_code
    folder = ROOT / "docs" / "reference"
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    written = {name: text for name, text in present.items() if NOTE not in text}
    expected = pages(written)
    names = expected.keys() | (present.keys() - written.keys())
    changed = sorted(name for name in names if expected.get(name) != present.get(name))
    if arguments[0] == "--check":
        for name in changed:
            print(f"docs/reference/{name} is not what the code says; run: make docs WRITE=1", file=sys.stderr)
        return ErrorCode.TASK_FAILED.exit_code if changed else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        if name in expected:
            (folder / name).write_text(expected[name], encoding="utf-8")
        else:
            (folder / name).unlink()
        print(f"docs/reference/{name}")
    return 0


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTE, *parts]) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _class(code: ErrorCode) -> str:
    return f"`{code.failure_class}`" if code.failure_class else "none"


def _yes(value: bool) -> str:
    return "yes" if value else ""


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, only letters, digits, dashes and underscores."""
    return "".join(char for char in heading.lower() if char.isalnum() or char in "-_")


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    import click

    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        sub = command.get_command(context, name)
        if sub is not None:
            yield from _commands(sub, (*path, name))


def _parameters(command: click.Command) -> tuple[list[str], list[tuple[str, str]]]:
    """Arguments as they stand in a usage line, and a row for each option."""
    import click

    arguments, options = [], []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            if parameter.hidden:
                continue
            name = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
            value = "" if parameter.is_flag or parameter.count else f" {_value_of(parameter)}"
            repeat = " (may be repeated)" if parameter.multiple else ""
            options.append((name + value, f"{parameter.help or ''}{repeat}"))
        else:
            name = (parameter.metavar or str(parameter.name)).strip("[]").upper()
            name += "..." if parameter.nargs == -1 and not name.endswith("...") else ""
            arguments.append(name if parameter.required else f"[{name}]")
    return arguments, options


def _value_of(option: click.Option) -> str:
    import click

    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return option.metavar or option.type.name.upper()


def _schema_rows(
    node: dict[str, Any], root: dict[str, Any], *, prefix: str, seen: tuple[str, ...]
) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every property below ``node``, depth first."""
    required = node.get("required", [])
    for key, declared in node.get("properties", {}).items():
        inner, references = _follow(declared, root)
        path = f"{prefix}{key}"
        default = "required" if key in required else _default(declared)
        yield path, _type_of(declared, root), default, declared.get("description") or inner.get("description", "")
        for child, suffix, references_to in _children(inner, root, references):
            if not set(references_to) & {*seen, *_OWN_PAGE}:
                yield from _schema_rows(child, root, prefix=path + suffix, seen=(*seen, *references_to))


def _children(
    node: dict[str, Any], root: dict[str, Any], references: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], str, tuple[str, ...]]]:
    """The objects that a value may hold: itself, the items of a list, the values of a mapping, alternatives."""
    if "properties" in node:
        yield node, ".", references
    for alternative in [*node.get("anyOf", []), *node.get("oneOf", [])]:
        inner, more = _follow(alternative, root)
        yield from _children(inner, root, (*references, *more))
    if isinstance(node.get("items"), dict):
        inner, more = _follow(node["items"], root)
        for child, suffix, found in _children(inner, root, (*references, *more)):
            yield child, "[]" + suffix, found
    if isinstance(node.get("additionalProperties"), dict):
        inner, more = _follow(node["additionalProperties"], root)
        for child, suffix, found in _children(inner, root, (*references, *more)):
            yield child, ".NAME" + suffix, found


def _follow(node: dict[str, Any], root: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Resolve ``$ref``; returns the node and the names of the definitions passed."""
    names: tuple[str, ...] = ()
    while "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        names = (*names, name)
        node = root["$defs"][name]
    return node, names


def _default(node: dict[str, Any]) -> str:
    value = node.get("default")
    return "" if value in (None, [], {}) else f"`{json.dumps(value, ensure_ascii=False)}`"


def _type_of(node: dict[str, Any], root: dict[str, Any]) -> str:
    inner, _ = _follow(node, root)
    alternatives = [*inner.get("anyOf", []), *inner.get("oneOf", [])]
    if alternatives:
        return " or ".join(
            dict.fromkeys(_type_of(option, root) for option in alternatives if option.get("type") != "null")
        )
    if "enum" in inner:
        return ", ".join(f"`{value}`" for value in inner["enum"])
    if "const" in inner:
        return f"`{inner['const']}`"
    kind = inner.get("type", "any")
    if kind == "array" and isinstance(inner.get("items"), dict):
        return f"list of {_type_of(inner['items'], root)}"
    if kind == "object":
        return "mapping"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
