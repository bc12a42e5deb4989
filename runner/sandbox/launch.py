"""What it takes to start a program of ours inside a sandbox: the interpreter and files in memory.

Invariants: content goes to a child by descriptor, so nothing is on disk and nothing on a command
line that others can read. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import os
import sys
from functools import cache


def memory_file(name: str, content: bytes = b"") -> int:
    """Return a close-on-exec descriptor from which ``content`` can be read once, from its start."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    written = 0
    while written < len(content):
        written += os.write(descriptor, content[written:])
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def interpreter() -> list[str]:
    """Start of a command line for the standard library alone: this Python, without its virtual environment."""
    path = getattr(sys, "_base_executable", None) or sys.executable
    return [os.path.realpath(path), "-I", "-S", "-E"]


@cache
def own_program(name: str) -> tuple[str, ...]:
    """Start of a command line that runs a stdlib-only file of this package by its absolute path.

    Compiling such a file takes a third of its start, so the interpreter gets the bytecode where
    the package has it and it was made from this very source.
    """
    folder = os.path.dirname(os.path.realpath(__file__))
    source = os.path.join(folder, name)
    return (*interpreter(), _bytecode(source) or source)


def _bytecode(source: str) -> str | None:
    """The compiled file beside a source, None unless it belongs to this interpreter and to this source."""
    from importlib.util import MAGIC_NUMBER

    folder, name = os.path.split(source)
    path = os.path.join(folder, "__pycache__", f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc")
    try:
        found = os.stat(source)
        with open(path, "rb") as file:
            header = file.read(16)
    except OSError:
        return None
    flags, changed, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    fresh = flags == 0 and changed == int(found.st_mtime) & 0xFFFFFFFF and size == found.st_size & 0xFFFFFFFF
    return path if header[:4] == MAGIC_NUMBER and fresh else None
