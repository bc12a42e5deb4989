"""Where the agent works, and what that was before it began.

``prepare_workspace`` gives the directory (the user's own, a copy, or a git worktree) and records
its base: a commit if there is one, and always a tree. ``Snapshot`` is the private repository that
holds this tree; patches are made from it. The user's index, refs and objects are never written.

``runner.workspace.confined`` runs the runner's own git inside the sandbox; it is imported where it is
needed. Raises ConfigError only, before anything is created outside the session's state directory. Writes
no events and has no effect on the prefix cache.
"""

from __future__ import annotations

from runner.workspace.git import (
    Repository,
    RunGit,
    config_secrets,
    find_repository,
    git_path,
    plain_git,
    read_config,
)
from runner.workspace.isolation import (
    Workspace,
    load_workspace,
    prepare_workspace,
    prune_worktrees,
    resolve_workspace,
)
from runner.workspace.snapshot import Base, Snapshot, take_snapshot

__all__ = [
    "Base",
    "Repository",
    "RunGit",
    "Snapshot",
    "Workspace",
    "config_secrets",
    "find_repository",
    "git_path",
    "load_workspace",
    "plain_git",
    "prepare_workspace",
    "prune_worktrees",
    "read_config",
    "resolve_workspace",
    "take_snapshot",
]
