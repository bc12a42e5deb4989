"""Folds the chunks of one streamed answer into what ``assistant/message`` holds. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.errors import InternalError

if TYPE_CHECKING:
    from runner.messages import Block, Chunk, Usage


class ResponseAssembler:
    """The content of an answer while it comes.

    Attributes:
        usage: The last usage reported, None if there was none.
        finish: ``stop``, ``tool-calls``, ``length``, ``filter``; None until the answer is whole.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, list[str]] = {}
        self.usage: Usage | None = None
        self.finish: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk of the answer.

        Raises:
            InternalError: A delta has no open block, or its type does not fit the block's.
        """
        match chunk["type"]:
            case "block-start":
                self._start(chunk["index"], chunk["blockType"])
            case "text-delta":
                self._grow(chunk, "text", chunk["text"])
            case "reasoning-delta":
                self._grow(chunk, "reasoning", chunk["text"])
            case "tool-call-delta":
                self._grow(chunk, "tool-call", chunk["argumentsDelta"]).update(id=chunk["id"], name=chunk["name"])
            case "block-end":
                self._blocks[chunk["index"]] = chunk["block"]
                self._pieces.pop(chunk["index"], None)
            case "usage":
                self.usage = chunk["usage"]
            case "finish":
                self.finish = chunk["reason"]["kind"]
            case other:
                raise InternalError(f"a chunk of type {other} in an answer")

    def content(self) -> list[Block]:
        """All blocks so far, in order; an open one holds what has come of it."""
        return [self._block(index) for index in sorted(self._blocks)]

    def partial_content(self) -> list[Block]:
        """What is kept of an answer cut in the middle: text and reasoning that is not empty, no calls."""
        return [block for block in self.content() if block["type"] in ("text", "reasoning") and block.get("text")]

    def _start(self, index: int, kind: str) -> None:
        if index in self._blocks:
            raise InternalError(f"block {index} of an answer starts twice")
        self._blocks[index] = {"type": kind}
        self._pieces[index] = []

    def _grow(self, chunk: Chunk, kind: str, piece: str) -> dict[str, Any]:
        block = self._blocks.get(chunk["index"])
        pieces = self._pieces.get(chunk["index"])
        if block is None or pieces is None or block["type"] != kind:
            raise InternalError(f"a {chunk['type']} for block {chunk['index']}, which is no open {kind} block")
        pieces.append(piece)
        return block

    def _block(self, index: int) -> Any:
        pieces = self._pieces.get(index)
        block = self._blocks[index]
        if pieces is None:
            return block
        if block["type"] == "tool-call":
            return {
                "type": "tool-call",
                "id": block.get("id", ""),
                "name": block.get("name", ""),
                "arguments": "".join(pieces),
            }
        return {"type": block["type"], "text": "".join(pieces)}
