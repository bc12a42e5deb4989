"""The schema's check and the pydantic model are of one opinion on every document."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config.load import load_yaml
from runner.config.shape import MODELS, fits, model_of, resolve_node, schema_of, shipped_directory

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.0, 1.5, 10**15, 10**16, "", "x", "a b", "90s", "5m", "0s", "4g", "1.5k", "x\n",
    "off", "auto", "openai", "deny", "allow", "../x", "/x", "~", "http://h/v1", "LD_PRELOAD", [], {}, ["x"], [""], [1],
    {"x": "y"}, {"x": None}, {"version": 1}, {"env": "A"}, {"a b": {}}, [{}], [{"name": "a", "run": "b"}], "1" * 40,
    "x\0y", "z" * 300, "15M", "16M", 16_000_000, "h:1",
]  # fmt: skip

DOCUMENTS = {
    kind: [load_yaml(path).value for path in sorted(shipped_directory().rglob(f"*.{kind}.yaml"))] for kind in MODELS
}


def _places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at, *(place for key, inner in items for place in _places(inner, (*at, key)))]


def _keys(schema: dict[str, Any]) -> list[str]:
    nodes = [schema, *schema.get("$defs", {}).values()]
    return sorted({key for node in nodes for key in resolve_node(schema, node).get("properties", {})} | {"unknown"})


@st.composite
def documents(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """A shipped file, or the smallest one, with a few values put in, replaced or taken out."""
    value: dict[str, Any] = copy.deepcopy(draw(st.sampled_from([*DOCUMENTS[kind], {"version": 1}])))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.sampled_from(_places(value)))
        holder: Any = value
        for part in place[:-1]:
            holder = holder[part]
        target = holder[place[-1]] if place else holder
        odd = copy.deepcopy(draw(st.sampled_from(ODD)))
        if isinstance(target, dict) and draw(st.booleans()):
            target[draw(st.sampled_from(_keys(schema_of(kind))))] = odd
        elif isinstance(target, list) and draw(st.booleans()):
            target.append(odd)
        elif place and draw(st.integers(0, 3)) == 0:
            del holder[place[-1]]
        elif place:
            holder[place[-1]] = odd
    return value


@pytest.mark.parametrize("kind", MODELS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_fits_the_schema_is_valid_for_the_model(kind: str, data: st.DataObject) -> None:
    """And the other way round, but for durations and sizes out of range, which ``resolve`` refuses, and policies."""
    from pydantic import ValidationError

    value = data.draw(documents(kind))
    try:
        model_of(kind).model_validate(value)
        valid = True
    except ValidationError as error:
        valid = False
        ranges = all(each["type"] == "value" and "out of range" in each["msg"] for each in error.errors())
    else:
        ranges = False
    found = fits(schema_of(kind), value)

    inline_policy = kind == "profile" and isinstance(value.get("approvals"), dict)
    assert found == valid or (found and ranges) or (valid and inline_policy), value
