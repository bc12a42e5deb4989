"""What a command learns from its environment, and which paths it must not see.

The environment is built from an allowlist before anything is started: taking a secret away later,
inside the wrapper, would be too late. Invariants: nothing passes that the allowlist or the
profile does not name; names that make programs load or run something are refused even then; no
value that holds a known secret passes. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from typing import TYPE_CHECKING

from runner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from runner.sandbox.base import SandboxSpec

INHERITED = ("PATH", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "TZ", "PWD", "CI")
"""Variables that pass, and with them all whose name begins with ``LC_``."""

FIXED: Mapping[str, str] = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "GH_PROMPT_DISABLED": "1",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "NPM_CONFIG_YES": "true",
}
"""Set for every command, so that no program waits for somebody to answer."""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_OWNED = frozenset({"HOME", "TMPDIR", "TMP", "TEMP", "PWD", "OLDPWD"})

_REFUSED = frozenset(
    {
        "BASH_ENV",
        # Bash would read a command in another way than the policy did.
        "BASHOPTS",
        "CDPATH",
        "POSIXLY_CORRECT",
        "PS4",
        "SHELLOPTS",
        "ENV",
        "PYTHONSTARTUP",
        "NODE_OPTIONS",
        "GITHUB_ENV",
        "GITHUB_PATH",
        "GITHUB_OUTPUT",
        "GITHUB_STEP_SUMMARY",
        "GITHUB_STATE",
        "ACTIONS_RUNTIME_TOKEN",
    }
)
_REFUSED_PREFIXES = ("LD_", "GIT_", "ACTIONS_ID_TOKEN_", "BASH_FUNC_")

_HOME_CREDENTIALS = (
    ".ssh",
    ".aws",
    ".azure",
    ".kube",
    ".gnupg",
    ".docker",
    ".config/gh",
    ".config/gcloud",
    ".config/git/credentials",
    ".netrc",
    ".git-credentials",
    ".npmrc",
    ".pypirc",
)

_NAMED_CREDENTIALS = (
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AZURE_CONFIG_DIR",
    "CLOUDSDK_CONFIG",
    "DOCKER_CONFIG",
    "GH_CONFIG_DIR",
    "GNUPGHOME",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "NETRC",
    "NPM_CONFIG_USERCONFIG",
    "PIP_CONFIG_FILE",
    # The job's command files, and the folder that holds them, the event and what other steps left.
    "RUNNER_TEMP",
    "GITHUB_ENV",
    "GITHUB_PATH",
    "GITHUB_OUTPUT",
    "GITHUB_STEP_SUMMARY",
    "GITHUB_STATE",
    "GITHUB_EVENT_PATH",
)


def _name_problem(name: str, key: str) -> str | None:
    if not _NAME.match(name):
        return f"sandbox.env.{key}: {name!r} is not the name of a variable (patterns are not allowed)"
    if name in _REFUSED or name.startswith(_REFUSED_PREFIXES):
        return f"sandbox.env.{key}: {name} is refused: it makes programs load, run or publish something"
    if name in _OWNED:
        return f"sandbox.env.{key}: {name} is set by the sandbox itself"
    return None


def check_env_names(spec: SandboxSpec) -> None:
    """Check the names in ``sandbox.env`` of a profile, and that the values can be passed on.

    Raises:
        ConfigError: CONFIG_INVALID, one problem for each name.
    """
    names = [(name, "allow") for name in spec.env_allow] + [(name, "set") for name in spec.env_set]
    problems = [problem for name, key in names if (problem := _name_problem(name, key)) is not None]
    problems += [
        f"sandbox.env.set: the value of {name} holds a NUL" for name in spec.env_set if "\0" in spec.env_set[name]
    ]
    if problems:
        raise ConfigError(
            "the profile's sandbox.env cannot be used",
            problems=problems,
            hint="name plain variables that carry settings, not ones that change what programs load",
        )


def _search_path(value: str) -> str:
    """PATH without empty and relative entries, which would mean the workspace."""
    entries = [entry for entry in value.split(":") if entry.startswith("/")]
    return ":".join(entries) or DEFAULT_PATH


def child_environment(
    environ: Mapping[str, str],
    spec: SandboxSpec,
    *,
    home: str,
    tmp: str,
    secrets: Mapping[str, str],
) -> dict[str, str]:
    """Build the whole environment of a command.

    Args:
        environ: The runner's own environment.
        spec: The profile's sandbox section.
        home: Private folder that becomes HOME.
        tmp: The session's temporary folder.
        secrets: Known secrets, name → value.

    Raises:
        ConfigError: CONFIG_INVALID, a refused name, or a variable of the profile that holds a secret.
    """
    check_env_names(spec)
    known = {value: name for name, value in secrets.items() if value}

    def secret_in(value: str) -> str | None:
        return next((name for each, name in known.items() if each in value), None)

    result = {
        name: value
        for name, value in environ.items()
        if (name in INHERITED or name.startswith("LC_")) and secret_in(value) is None
    }
    result["PATH"] = _search_path(result.get("PATH", ""))
    result |= FIXED
    asked = {name: environ[name] for name in spec.env_allow if name in environ} | dict(spec.env_set)
    problems = []
    for name, value in asked.items():
        secret = secret_in(value)
        if secret is not None:
            problems.append(f"sandbox.env: the value of {name} holds the secret {secret}")
    if problems:
        raise ConfigError(
            "the profile's sandbox.env would hand a secret to commands",
            problems=problems,
            hint="commands must not have the runner's own secrets; take the variable out of sandbox.env",
        )
    result |= asked
    result |= {"HOME": home, "TMPDIR": tmp, "TMP": tmp, "TEMP": tmp}
    return result


def _homes(environ: Mapping[str, str]) -> list[str]:
    found = [environ.get("HOME", "")]
    with contextlib.suppress(KeyError):  # a container's user without an entry
        found.append(pwd.getpwuid(os.getuid()).pw_dir)
    return [home for home in dict.fromkeys(found) if home.startswith("/") and home != "/"]


def hidden_paths(environ: Mapping[str, str], *, hidden: Iterable[str] = ()) -> tuple[str, ...]:
    """The paths commands must not see, canonical, those that exist now.

    Args:
        environ: The runner's own environment.
        hidden: Further paths: the profile's, the session's artifacts, key files, other workspaces.
    """
    wanted = [os.path.join(home, name) for home in _homes(environ) for name in _HOME_CREDENTIALS]
    wanted += [environ.get(name, "") for name in _NAMED_CREDENTIALS]
    wanted += environ.get("KUBECONFIG", "").split(":")
    if environ.get("CI_PROJECT_DIR", "").startswith("/"):
        wanted.append(environ["CI_PROJECT_DIR"].rstrip("/") + ".tmp")  # GitLab's file variables
    wanted += hidden
    found = {os.path.realpath(path) for path in wanted if path.startswith("/")}
    return tuple(sorted(path for path in found if path not in ("/", os.devnull) and os.path.exists(path)))
