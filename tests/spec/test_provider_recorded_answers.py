"""Every recorded answer of a real server means what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ProviderError
from runner.providers.assemble import ResponseAssembler
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import OpenAIChatProvider
from runner.testing.model_server import End, ModelServer, recorded_reply

FOLDER = Path(__file__).parent.parent / "golden" / "sse"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
STREAMS = sorted(name for name in EXPECTED if "nonstream" not in name)


def play(server: ModelServer) -> dict[str, Any]:
    """Ask ``server`` once; what the answer means, in the form of ``expected.json``."""
    spec = ModelSpec("openai", "smollm2", base_url=server.url, first_token=10, idle=10)
    provider = OpenAIChatProvider(spec, api_key=None, new_id=lambda: "new")
    answer = ResponseAssembler()
    try:
        for chunk in provider.stream(b"{}", cancellation=Cancellation()):
            answer.add(chunk)
    except ProviderError as error:
        return {
            "code": str(error.code),
            "retryable": error.retryable,
            "status": error.status,
            "kind": error.kind,
            "content": answer.content(),
        }
    finally:
        provider.close()
    return {
        "content": answer.content(),
        "usage": answer.usage,
        "finish": answer.finish,
        "model": provider.answered_model,
    }


def test_every_recording_has_its_meaning_written_down() -> None:
    """A recording without an expectation, or the other way round, is a mistake."""
    assert {path.stem for path in FOLDER.glob("*.http")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_recorded_answer_gives_its_content_usage_and_finish_or_its_error(name: str) -> None:
    """The bytes go through a real socket in one piece."""
    with ModelServer([recorded_reply(FOLDER / f"{name}.http")]) as server:
        assert play(server) == EXPECTED[name]


@pytest.mark.parametrize("name", STREAMS)
def test_where_the_pieces_of_an_answer_are_cut_does_not_matter(name: str) -> None:
    """The same bytes in pieces of 7: inside numbers, characters, line ends and chunk headers."""
    raw = (FOLDER / f"{name}.http").read_bytes()
    pieces = tuple(raw[start : start + 7] for start in range(0, len(raw), 7))
    with ModelServer([(*pieces, End.CLOSE)]) as server:
        assert play(server) == EXPECTED[name]
