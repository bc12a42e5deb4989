"""A command's environment is an allowlist, and credentials are hidden from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError
from runner.sandbox.base import SandboxSpec
from runner.sandbox.environment import DEFAULT_PATH, check_env_names, child_environment, hidden_paths

if TYPE_CHECKING:
    from pathlib import Path

RUNNER = {
    "PATH": "/usr/bin:/bin",
    "USER": "someone",
    "LANG": "de_DE.UTF-8",
    "LC_TIME": "C",
    "TERM": "xterm",
    "CI": "true",
    "HOME": "/home/someone",
    "OPENAI_API_KEY": "sk-secret-value",
    "GITHUB_TOKEN": "ghs_secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "LD_PRELOAD": "/evil.so",
    "PYTHONPATH": "/evil",
    "BASH_FUNC_ls%%": "() { evil; }",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "MY_SETTING": "on",
}


def build(environ: dict[str, str] | None = None, spec: SandboxSpec | None = None, **secrets: str) -> dict[str, str]:
    """The environment of a command."""
    return child_environment(
        RUNNER if environ is None else environ,
        spec or SandboxSpec(),
        home="/private/home",
        tmp="/private/tmp",
        secrets=secrets,
    )


def test_only_the_allowlist_passes() -> None:
    """Of the runner's own environment nothing else is there, whatever it is called."""
    made = build()

    assert {name for name in made if name in RUNNER} == {"PATH", "USER", "LANG", "LC_TIME", "TERM", "CI", "HOME"}
    assert "secret" not in " ".join(made.values())


def test_home_and_temporary_folders_are_private() -> None:
    """HOME and all names of the temporary folder point to the session's own."""
    made = build({"HOME": "/root", "TMPDIR": "/evil"})

    assert made["HOME"] == "/private/home"
    assert {made[name] for name in ("TMPDIR", "TMP", "TEMP")} == {"/private/tmp"}


def test_programs_are_told_not_to_ask() -> None:
    """git, apt, pip and the pagers wait for nobody."""
    made = build({})

    assert made["GIT_TERMINAL_PROMPT"] == "0"
    assert made["DEBIAN_FRONTEND"] == "noninteractive"
    assert made["PAGER"] == made["GIT_PAGER"] == "cat"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", DEFAULT_PATH),
        (":/usr/bin::.:bin:../x:/bin:", "/usr/bin:/bin"),
        ("bin:.", DEFAULT_PATH),
        ("/a b:/c", "/a b:/c"),
    ],
)
def test_the_search_path_never_means_the_workspace(given: str, expected: str) -> None:
    """Empty and relative entries go; without any a plain system path stands in."""
    assert build({"PATH": given})["PATH"] == expected
    assert build({})["PATH"] == DEFAULT_PATH


def test_the_profile_adds_variables() -> None:
    """Those it allows pass if they are there, those it sets are set."""
    spec = SandboxSpec(env_allow=("MY_SETTING", "NOT_THERE"), env_set={"MODE": "fast", "EMPTY": ""})
    made = build(spec=spec)

    assert (made["MY_SETTING"], made["MODE"], made["EMPTY"]) == ("on", "fast", "")
    assert "NOT_THERE" not in made


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_X", "BASH_ENV", "ENV", "PYTHONSTARTUP", "NODE_OPTIONS", "GIT_DIR",
        "GIT_SSH_COMMAND", "GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_STATE",
        "BASHOPTS", "CDPATH", "POSIXLY_CORRECT", "PS4", "SHELLOPTS",
        "ACTIONS_RUNTIME_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_URL", "BASH_FUNC_x",
        "HOME", "TMPDIR", "PWD", "", "A B", "A=B", "1A", "A*", "LC_*", "A\n", "A-B", "Ä",
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["allow", "set"])
def test_dangerous_and_impossible_names_are_refused(name: str, key: str) -> None:
    """At load, naming key and variable, even if the runner does not have it."""
    spec = SandboxSpec(env_allow=(name,)) if key == "allow" else SandboxSpec(env_set={name: "x"})
    with pytest.raises(ConfigError) as caught:
        check_env_names(spec)
    with pytest.raises(ConfigError):
        build(spec=spec)

    assert len(caught.value.problems) == 1
    assert f"sandbox.env.{key}" in caught.value.problems[0]
    assert caught.value.hint


def test_all_problems_are_named_at_once() -> None:
    """Three wrong names give three problems; a value with a NUL is one too."""
    with pytest.raises(ConfigError) as caught:
        check_env_names(SandboxSpec(env_allow=("LD_X", "A B"), env_set={"ENV": "x", "FINE": "a\0b"}))

    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("value", ["sk-secret-value", "Bearer sk-secret-value", "https://x:sk-secret-value@host"])
@pytest.mark.parametrize("key", ["allow", "set"])
def test_a_variable_of_the_profile_that_holds_a_secret_is_refused(value: str, key: str) -> None:
    """Under whatever name, whole or in part; the message does not hold the secret."""
    spec = SandboxSpec(env_allow=("LEAK",)) if key == "allow" else SandboxSpec(env_set={"LEAK": value})
    with pytest.raises(ConfigError) as caught:
        build({"LEAK": value}, spec, OPENAI_API_KEY="sk-secret-value")

    assert "LEAK" in str(caught.value)
    assert "OPENAI_API_KEY" in str(caught.value)
    assert "sk-secret-value" not in str(caught.value)


def test_an_inherited_variable_that_holds_a_secret_is_left_out() -> None:
    """A user name that is the key is no reason to stop, and no reason to pass it on."""
    assert "USER" not in build({"USER": "sk-secret-value"}, KEY="sk-secret-value")


def test_credentials_that_exist_are_hidden(tmp_path: Path) -> None:
    """Folders and files of the home and those the environment names, by canonical path; the rest is not listed."""
    home = tmp_path / "home"
    real = tmp_path / "real-ssh"
    for folder in (home / ".aws", home / ".config" / "gh", real, tmp_path / "runner", tmp_path / "project.tmp"):
        folder.mkdir(parents=True)
    (home / ".ssh").symlink_to(real)
    for file in (home / ".netrc", tmp_path / "google.json", tmp_path / "kube-1", tmp_path / "kube-2", tmp_path / "env"):
        file.write_text("x")
    environ = {
        "HOME": str(home),
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "google.json"),
        "KUBECONFIG": f"{tmp_path}/kube-1:{tmp_path}/kube-2:{tmp_path}/missing",
        "RUNNER_TEMP": str(tmp_path / "runner"),
        "GITHUB_ENV": str(tmp_path / "env"),
        "CI_PROJECT_DIR": str(tmp_path / "project"),
        "NPM_CONFIG_USERCONFIG": "relative/npmrc",
        "DOCKER_CONFIG": "",
    }
    found = {
        path for path in hidden_paths(environ, hidden=[str(tmp_path / "home"), "/no/such"]) if str(tmp_path) in path
    }

    expected = {
        home, home / ".aws", home / ".config" / "gh", home / ".netrc", real, tmp_path / "google.json",
        tmp_path / "kube-1", tmp_path / "kube-2", tmp_path / "runner", tmp_path / "env", tmp_path / "project.tmp",
    }  # fmt: skip
    assert found == {str(path) for path in expected}


def test_a_home_that_is_the_root_folder_hides_nothing_of_it() -> None:
    """HOME=/ in a container does not make /.ssh and the rest out of the root folder."""
    assert all(path.count("/") > 1 for path in hidden_paths({"HOME": "/"}))
