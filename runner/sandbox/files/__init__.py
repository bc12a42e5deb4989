"""The confined file worker: reads, writes and searches files inside the sandbox.

``runner/sandbox/worker.py`` starts it as a program of its own. Standard library only, and little of it, since every
session pays for its start: an operation's module is loaded when it is first asked for. It never imports the product;
the product imports ``pages`` and ``places``, to read pages of files of its own, and the tests all of it.

Invariants: paths come resolved, and no component of them is followed when it is a symbolic link, so that the path that
was decided on is the path that is used. Memory and answers are bounded. An operation that takes too long is ended by
killing the worker. Writes no events; no effect on the prefix cache.
"""
