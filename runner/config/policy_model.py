"""The pydantic model of a policy file (``*.policy.yaml``). It checks the shape; meaning is checked in ``policy``."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from runner.config.load import describe, unknown_name
from runner.config.section import Name, Names, Section, Text, Variable, Version

_PATTERN_KEYS: Final = ("argv", "refuse_flags", "anywhere")
_EXAMPLE_KEYS: Final = ("command", "path", "tool")


def _bad(message: str) -> PydanticCustomError:
    # Braces in a template would be taken for places to fill in.
    return PydanticCustomError("value", "{message}", {"message": message})


def _check_texts(value: Any, where: str) -> None:
    if not isinstance(value, list) or not value:
        raise _bad(f"{where}a list of texts is needed, this is {describe(value)}")
    for each in value:
        if not isinstance(each, str) or not each:
            quote = ": put it in quotes" if isinstance(each, int | float) else ""
            raise _bad(f"{where}a text is needed, this is {describe(each)}{quote}")


def _check_words(value: Any, where: str) -> None:
    if not isinstance(value, list) or not value:
        raise _bad(f"{where}a list of words is needed, this is {describe(value)}: write [git, status]")
    for each in value:
        if isinstance(each, list):
            _check_texts(each, where)
        else:
            _check_texts([each], where)


def _command(value: Any) -> Any:
    if value == "any":
        return value
    if not isinstance(value, list) or not value:
        raise _bad(f"'any' or a list of patterns is needed, this is {describe(value)}: write [[pytest, '**']]")
    for at, pattern in enumerate(value):
        where = f"pattern {at + 1}: "
        if not isinstance(pattern, dict):
            _check_words(pattern, where)
            continue
        for key in pattern:
            if key not in _PATTERN_KEYS:
                raise _bad(f"{where}{key}: {unknown_name(key, _PATTERN_KEYS)}")
        _check_words(pattern.get("argv"), f"{where}argv: ")
        if "refuse_flags" in pattern:
            _check_texts(pattern["refuse_flags"], f"{where}refuse_flags: ")
        if not isinstance(pattern.get("anywhere", False), bool):
            raise _bad(f"{where}anywhere: true or false is needed, this is {describe(pattern['anywhere'])}")
    return value


def _examples(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise _bad(f"a list of examples is needed, this is {describe(value)}")
    for at, example in enumerate(value):
        where = f"example {at + 1}: "
        if isinstance(example, dict):
            for key in example:
                if key not in _EXAMPLE_KEYS:
                    raise _bad(f"{where}{key}: {unknown_name(key, _EXAMPLE_KEYS)}")
            if not example or ("command" in example and len(example) > 1):
                raise _bad(f"{where}write command alone, or path, tool or both")
        for text in example.values() if isinstance(example, dict) else [example]:
            if not isinstance(text, str):
                raise _bad(f"{where}a text is needed, this is {describe(text)}")
    return value


_TEXTS: Final = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_WORDS: Final = {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 1}, _TEXTS]}, "minItems": 1}
_PATTERN: Final = {
    "type": "object",
    "properties": {
        "argv": _WORDS
        | {
            "description": "Words: a literal, a glob inside a word, a list of alternatives, '*' for one word, '**' at "
            "the end for any number."
        },
        "refuse_flags": _TEXTS
        | {"description": "Options that must not be there, in any spelling; unquoted variables are refused with them."},
        "anywhere": {
            "type": "boolean",
            "description": "Deny only: options may stand before the subcommand, each with or without a value.",
        },
    },
    "required": ["argv"],
    "additionalProperties": False,
}
_COMMAND: Final = {
    "anyOf": [{"const": "any"}, {"type": "array", "items": {"anyOf": [_WORDS, _PATTERN]}, "minItems": 1}]
}
_TEXT: Final = {"type": "string"}
_EXAMPLE: Final = {
    "anyOf": [
        _TEXT,
        {"type": "object", "properties": {"command": _TEXT}, "required": ["command"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {"path": _TEXT, "tool": _TEXT},
            "required": ["path"],
            "additionalProperties": False,
        },
        {"type": "object", "properties": {"tool": _TEXT}, "required": ["tool"], "additionalProperties": False},
    ]
}

Command = Annotated[Any, PlainValidator(_command), WithJsonSchema(_COMMAND)]
"""``any``, or patterns of commands."""

ExampleList = Annotated[
    Any, PlainValidator(_examples), WithJsonSchema({"type": "array", "items": _EXAMPLE, "minItems": 1})
]
"""Texts, or mappings that say what they are."""

Globs = Annotated[list[Text], Field(min_length=1)]


class Paths(Section):
    """Which paths a rule is about.

    Globs relative to the workspace, or absolute ones. They match resolved paths; `**` stands for any number of
    folders, and names with a leading dot are no exception.
    """

    read: Globs | None = None
    """Paths that are read. For `glob` and `grep` everything below the searched path has to be covered."""

    write: Globs | None = None
    """Paths that are created or changed."""

    except_: Annotated[Globs | None, Field(alias="except")] = None
    """Paths that are left out of both."""


class Examples(Section):
    """Self-tests, run whenever the policy is loaded.

    A text is a command, or a path for rules about paths; a mapping says `command`, `path` or `tool`. Each is put
    to this rule alone.
    """

    match: ExampleList | None = None
    """What the rule is about."""

    no_match: ExampleList | None = None
    """What it is not about."""


class Rule(Section):
    """One rule. It matches a call when everything it says holds."""

    id: Name
    """Its name in decisions, in the log and in what the model reads."""

    tool: Names
    """Exact name of a tool, a list of names, or `*` for every tool."""

    command: Command | None = None
    """Commands of a shell text: patterns, or `any` for every text. Every simple command of a text has to be
    allowed by some rule; a deny matches if it matches any of them, at any depth."""

    builtin: bool | None = None
    """Also the builtins `cd true false echo printf test [ [[ set read`, as far as they are harmless."""

    env: list[Variable] | None = None
    """Variables that may be assigned for these commands."""

    paths: Paths | None = None
    """Paths of file tools and of redirections. Absent: every path."""

    mode: Literal["read-only", "workspace-write"] | None = None
    """Run the call in this mode if the run's own is wider."""

    trust: Annotated[list[Literal["trusted", "untrusted"]] | None, Field(min_length=1)] = None
    """Only in runs of this trust. Absent: in both."""

    escalate: list[Literal["workspace-write", "danger-full-access"]] | None = None
    """Calls that ask for one of these modes. An allow is then about such calls only, a deny about them as well.
    Absent: only calls without escalation."""

    decision: Literal["allow", "deny"]
    """A matching deny beats every allow, whatever the order."""

    reason: Text | None = None
    """Why; the model reads it in the result of a denied call."""

    accept_bypass: bool | None = None
    """Deny only: the author knows that beside `command: any` other spellings of the command get through."""

    examples: Examples | None = None
    """Self-tests of this rule."""


class PolicyModel(Section):
    """A policy: which tool calls are allowed. Whatever no rule allows is denied."""

    version: Version
    """Version of the format."""

    default: Literal["deny"] | None = None
    """What becomes of a call that no rule matches. There is no other value."""

    rules: list[Rule]
    """The rules; their order decides nothing."""
