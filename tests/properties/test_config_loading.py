"""Whatever a file holds, loading it ends in a value or in a ConfigError."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config.load import Document, parse_yaml
from runner.config.shape import MODELS, demand
from runner.config.values import parse_duration, parse_size
from runner.errors import ConfigError

FRAGMENTS = (
    "a", "b: ", "- ", "? ", ": ", "&x ", "*x", "!!str ", "!t ", "|", ">", "'", '"', "{", "}", "[", "]", ",", "#", "%",
    "\n", "\n  ", "\t", "---", "...", "<<", "~", "1", ".5", "0x", "1e9", "@", "`", "\\", "\0", "\u2028", "\ufeff", "é",
)  # fmt: skip
SYNTAX = st.sampled_from(FRAGMENTS)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
PRINTABLE = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0xD7FF, exclude_characters="\x7f\x85\u2028\u2029\ufeff")
)


def load(data: bytes) -> Document | None:
    """A document, or None when it was refused; anything else is a failure of the test."""
    with contextlib.suppress(ConfigError):
        return parse_yaml(data, source="f.yaml", directory="/")
    return None


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_loaded_or_refused(data: bytes) -> None:
    """Never another exception."""
    load(data)


@given(st.lists(SYNTAX, max_size=30).map("".join))
@settings(max_examples=100, deadline=None)
def test_any_yaml_like_text_is_loaded_or_refused(text: str) -> None:
    """And what is loaded can be checked against every format, and be described."""
    document = load(text.encode())
    if document is None:
        return
    assert isinstance(document.value, dict)
    json.dumps(document.value, allow_nan=False)
    for kind in MODELS:
        with contextlib.suppress(ConfigError):
            demand(kind, document)


def _written(value: Any) -> str:
    """As flow YAML by PyYAML's own writer, every text in quotes."""
    return yaml.dump({"key": value}, Dumper=yaml.SafeDumper, default_style='"', default_flow_style=True, width=10**6)


@given(st.dictionaries(PRINTABLE, st.lists(PRINTABLE) | PRINTABLE, max_size=5))
@settings(deadline=None)
def test_quoted_text_comes_back_unchanged(value: dict[str, Any]) -> None:
    """Written by PyYAML, read by ours."""
    document = parse_yaml(_written(value).encode(), source="f.yaml", directory="/")

    assert document.value == {"key": value}


@given(JSON.map(lambda value: {"key": value}))
@settings(deadline=None)
def test_json_is_read_as_itself(value: dict[str, Any]) -> None:
    """Wherever its text has only characters that YAML allows; a key given twice cannot occur."""
    text = json.dumps(value, ensure_ascii=False)
    document = load(text.encode(errors="replace"))

    if document is not None and text.isprintable() and "\u2028" not in text:
        assert json.dumps(document.value) == json.dumps(json.loads(text.encode(errors="replace")))


@given(JSON.map(lambda value: {"key": value}))
@settings(deadline=None)
def test_every_location_has_a_mark(value: dict[str, Any]) -> None:
    """So every message has a place."""
    document = load(json.dumps(value).encode())
    if document is None:
        return

    def walk(node: Any, at: tuple[str | int, ...]) -> None:
        assert document.marks[at].line == 1
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            walk(inner, (*at, key))

    walk(document.value, ())


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)


@given(SCALARS | st.from_regex(r"\A[0-9]{1,12}(\.[0-9]{1,6})?[a-zA-Z]{0,2}\Z"))
@settings(deadline=None)
def test_durations_and_sizes_are_bounded_or_refused(value: Any) -> None:
    """Never infinite, negative, or a crash."""
    with contextlib.suppress(ValueError):
        assert 0 < parse_duration(value) < math.inf
    with contextlib.suppress(ValueError):
        size = parse_size(value)
        assert type(size) is int
        assert 1 <= size <= 10**15
