"""A repository configuration that holds credentials is refused before anything runs."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError, ErrorCode
from runner.workspace import config_secrets, find_repository, prepare_workspace
from runner.workspace.git import refuse_credentials

if TYPE_CHECKING:
    from pathlib import Path


def check(directory: Path) -> None:
    """What is done with the repository of a workspace."""
    found = find_repository(str(directory))
    assert found is not None
    refuse_credentials(found)


def repository(directory: Path, *settings: tuple[str, str]) -> Path:
    """A repository with local settings."""
    directory.mkdir(exist_ok=True)
    subprocess.run(["git", "init", "-q", str(directory)], check=True)
    for key, value in settings:
        subprocess.run(["git", "config", "--add", key, value], cwd=directory, check=True)
    return directory


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("http.https://github.com/.extraheader", "AUTHORIZATION: basic c2VjcmV0"),
        ("http.extraheader", "AUTHORIZATION: bearer secret-value"),
        ("remote.origin.url", "https://user:secret-value@example.org/a.git"),
        ("remote.origin.pushurl", "https://x-access-token:secret-value@example.org/a.git"),
        ("remote.origin.url", "https://ghp_0123456789secret@github.com/a/b.git"),
        ("remote.origin.url", "ssh://git:secret-value@example.org/a.git"),
        ("url.https://oauth2:secret-value@example.org/.insteadOf", "https://example.org/"),
        ("submodule.x.url", "https://0123456789012345678901234567890123456789@example.org/a.git"),
    ],
)
def test_a_credential_in_the_configuration_is_refused(tmp_path: Path, key: str, value: str) -> None:
    """The message names the key and the remedy, never the secret."""
    repo = repository(tmp_path / "repo", (key, value))
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        check(repo)

    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert caught.value.hint is not None
    assert "persist-credentials: false" in caught.value.hint
    for secret in ("secret-value", "c2VjcmV0", "ghp_0123456789secret", "0123456789012345678901234567890123456789"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "https://github.com/a/b.git",
        "git@github.com:a/b.git",
        "ssh://git@github.com/a/b.git",
        "https://organisation@dev.azure.com/organisation/project/_git/repo",
        "/srv/git/a@b.git",
    ],
)
def test_an_ordinary_remote_is_fine(tmp_path: Path, value: str) -> None:
    """A user name alone is no credential."""
    check(repository(tmp_path / "repo", ("remote.origin.url", value)))


def test_an_included_file_is_looked_at(tmp_path: Path) -> None:
    """Checkout steps may keep the header in a file of their own."""
    secret = tmp_path / "credentials"
    secret.write_text('[http "https://github.com/"]\n\textraheader = AUTHORIZATION: basic c2VjcmV0\n')
    repo = repository(tmp_path / "repo")
    subprocess.run(["git", "config", f"includeIf.gitdir:{repo}/.git.path", str(secret)], cwd=repo, check=True)
    with pytest.raises(ConfigError, match="extraheader"):
        check(repo)


def test_the_configuration_of_a_submodule_is_looked_at(tmp_path: Path) -> None:
    """It lies below .git/modules and is as readable."""
    repo = repository(tmp_path / "repo")
    config = repo / ".git" / "modules" / "inner" / "config"
    config.parent.mkdir(parents=True)
    config.write_text('[http "https://github.com/"]\n\textraheader = AUTHORIZATION: basic c2VjcmV0\n')
    with pytest.raises(ConfigError, match="modules/inner/config"):
        check(repo)


def test_preparing_a_workspace_checks_first(tmp_path: Path) -> None:
    """Nothing is made when the check fails."""
    repo = repository(tmp_path / "repo", ("http.extraheader", "AUTHORIZATION: x"))
    with pytest.raises(ConfigError, match="holds credentials"):
        prepare_workspace(str(repo), state=tmp_path / "state")

    assert not (tmp_path / "state").exists()


def test_a_configuration_git_cannot_read_is_an_error(tmp_path: Path) -> None:
    """What cannot be checked is not let through."""
    repo = repository(tmp_path / "repo")
    (repo / ".git" / "config").write_text("[broken\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        check(repo)


def test_the_secret_itself_is_known_to_redaction() -> None:
    """The value is given beside its key, and the key shown without it."""
    entries = [("url.https://u:hunter22@example.org/.insteadof", "x"), ("core.bare", "false")]

    assert config_secrets(entries) == [("url.https://u:***@example.org/.insteadof", "hunter22")]
