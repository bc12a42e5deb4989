"""The runner's side of the fork server, which starts the supervisors of confined commands.

Starting Python for each command costs more than all restrictions together. So one small process, started
with the first command, forks itself for each; see ``supervisor.py``. What it starts becomes a child of the
runner, which waits for it and cleans up after it as after any other command. Invariants: it holds no secret and none
of the runner's descriptors but its socket; it ends with the runner. Thread-safe.
Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from runner.errors import SandboxError
from runner.sandbox import process
from runner.sandbox.base import BARE, ConfinedCommand
from runner.sandbox.launch import memory_file, own_program

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

_SECONDS = 30.0
_ANSWER_BYTES = 4_096


class ForkServer:
    """Starts supervisors. The process behind it starts with the first command, and anew should it be gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: process.RunningProcess | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id of what answers requests, None when it is not started."""
        return None if self._running is None else self._running.pid

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        mark: int,
    ) -> int:
        """Start a supervisor for ``argv``; returns its process id. It is a child of the runner.

        Args:
            argv: The command.
            environment: Its whole environment.
            descriptors: POLICY, STATUS, and the command's stdin, stdout and stderr.
            mark: Soft value of the resource limit by which the command's descendants are known; 0 for none.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, the fork server does not start or does not answer.
        """
        fields = [("mark", str(mark))]
        fields += [("argument", argument) for argument in argv]
        fields += [("variable", f"{name}={value}") for name, value in environment.items()]
        request = memory_file("request", b"".join(os.fsencode(part) + b"\0" for field in fields for part in field))
        try:
            with self._lock:
                answer = self._ask((request, *descriptors))
                if answer is None:  # something ended it since the last command
                    self._close()
                    answer = self._ask((request, *descriptors))
        finally:
            os.close(request)
        if not answer:
            raise self._failure("it ended")
        if not answer.isdigit():
            raise self._failure(answer.decode("utf-8", "backslashreplace"))
        return int(answer)

    def _ask(self, descriptors: Sequence[int]) -> bytes | None:
        """The answer to a request, None when the server is gone."""
        import socket

        connection = self._connection or self._open()
        try:
            socket.send_fds(connection, [b"r"], list(descriptors))
            return connection.recv(_ANSWER_BYTES) or None
        except TimeoutError:
            self._close()
            raise self._failure(f"it did not answer within {_SECONDS:g} s") from None
        except ConnectionError:
            return None

    def _open(self) -> socket.socket:
        import socket

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_SECONDS)
        command = ConfinedCommand(
            argv=[*own_program("supervisor.py"), "serve", str(theirs.fileno())],
            environment={},
            cwd="/",
            backend=BARE,
            pass_fds=(theirs.fileno(),),
        )
        try:
            self._running = process.start(command, stdout=process.DEVNULL)
        except OSError as error:
            ours.close()
            raise self._failure(str(error)) from error
        finally:
            theirs.close()
        self._connection = ours
        return ours

    @staticmethod
    def _failure(reason: str) -> SandboxError:
        return SandboxError(
            f"the Landlock supervisor could not be started: {reason}", hint="run 'nightshift doctor' on this machine"
        )

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._running is not None:
            self._running.stop(process.GRACE)
            self._running = None

    def close(self) -> None:
        """End the server; commands that run go on. May be called twice."""
        with self._lock:
            self._close()
