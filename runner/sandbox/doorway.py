"""What runs in a command's own network before the command: opens the door to the runner's proxy.

Started as ``python -I -S -E doorway.py SOCKET PORT -- argv``. It listens on PORT of the loopback address, sends the
listening socket through SOCKET, and becomes the command, which keeps neither. Whoever accepts on a
listening socket is in the network in which it was made, so no process has to stay. Standard library only.
"""

from __future__ import annotations

import errno
import os
import socket
import sys

FAILED = 125
"""Exit code when the command was not started."""

_BACKLOG = 128


def main(arguments: list[str]) -> int:
    """Open the door and become the command; returns only if that fails."""
    channel, port, argv = int(arguments[0]), int(arguments[1]), arguments[3:]
    try:
        with (
            socket.socket(fileno=channel) as outside,
            socket.create_server(("127.0.0.1", port), backlog=_BACKLOG) as door,
        ):
            socket.send_fds(outside, [b"d"], [door.fileno()])
    except OSError as error:
        sys.stderr.write(f"nightshift sandbox: the way to the network proxy cannot be opened: {error.strerror}\n")
        return FAILED
    try:
        os.execvpe(argv[0], argv, os.environ)  # noqa: S606  # starting the confined command is this program's job
    except OSError as error:
        sys.stderr.write(f"nightshift sandbox: {argv[0]}: {error.strerror}\n")
        return 127 if error.errno == errno.ENOENT else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
