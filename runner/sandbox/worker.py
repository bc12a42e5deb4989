"""Starts the confined file worker, which is the package ``files`` beside this file.

Run through the sandbox as ``python -I -S -E worker.py``; see ``files/requests.py`` for what it answers.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Answer requests until the other side closes."""
    folder, name = os.path.split(os.path.dirname(os.path.abspath(__file__)))
    if name != "__pycache__":  # a compiled file lies one folder deeper
        folder = os.path.join(folder, name)
    sys.dont_write_bytecode = True
    sys.path.append(folder)  # at the end, so that no module of the standard library is taken from here
    # Under this name it is found only in the worker's own process; elsewhere it is runner.sandbox.files.
    __import__("files.requests").requests.serve()


if __name__ == "__main__":
    main()
