"""What it takes to start a program of ours inside a sandbox: the interpreter and files in memory.

Invariants: content goes to a child by descriptor, so nothing is on disk and nothing on a command
line that others can read. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import os
import sys


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


def own_program(name: str) -> list[str]:
    """Start of a command line that runs a stdlib-only file of this package by its absolute path."""
    folder = os.path.dirname(os.path.realpath(__file__))
    return [*interpreter(), os.path.join(folder, name)]
