"""Closed word lists that the analysis of shell texts and the policy share.

Data only. A name that is missing here is treated the strict way: an unknown builtin is an
ordinary program that needs a rule, an unknown option of a wrapper makes the text unanalysed.
Writes no events; nothing here reaches the model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

COMMAND_TOOLS = ("shell",)
"""Tools whose call carries a shell text."""

READ_TOOLS = ("read_file", "glob", "grep")
"""Tools that read one path."""

SEARCH_TOOLS = frozenset({"glob", "grep"})
"""Tools that read everything below the path they are given."""

WRITE_TOOLS = ("write_file", "edit_file", "apply_patch")
"""Tools that create, change or delete paths."""

NETWORK_TOOLS = ("fetch_url",)
"""Tools that need the network; only a profile that names them offers them."""

PLAIN_TOOLS = ("todo", "report_finding", *NETWORK_TOOLS)
"""Tools with neither a command nor a path."""

KNOWN_TOOLS = (*COMMAND_TOOLS, *READ_TOOLS, *WRITE_TOOLS, *PLAIN_TOOLS)
"""The built-in tools, in the order of the reference page."""

DEFAULT_TOOLS = tuple(name for name in KNOWN_TOOLS if name not in NETWORK_TOOLS)
"""The tools of a profile that names none."""

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

STEERING_VARIABLES = frozenset({
    "BASHOPTS", "BASH_COMPAT", "BASH_ENV", "CDPATH", "POSIXLY_CORRECT", "PS4", "SHELLOPTS",
})  # fmt: skip
"""Variables that make bash run something else, or read a text in another way, than what is written."""

SHELLS = frozenset({"ash", "bash", "csh", "dash", "fish", "ksh", "mksh", "rbash", "sh", "tcsh", "zsh"})
"""Shells, by basename: what they are given with ``-c`` is searched for denies."""

SUFFIX_WRAPPERS = frozenset({
    "builtin", "busybox", "chroot", "chrt", "command", "doas", "env", "exec", "find", "flock", "ionice", "nice",
    "nohup", "parallel", "setsid", "stdbuf", "strace", "sudo", "taskset", "time", "timeout", "unbuffer", "unshare",
    "watch", "xargs",
})  # fmt: skip
"""Programs, by basename, that run a command given in their arguments; denies look into those."""

_VERSIONED = re.compile(r"[-.]?[0-9][0-9.]*$")

_LOOKED_THROUGH = frozenset({"command", "env", "find", "nice", "nohup", "sudo", "time", "timeout", "xargs"})
"""Those of them whose command is known whenever the text is analysed."""

_RUNNERS = frozenset({
    "bundle", "bunx", "conda", "docker", "hatch", "kubectl", "mamba", "micromamba", "npm", "npx", "pdm", "pipenv",
    "pipx", "pnpm", "podman", "poetry", "script", "uv", "uvx", "yarn",
})  # fmt: skip
"""Programs, by basename, that start an interpreter in another environment, with the same stdin."""

_INTERPRETERS = SHELLS | _RUNNERS | {
    "at", "awk", "batch", "bc", "bun", "crontab", "dc", "deno", "ed", "elixir", "erl", "ex", "expect", "gawk", "gdb",
    "ghci", "gnuplot", "groovy", "guile", "iex", "ipython", "irb", "jshell", "julia", "lldb", "lua", "luajit", "m4",
    "make", "mariadb", "mawk", "mysql", "node", "nodejs", "ocaml", "octave", "osascript", "parallel", "perl", "php",
    "psql", "pwsh", "pypy", "python", "r", "racket", "rscript", "ruby", "runghc", "scala", "sed", "sqlite", "ssh",
    "su", "swift", "swipl", "tclsh", "vi", "vim", "wish", "xargs",
}  # fmt: skip

_OPAQUE = (_INTERPRETERS | SUFFIX_WRAPPERS) - _LOOKED_THROUGH | {
    "alembic", "ansible", "ansible-playbook", "ant", "ava", "babel", "bats", "bazel", "behave", "cabal", "cargo",
    "celery", "clj", "cmake", "composer", "coverage", "ctest", "cucumber", "cypress", "dart", "django-admin", "dotnet",
    "dune", "esbuild", "eslint", "fab", "flake8", "flask", "flutter", "git-lfs", "go", "gradle", "gradlew", "grunt",
    "gulp", "gunicorn", "invoke", "java", "javac", "jekyll", "jest", "jupyter", "just", "karma", "kotlinc", "lein",
    "lerna", "maturin", "meson", "mix", "mkdocs", "mocha", "mvn", "mypy", "next", "ng", "nimble", "ninja", "nix",
    "nix-build", "nix-shell", "nose2", "nox", "nx", "nyc", "opam", "pdoc", "phpunit", "pip", "pip-compile",
    "playwright", "poe", "pre-commit", "prettier", "py.test", "pylint", "pyproject-build", "pytest", "rackup", "rails",
    "rake", "rebar", "rollup", "rspec", "rustc", "sbt", "scons", "sphinx-build", "stack", "stylelint", "task",
    "terraform", "thor", "tofu", "tox", "trial", "ts-node", "tsx", "turbo", "uvicorn", "valgrind", "vite", "vitest",
    "webpack", "zig",
}  # fmt: skip
"""Further ones run code of the workspace: tests, build files, plugins, configuration that is a program."""

_PLAIN_GIT = frozenset({
    "add", "apply", "blame", "branch", "cat-file", "check-attr", "check-ignore", "cherry", "count-objects",
    "describe", "diff", "diff-files", "diff-index", "diff-tree", "for-each-ref", "format-patch", "fsck", "grep",
    "help", "init", "log", "ls-files", "ls-tree", "merge-base", "mv", "name-rev", "range-diff", "reflog",
    "remote", "reset", "restore", "rev-list", "rev-parse", "rm", "shortlog", "show", "show-ref", "stash", "status",
    "symbolic-ref", "tag", "var", "version", "whatchanged", "--help", "--version",
})  # fmt: skip
"""Subcommands of git that run no hook, no alias and no command of their arguments."""


def is_interpreter(name: str) -> bool:
    """Whether the program ``name`` (a path too) runs what it reads from stdin; versions are ignored."""
    return _VERSIONED.sub("", basename(name)).lower() in _INTERPRETERS


def is_opaque(name: str, subcommands: Collection[str] | None) -> bool:
    """Whether a program runs code that the policy does not see: out of the workspace or its arguments.

    Args:
        name: The program.
        subcommands: What its subcommand may be; None if it may be anything.
    """
    if name == "git":
        return subcommands is None or not _PLAIN_GIT.issuperset(subcommands)
    return "/" in name or _VERSIONED.sub("", name).lower() in _OPAQUE


def basename(name: str) -> str:
    """What follows the last slash."""
    return name.rpartition("/")[2]
