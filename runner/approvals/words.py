"""Closed word lists that the analysis of shell texts and the policy share.

Data only. A name that is missing here is treated the strict way: an unknown builtin is an
ordinary program that needs a rule, an unknown option of a wrapper makes the text unanalysed.
Writes no events; nothing here reaches the model.
"""

from __future__ import annotations

import re

COMMAND_TOOLS = ("shell",)
"""Tools whose call carries a shell text."""

READ_TOOLS = ("read_file", "glob", "grep")
"""Tools that read one path."""

SEARCH_TOOLS = frozenset({"glob", "grep"})
"""Tools that read everything below the path they are given."""

WRITE_TOOLS = ("write_file", "edit_file")
"""Tools that create or change a path."""

PLAIN_TOOLS = ("todo",)
"""Tools with neither a command nor a path."""

KNOWN_TOOLS = (*COMMAND_TOOLS, *READ_TOOLS, *WRITE_TOOLS, *PLAIN_TOOLS)
"""The built-in tools, in the order of the reference page."""

RESERVED = frozenset({
    "!", "[[", "]]", "case", "coproc", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in",
    "select", "then", "time", "until", "while", "{", "}",
})  # fmt: skip
"""Words that bash reads as grammar where a command may start."""

OPENING_WORDS = frozenset({"if", "then", "elif", "else", "while", "do", "{", "!"})
"""Reserved words after which a command starts."""

CLOSING_WORDS = frozenset({"fi", "done", "esac", "}"})
"""Reserved words that end a compound command."""

MATCHED_BUILTINS = frozenset({"cd", "true", "false", "echo", "printf", "test", "[", "[[", "set", "read"})
"""What ``builtin: true`` covers."""

UNANALYSED_BUILTINS = frozenset({
    ".", "alias", "bg", "bind", "builtin", "caller", "command", "compgen", "complete", "compopt", "declare", "dirs",
    "disown", "enable", "eval", "exec", "export", "fc", "fg", "getopts", "hash", "help", "history", "jobs", "let",
    "local", "logout", "mapfile", "popd", "pushd", "readarray", "readonly", "return", "shift", "shopt", "source",
    "suspend", "times", "trap", "typeset", "ulimit", "unalias", "unset", "unsetenv",
})  # fmt: skip
"""Builtins that run text, define names or change how later words are read."""

SHELLS = frozenset({"ash", "bash", "csh", "dash", "fish", "ksh", "mksh", "rbash", "sh", "tcsh", "zsh"})
"""Shells, by basename: what they are given with ``-c`` is searched for denies."""

SUFFIX_WRAPPERS = frozenset({
    "builtin", "busybox", "chroot", "chrt", "command", "doas", "env", "exec", "find", "flock", "ionice", "nice",
    "nohup", "parallel", "setsid", "stdbuf", "strace", "sudo", "taskset", "time", "timeout", "unbuffer", "unshare",
    "watch", "xargs",
})  # fmt: skip
"""Programs, by basename, that run a command given in their arguments; denies look into those."""

_VERSIONED = re.compile(r"[-.]?[0-9][0-9.]*$")

_INTERPRETERS = SHELLS | {
    "at", "awk", "batch", "bc", "bun", "crontab", "dc", "deno", "docker", "ed", "ex", "expect", "gawk", "gdb",
    "ghci", "guile", "ipython", "irb", "julia", "kubectl", "lua", "m4", "make", "mawk", "mysql", "node", "nodejs",
    "octave", "parallel", "perl", "php", "podman", "psql", "pwsh", "pypy", "python", "r", "rscript", "ruby", "sed",
    "sqlite", "ssh", "su", "tclsh", "vi", "vim", "wish", "xargs",
}  # fmt: skip

_OPAQUE = (_INTERPRETERS - {"xargs"}) | {
    "ansible-playbook", "ant", "babel", "bazel", "bundle", "cabal", "cargo", "cmake", "composer", "coverage",
    "ctest", "dotnet", "eslint", "flake8", "git-lfs", "go", "gradle", "gradlew", "hatch", "invoke", "jest", "just",
    "meson", "mix", "mkdocs", "mocha", "mvn", "mypy", "ninja", "nox", "npm", "npx", "pdm", "pip", "pipenv", "pnpm",
    "poe", "poetry", "pre-commit", "prettier", "py.test", "pylint", "pytest", "rake", "rebar", "rollup", "rspec",
    "sbt", "sphinx-build", "stack", "swift", "task", "tox", "ts-node", "tsx", "uv", "uvx", "vite", "vitest",
    "webpack", "yarn",
}  # fmt: skip


def is_interpreter(name: str) -> bool:
    """Whether the program ``name`` (a path too) runs what it reads from stdin; versions are ignored."""
    return _VERSIONED.sub("", basename(name)).lower() in _INTERPRETERS


def is_opaque(name: str) -> bool:
    """Whether the program ``name`` runs code that the policy does not see: out of the workspace or its arguments."""
    return "/" in name or _VERSIONED.sub("", name).lower() in _OPAQUE


def basename(name: str) -> str:
    """What follows the last slash."""
    return name.rpartition("/")[2]
