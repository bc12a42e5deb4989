"""YAML files are read strictly, and what is wrong with one is said in one message."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from runner.config.load import MAX_BYTES, Document, load_yaml, parse_yaml
from runner.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path


def parse(text: str | bytes) -> Document:
    """Parse a text as the file ``f.yaml``."""
    return parse_yaml(text if isinstance(text, bytes) else text.encode(), source="f.yaml", directory="/")


def refused(text: str | bytes) -> ConfigError:
    """The error that a text is refused with."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    return caught.value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("12:30:00", "12:30:00"),
        ("190:20:30", "190:20:30"),
        ("2026-11-30", "2026-11-30"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("=", "="),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-7", -7),
        ("1.10", 1.1),
        (".5", 0.5),
        ("1e3", 1000.0),
        ('"010"', "010"),
        ("'true'", "true"),
        ("!!str 010", "010"),
        ("! 12", "12"),
        ("!!float 1", 1.0),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_plain_scalars_have_the_types_of_yaml_1_2(written: str, value: object) -> None:
    """What YAML 1.1 turned into booleans, times, dates or octal numbers stays what 1.2 says it is."""
    found = parse(f"key: {written}").value["key"]

    assert found == value
    assert type(found) is type(value)


def test_the_text_of_a_scalar_that_is_no_text_is_kept() -> None:
    """So that 1.10 can be used as it was written."""
    assert parse("a: {b: 1.10}").texts["a", "b"] == "1.10"


def test_every_value_and_key_has_a_mark() -> None:
    """Marks count lines and columns from 1, in characters."""
    document = parse("ä: 1\nb:\n  - x\n  - {c: d}\n")

    assert document.where(("ä",)) == "f.yaml:1:4"
    assert document.where(("b", 1, "c")) == "f.yaml:4:9"
    assert str(document.key_mark(("b", 1, "c"))) == "f.yaml:4:6"
    assert document.where(("b", 1, "unknown")) == "f.yaml:4:5"


def test_an_alias_stands_for_its_value() -> None:
    """Aliases are allowed within bounds; errors below one point at the alias."""
    document = parse("a: &x {y: [1, 2]}\nb: *x\n")

    assert document.value["b"] == {"y": [1, 2]}
    assert document.where(("b", "y", 0)) == "f.yaml:2:4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "f.yaml:1:5: not valid YAML: mapping values are not allowed in this context"),
        ("a:\n\t- b", "f.yaml:2:1: a: not valid YAML: found character that cannot start any token"),
        ("a: [1", "f.yaml:2:1: a[1]: not valid YAML"),
        ("a: 'b", "f.yaml:1:6: a: not valid YAML"),
        ("a: @b", "f.yaml:1:4: a: not valid YAML"),
        ('a: "\\q"', "f.yaml:1:5: a: not valid YAML"),
        ("a: *x", "f.yaml:1:4: a: *x stands for nothing"),
        ("a: &x [*x]", "f.yaml:1:8: a[0]: *x stands inside its own &x"),
        ("*x : 1", "f.yaml:1:1: an alias is a key"),
        ("&x a: 1", "f.yaml:1:1: an anchor on a key is not allowed"),
        ("1: a", "f.yaml:1:1: the number 1 is a key"),
        ("true: a", "f.yaml:1:1: true is a key"),
        ("[a]: b", "f.yaml:1:1: a list or mapping is a key"),
        ("a: {<<: {b: 1}}", "f.yaml:1:5: a: merge keys are not part of YAML 1.2"),
        ("a: !!python/object/apply:os.system [x]", "f.yaml:1:4: a: the tag"),
        ("a: !mine b", "f.yaml:1:4: a: the tag !mine cannot stand here"),
        ("a: !!int b", "f.yaml:1:4: a: the tag !!int cannot stand here"),
        ("a: .inf", "f.yaml:1:4: a: infinity and not-a-number are no values here"),
        ("a: .NaN", "f.yaml:1:4: a: infinity and not-a-number are no values here"),
        ("a: 1e999", "f.yaml:1:4: a: the number is too large"),
        (f"a: {'9' * 5000}", "f.yaml:1:4: a: the number is too large"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: a second document starts"),
        ("%YAML 1.1\n---\na: 1", "f.yaml:1:1: YAML 1.1 is asked for"),
        ("- a", "f.yaml:1:1: a mapping is needed, this is a list"),
        ("text", "f.yaml:1:1: a mapping is needed, this is the text 'text'"),
        (b"a: 1\nb: \xff\n", "f.yaml:2:4: byte 0xff is not UTF-8"),
        (b"a: x\0", "f.yaml:1:5: a NUL byte is not allowed"),
        (b"a: \x1b[31m", "f.yaml:1:4: the character U+001B is not allowed"),
        ("a: b\ufeff", "f.yaml:1:5: the character U+FEFF is not allowed"),
        ("a: 1".encode("utf-16"), "f.yaml:1:1: byte 0xff is not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_where_it_stands(text: str | bytes, message: str) -> None:
    """One problem, with file, line, column and what to do; never a traceback of a library."""
    error = refused(text)

    assert error.message.startswith("f.yaml: 1 problem\n")
    assert error.problems[0].startswith(message)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n...\n", "null"])
def test_an_empty_file_is_said_to_be_empty(text: str) -> None:
    """Comments and null are no content."""
    assert refused(text).message == "f.yaml: is empty"


def test_a_key_given_twice_is_a_problem_of_the_document() -> None:
    """The first value stays, and the problem names both places, inside of what is thrown away as well."""
    document = parse("a: 1\nb: {c: 1, c: {d: 2}}\na: 2\n")

    assert document.value == {"a": 1, "b": {"c": 1}}
    assert [str(problem) for problem in document.problems] == [
        "f.yaml:2:11: b.c: given twice, first in line 2: remove one",
        "f.yaml:3:1: a: given twice, first in line 1: remove one",
    ]


def test_an_alias_bomb_is_refused() -> None:
    """Nine levels of nine aliases would be a thousand million values."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]" for name in "bcdefghij"]

    assert "aliases expand to over 1 MiB" in refused("\n".join(lines)).problems[0]


def test_a_long_text_repeated_by_aliases_is_refused() -> None:
    """Half a megabyte, fifty thousand times."""
    text = f"a: &a {'x' * 500_000}\nb: [{'*a, ' * 50_000}]\n"

    assert "aliases expand to over 1 MiB" in refused(text).problems[0]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused(opening: str) -> None:
    """Half a million levels are neither a crash nor a long wait."""
    count = 500_000 // len(opening)

    assert "nest" in refused(("a: " if opening != "- " else "") + opening * count).problems[0]


def test_too_many_values_are_refused() -> None:
    """A list of half a million numbers fits the size, but is no configuration."""
    assert "more than 100,000 values" in refused(f"a: [{'1,' * 500_000}]").problems[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With the path as it was asked for."""
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_yaml(tmp_path / "absent.yaml", name="absent.yaml")

    assert caught.value.message == "absent.yaml: no such file"


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    """It is said to be one."""
    with pytest.raises(ConfigError, match="is a directory, a file is needed"):
        load_yaml(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A named pipe without a writer would block for ever."""
    os.mkfifo(tmp_path / "pipe.yaml")

    with pytest.raises(ConfigError, match="is no regular file"):
        load_yaml(tmp_path / "pipe.yaml")


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    """As what it is, not as missing."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="a part of the path is not a directory"):
        load_yaml(tmp_path / "file" / "task.yaml")


@pytest.mark.parametrize("name", ["nul\0byte.yaml", "x" * 300])
def test_an_impossible_path_is_refused(tmp_path: Path, name: str) -> None:
    """A NUL byte or a name longer than a file system takes."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path / name)


def test_a_file_over_the_cap_is_not_parsed(tmp_path: Path) -> None:
    """5 MiB are refused by their size."""
    (tmp_path / "big.yaml").write_bytes(b"a: [" + b"1," * (5 * MAX_BYTES // 2) + b"]")

    with pytest.raises(ConfigError, match="is over 1 MiB"):
        load_yaml(tmp_path / "big.yaml")


def test_a_byte_order_mark_is_skipped() -> None:
    """Editors write one."""
    assert parse(b"\xef\xbb\xbfa: 1").value == {"a": 1}


def test_an_unreadable_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the system says of it, without a traceback."""
    (tmp_path / "task.yaml").write_text("a: 1")

    def refuse(*_arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root reads everything, so the refusal is made here
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load_yaml(tmp_path / "task.yaml")
