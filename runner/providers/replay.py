"""Answers from a recorded session, one a request, in the order they were recorded.

Attempts that failed are not repeated. Request bodies are written in the dialect of the recording, so that
they can be compared with the recorded ones. Costs nothing. Effect on the prefix cache: none is at work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.errors import ErrorCode, ProviderError
from runner.figures import counted
from runner.providers.assemble import ResponseAssembler
from runner.providers.recording import chunks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runner.cancellation import Cancellation
    from runner.messages import Chunk
    from runner.providers.base import Dialect
    from runner.providers.recording import Recording


_MOVED = ("text", "arguments")
"""Parts of a block in which a model names paths."""


class ReplayProvider:
    """Plays a recording.

    Args:
        recording: The recorded answers.
        dialect: How bodies are written.

    Raises of ``stream``:
        ProviderError: PROVIDER_FAILED, not retryable, when the recording is over (``replay-exhausted``) or the
            recorded request failed; CONTEXT_EXHAUSTED where the recorded request was too long.
        LogError: LOG_INVALID, the run left the recording.
    """

    name = "replay"

    def __init__(self, recording: Recording, *, dialect: Dialect) -> None:
        self.dialect = dialect
        self._recording = recording
        self._position = 0

    def stream(self, body: bytes, *, cancellation: Cancellation) -> Iterator[Chunk]:
        """Yield the chunks of the next answer, whatever ``body`` says."""
        del body
        recording, number = self._recording, self._position + 1
        if recording.diverged is not None:
            raise recording.diverged
        if number > len(recording.answers):
            raise ProviderError(
                f"the recording {recording.name} has {counted(len(recording.answers), 'answer')}, and request {number} "
                f"asks for another" + (f": {recording.ends}" if recording.ends else ""),
                kind="replay-exhausted",
                hint="the recording ends here; a run that goes on needs a model",
            )
        self._position = number
        answer = recording.answers[number - 1]
        if answer["kind"] == "too-long":
            raise ProviderError(
                f"the recorded request of step {answer['step']} was too long for the model",
                code=ErrorCode.CONTEXT_EXHAUSTED,
                kind="context_length_exceeded",
            )
        if answer["kind"] == "failed":
            raise ProviderError(f"the recorded request failed: {answer['message']}", kind="replay-failed")
        for chunk in self._moved(answer["chunks"]):
            if cancellation.cancelled:
                return
            yield chunk

    def _moved(self, chunks: list[Chunk]) -> Iterable[Chunk]:
        """The chunks, with the paths of this run in place of the recorded ones.

        An answer that holds none of these stays as it was streamed.
        """
        move = self._recording.move
        if move is None:
            return chunks
        assembler = ResponseAssembler()
        for chunk in chunks:
            assembler.add(chunk)
        recorded: list[Any] = assembler.content()
        moved = [
            {key: move(value, key == "arguments") if key in _MOVED else value for key, value in block.items()}
            for block in recorded
        ]
        return chunks if moved == recorded else chunks_of(moved, assembler.finish or "stop", assembler.usage)

    def skip(self, answered: int) -> None:
        """Begin behind that many answers."""
        self._position = answered

    def close(self) -> None:
        """Nothing is held."""
