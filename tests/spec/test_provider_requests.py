"""What a Chat Completions request body looks like, and that a later one begins like the one before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.providers.openai_chat import COMPATS, ChatDialect, dialect_for
from runner.providers.registry import dialects

JsonObject = dict[str, Any]


def header(**config: Any) -> Any:
    """A header with one tool."""
    tool = {"name": "shell", "description": "Runs a command.", "parameters": {"type": "object", "properties": {}}}
    return {"config": {"provider": "openai", "model": "m", **config}, "system": "You work.", "tools": [tool]}


def user(*blocks: JsonObject | str) -> Any:
    """A user message."""
    content = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
    return {"role": "user", "content": content, "source": {"kind": "user"}, "id": "u"}


def assistant(*blocks: JsonObject | str) -> Any:
    """An assistant message."""
    return {**user(*blocks), "role": "assistant", "source": {"kind": "model"}}


def tool_call(call_id: str, name: str = "shell", arguments: str = "{}") -> JsonObject:
    """A call block."""
    return {"type": "tool-call", "id": call_id, "name": name, "arguments": arguments}


def tool_result(call_id: str, *texts: str) -> JsonObject:
    """A result block."""
    content = [{"type": "text", "text": text} for text in texts]
    return {"type": "tool-result", "toolCallId": call_id, "content": content, "isError": False}


def body_of(dialect: Any, head: Any, messages: list[Any]) -> bytes:
    """A body as it is built by appending."""
    fragments = dialect.fragments(messages)
    return dialect.open(head) + b"".join(b"," + one for one in fragments) + dialect.close  # type: ignore[no-any-return]  # Any


def messages_of(*messages: Any) -> list[JsonObject]:
    """The wire messages behind the system message."""
    found: list[JsonObject] = json.loads(body_of(ChatDialect("openai-chat"), header(), list(messages)))["messages"]
    return found[1:]


def test_the_keys_stand_in_one_order_with_the_messages_last() -> None:
    """The prefix that a cache keeps is the whole head of the body."""
    head = header(maxTokens=1000, temperature=0.5, toolChoice="auto")
    body = json.loads(body_of(ChatDialect("openai-chat"), head, [user("Hi")]))

    assert list(body) == [
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
        "tools",
        "tool_choice",
        "messages",
    ]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "shell",
                "description": "Runs a command.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
    assert body["messages"] == [{"role": "system", "content": "You work."}, {"role": "user", "content": "Hi"}]


def test_what_the_header_does_not_fix_is_not_in_the_body() -> None:
    """No default of ours is sent, and no empty tool table, which OpenAI refuses."""
    head: Any = {**header(toolChoice="required"), "tools": []}
    body = json.loads(ChatDialect("openai-chat").whole(head, []))

    assert list(body) == ["model", "stream", "stream_options", "messages"]


def test_openai_itself_gets_its_own_name_for_the_limit() -> None:
    """Its reasoning models refuse max_tokens; compatible servers know nothing else."""
    body = json.loads(ChatDialect(dialect_for(None)).whole(header(maxTokens=10), []))

    assert "max_tokens" not in body
    assert body["max_completion_tokens"] == 10


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (None, "openai-chat:openai"),
        ("https://api.openai.com/v1", "openai-chat:openai"),
        ("https://API.OpenAI.com/v1/", "openai-chat:openai"),
        ("https://api.openai.com.example/v1", "openai-chat"),
        ("https://api.deepseek.com", "openai-chat"),
        ("http://127.0.0.1:8000/v1", "openai-chat"),
    ],
)
def test_the_address_decides_which_record_of_differences_holds(url: str | None, name: str) -> None:
    """And the name of the dialect says which one wrote a body."""
    assert dialect_for(url) == name
    assert dialect_for(url, images=True) == f"{name}+images"
    assert dialects()[name].name == name


def test_a_named_tool_may_be_demanded() -> None:
    """Anything but the API's own words is the name of a tool."""
    body = json.loads(ChatDialect("openai-chat").whole(header(toolChoice="shell"), []))

    assert body["tool_choice"] == {"type": "function", "function": {"name": "shell"}}


def test_each_result_is_a_wire_message_of_its_own_before_other_text() -> None:
    """The API wants the results right behind the calls."""
    assert messages_of(
        user(tool_result("a", "one", "two"), tool_result("b", "three"), "and a reminder", "of two parts")
    ) == [
        {"role": "tool", "tool_call_id": "a", "content": "one\ntwo"},
        {"role": "tool", "tool_call_id": "b", "content": "three"},
        {"role": "user", "content": "and a reminder\nof two parts"},
    ]


def test_calls_go_back_with_their_ids_and_the_arguments_as_written() -> None:
    """Text beside calls stays; without any it is null, as the API itself writes it."""
    arguments = '{ "command" : "ls" }'

    assert messages_of(assistant("I look.", tool_call("a", arguments=arguments)), assistant(tool_call("b"))) == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "shell", "arguments": arguments}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "b", "type": "function", "function": {"name": "shell", "arguments": "{}"}}],
        },
    ]


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("", "{}"),
        ("  ", "{}"),
        ('{"command": "ls', '{"invalid_arguments":"{\\"command\\": \\"ls"}'),
        ("[1]", '{"invalid_arguments":"[1]"}'),
    ],
)
def test_arguments_that_are_no_object_are_sent_inside_one(written: str, sent: str) -> None:
    """Servers parse them again, and one bad call in the history would make every later request fail."""
    (message,) = messages_of(assistant(tool_call("a", arguments=written)))

    assert message["tool_calls"][0]["function"]["arguments"] == sent


@pytest.mark.parametrize(
    ("name", "sent"), [("a.b c", "a_b_c"), ("", "unnamed"), ("x" * 70, "x" * 64), ("größe", "gr__e")]
)
def test_a_name_that_the_api_refuses_is_changed_on_the_wire_only(name: str, sent: str) -> None:
    """The model called a tool that does not exist; the call stays in the history."""
    (message,) = messages_of(assistant(tool_call("a", name=name)))

    assert message["tool_calls"][0]["function"]["name"] == sent


def test_reasoning_is_not_sent_back() -> None:
    """Servers that want it will have a record that says so."""
    assert messages_of(assistant({"type": "reasoning", "text": "Hm."}, "Yes.")) == [
        {"role": "assistant", "content": "Yes."}
    ]


def test_an_empty_answer_keeps_its_place() -> None:
    """Some servers want the roles to take turns."""
    assert messages_of(assistant()) == [{"role": "assistant", "content": ""}]


def test_an_image_is_named_where_it_cannot_be_sent() -> None:
    """The model learns that there is one."""
    image = {"type": "image", "mediaType": "image/png", "sha256": "0" * 64, "bytes": 1234}
    (message,) = messages_of(user("Look:", image))

    assert message["content"] == "Look:\n[image image/png of 1234 bytes, not shown]"


def test_text_is_written_unescaped_and_compact() -> None:
    """The bytes are UTF-8; only what JSON demands is escaped."""
    body = body_of(ChatDialect("openai-chat"), header(), [user('Grüße "🦉"\n')])

    assert 'Grüße \\"🦉\\"\\n'.encode() in body
    assert b": " not in body.replace(b"You work.", b"")


# --- the property everything else rests on ---------------------------------------------------------

texts = st.text(max_size=30)
results = st.lists(texts, min_size=1, max_size=2)
blocks = st.one_of(
    texts,
    st.builds(lambda text: {"type": "reasoning", "text": text}, texts),
    st.builds(tool_call, texts, texts, texts),
)
conversations = st.lists(
    st.one_of(
        st.lists(blocks, max_size=3).map(lambda found: assistant(*found)),
        st.lists(
            st.one_of(texts, st.builds(lambda name, out: tool_result(name, *out), texts, results)), max_size=3
        ).map(lambda found: user(*found)),
    ),
    max_size=6,
)


IMAGE = {"type": "image", "mediaType": "image/png", "sha256": "0" * 64, "bytes": 3}


def test_images_stand_behind_the_last_result_of_a_step() -> None:
    """The API takes text in results only, and nothing between the results of one answer's calls."""
    dialect = ChatDialect("openai-chat+images")
    shown = tool_result("c1", "x")
    shown["content"].append(IMAGE)
    step = [assistant(tool_call("c1"), tool_call("c2")), user(shown), user(tool_result("c2", "two"))]
    after = [user("go on", IMAGE), assistant("done")]
    asked: list[Any] = []

    def media(block: Any) -> bytes:
        asked.append(block)
        return b"abc"

    whole = json.loads(dialect.whole(header(), [*step, *after], media))["messages"][1:]
    pieces = [json.loads(piece) for part in (step, after) for piece in dialect.fragments(part, media)]

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}
    title = {"type": "text", "text": "Image 1 of the result of c1:"}
    assert whole == pieces
    assert [message["role"] for message in whole] == ["assistant", "tool", "tool", "user", "user", "assistant"]
    assert whole[1]["content"] == "x\n[image image/png of 3 bytes, in the message behind the results]"
    assert whole[3]["content"] == [title, image]
    assert whole[4]["content"] == [{"type": "text", "text": "go on"}, image]
    assert asked == [IMAGE] * 4


def test_a_dialect_without_images_asks_for_none() -> None:
    """The bodies of logs from before are what they were."""
    shown = {"type": "tool-result", "toolCallId": "c1", "content": [IMAGE], "isError": False}

    body = json.loads(ChatDialect("openai-chat").whole(header(), [user(shown), user("x", IMAGE)]))

    named = "[image image/png of 3 bytes, not shown]"
    assert [message["content"] for message in body["messages"][1:]] == [named, f"x\n{named}"]


@pytest.mark.parametrize("name", [*COMPATS, "scripted"])
@settings(max_examples=60, deadline=None)
@given(messages=conversations, temperature=st.one_of(st.none(), st.floats(0, 2)))
def test_body_n_without_its_brackets_is_a_prefix_of_body_n_plus_1_and_equals_a_full_build(
    name: str, messages: list[Any], temperature: float | None
) -> None:
    """Appending and building anew give the same bytes for every history."""
    dialect = dialects()[name]
    head = header(maxTokens=100, temperature=temperature)
    earlier = None
    for count in range(len(messages) + 1):
        body = body_of(dialect, head, messages[:count])
        assert body == dialect.whole(head, messages[:count])
        json.loads(body)
        if earlier is not None:
            assert body.startswith(earlier.removesuffix(dialect.close))
        earlier = body
