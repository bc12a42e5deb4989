"""The profile for macOS says what the policy says, to the letter, whatever a path holds. It is not run here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import SandboxError
from runner.permission import Mode
from runner.record import replace
from runner.sandbox.base import SandboxLimits, SandboxPolicy
from runner.sandbox.layout import Layout, Root
from runner.sandbox.probe import build_backend
from runner.sandbox.seatbelt import PROGRAM, Seatbelt, profile, quoted
from runner.testing.sandbox import make_box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.testing.sandbox import Box

GOLDEN = Path(__file__).parents[1] / "golden" / "seatbelt"
WORK = "/opt/ci/project"
STATE = "/private/var/folders/s1"
HIDDEN = ("/opt/ci/.ssh", f"{WORK}/secrets/key")

WRITING = Layout(
    WORK,
    (
        Root(f"{STATE}/tmp"),
        Root(f"{STATE}/home"),
        Root(WORK, protected=(f"{WORK}/.git", f"{WORK}/ci/deep/fix.task.yaml"), links=(f"{WORK}/ci/link.yaml",)),
        Root("/opt/ci/cache"),
        Root(f"{WORK}/.git/nested"),
    ),
    readable=("/opt/ci/.ssh/known",),
    hidden=HIDDEN,
)
READING = Layout(WORK, (Root(f"{STATE}/tmp"),), readable=(WORK, f"{STATE}/home"), hidden=HIDDEN)
ODD = 'a "quoted" \\ back\nline\ttab (x) ; é\x7f\udcff'

CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    "read-only": ({"mode": Mode.READ_ONLY}, READING),
    "workspace-write": ({}, WRITING),
    "network": ({"network": True}, WRITING),
    "unix-sockets": ({"unix_sockets": True}, READING),
    "network-and-unix-sockets": ({"network": True, "unix_sockets": True}, READING),
    "unprotected-git": ({"unprotected_git": True}, Layout(WORK, (Root(f"{STATE}/tmp"), Root(WORK)), (), ())),
    "odd-names": ({}, Layout(f"/opt/{ODD}", (Root(f"/opt/{ODD}", (f"/opt/{ODD}/.git",)),), (), (f"/x/{ODD}",))),
}


def policy(**changes: Any) -> SandboxPolicy:
    """The policy of a command on a Mac."""
    made = SandboxPolicy(
        mode=Mode.WORKSPACE_WRITE, workspace=WORK, tmp=f"{STATE}/tmp", home=f"{STATE}/home", environment={"A": "1"}
    )
    return replace(made, **changes)


@pytest.mark.parametrize("name", CASES)
def test_each_policy_gives_the_profile_that_was_written_down(name: str) -> None:
    """Modes, network, hidden and protected paths, links, nested folders, Unix sockets: byte by byte."""
    changes, plan = CASES[name]

    assert profile(policy(**changes), plan) == (GOLDEN / f"{name}.sb").read_text(encoding="utf-8")


def test_every_golden_profile_has_its_case() -> None:
    """A file that nothing compares proves nothing."""
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


RULE = re.compile(r'\((allow|deny) ([a-z* -]+) \((subpath|literal) "((?:[^"\\]|\\.)*)"\)\)')


def verdict(text: str, operation: str, path: str) -> bool:
    """What the kernel decides about a path: the last rule that names it, or nothing allowed at all."""
    allowed = operation == "file-read*"
    for line in text.splitlines():
        rule = RULE.fullmatch(line)
        if rule is None or not any(
            each == operation or (each == "file-write*" and operation.startswith("file-write"))
            for each in rule[2].split()
        ):
            continue
        if path == rule[4] or (rule[3] == "subpath" and path.startswith(rule[4] + "/")):
            allowed = rule[1] == "allow"
    return allowed


def paths(plan: Layout) -> Iterator[str]:
    """The paths a layout names, what lies in them, beside them and above them."""
    named = [*plan.hidden, *plan.readable]
    for root in plan.roots:
        named += [root.path, *root.protected]
    for path in named:
        yield from (path, f"{path}/below", f"{path}-beside", path.rpartition("/")[0] or "/", f"{path}/a/b/c")


@pytest.mark.parametrize("plan", [WRITING, READING], ids=["writing", "reading"])
def test_a_path_can_be_written_where_both_other_backends_let_it(plan: Layout) -> None:
    """The deeper folder decides, for every path in, beside and above what the layout names."""
    text = profile(policy(), plan)
    seen = {path: verdict(text, "file-write-data", path) for path in paths(plan)}

    assert seen == {path: plan.writable(path) for path in seen}
    assert set(seen.values()) == {True, False}


def test_hidden_paths_cannot_be_read_unless_something_deeper_is_shown() -> None:
    """Reading is allowed everywhere else."""
    text = profile(policy(), WRITING)
    read = {path: verdict(text, "file-read*", path) for path in ("/etc/hosts", *HIDDEN, f"{HIDDEN[0]}/id")}

    assert read == {"/etc/hosts": True, **dict.fromkeys((*HIDDEN, f"{HIDDEN[0]}/id"), False)}
    assert verdict(text, "file-read*", "/opt/ci/.ssh/known/hosts")
    assert not verdict(text, "file-write-data", "/opt/ci/.ssh/known/hosts")


def test_nothing_above_what_stays_can_be_moved_away() -> None:
    """Else the file would be a free one under another name; new files beside it can be made all the same."""
    text = profile(policy(), WRITING)
    for path in (WORK, f"{WORK}/ci", f"{WORK}/ci/deep", f"{WORK}/secrets", f"{WORK}/.git", f"{WORK}/ci/link.yaml"):
        assert not verdict(text, "file-write-unlink", path), path
    for path in (f"{WORK}/ci/other", f"{WORK}/new", f"{WORK}/ci/deep/new", f"{WORK}/src"):
        assert verdict(text, "file-write-unlink", path), path
        assert verdict(text, "file-write-create", path), path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/plain", '"/plain"'),
        ('/a"b', r'"/a\"b"'),
        ("/a\\b", r'"/a\\b"'),
        ('/a\\"b', r'"/a\\\"b"'),
        ("/a\nb\rc\td", r'"/a\nb\rc\td"'),
        ("/a\x01\x7f", r'"/a\x01\x7f"'),
        ("/é(;)'", '"/é(;)\'"'),
        ("/\udcff", r'"/\xff"'),
        ("/\u2028", r'"/\xe2\x80\xa8"'),
    ],
)
def test_a_path_is_a_string_whatever_it_holds(path: str, text: str) -> None:
    """Quotes, backslashes, line ends, control characters, bytes that are no text: on one line, and nothing escapes."""
    assert quoted(path) == text


def test_no_path_ends_its_rule() -> None:
    """A workspace whose name is a rule of the language opens nothing."""
    evil = '/x") (allow file-write* (subpath "/'
    text = profile(policy(), Layout(evil, (Root(evil),), (), ()))

    assert '\n(allow file-read* file-write* (subpath "/x\\") (allow file-write* (subpath \\"/"))\n' in text
    assert '(subpath "/")' not in text


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """Folders of a session on this machine; nothing in it is run."""
    made = make_box(tmp_path.resolve(), "none")
    yield made
    made.close()


def test_a_command_is_wrapped_and_nothing_else_happens(box: Box) -> None:
    """The program by its fixed path, the profile, the limits, the command as it is; no descriptor, no file."""
    given = replace(
        box.executor(Mode.DANGER_FULL_ACCESS)._policy,
        mode=Mode.WORKSPACE_WRITE,
        limits=SandboxLimits(file_size=1 << 20),
    )
    before = sorted(box.base.rglob("*"))
    command = Seatbelt().confine(["/bin/echo", "$1", ""], given)

    assert command.layout is not None
    assert command.argv == [
        PROGRAM,
        "-p",
        profile(given, command.layout),
        *("/bin/sh", "-c", 'ulimit -c 0 && ulimit -f 2048 && exec "$@"', "sh"),
        *("/bin/echo", "$1", ""),
    ]
    assert (command.environment, command.cwd) == (dict(given.environment), str(box.workspace))
    assert (command.pass_fds, command.inner, command.wrapped) == ((), None, True)
    assert f'(deny file-write* (subpath "{box.workspace}/.git"))' in command.argv[2]
    assert sorted(box.base.rglob("*")) == before
    assert Seatbelt().confine(["x"], replace(given, mode=Mode.READ_ONLY)).argv[2].count(f'"{box.workspace}"') == 1


def test_a_broken_wrapper_is_told_from_a_failed_command(box: Box) -> None:
    """By its exit code and its own words together."""
    failed = Seatbelt().confine(["x"], box.executor(Mode.DANGER_FULL_ACCESS)._policy).wrapper_failed

    assert failed(65, b"sandbox-exec: <input string>:1:0: unbound variable\n")
    assert not failed(65, b"x: wrong data\n")
    assert not failed(1, b"sandbox-exec: something about it\n")


def test_what_it_does_not_keep_is_said() -> None:
    """A profile that requires one of these refuses it."""
    backend = Seatbelt()

    assert backend.missing_properties(policy()) == ("pid_isolation",)
    assert backend.missing_properties(policy(unprotected_git=True)) == ("pid_isolation", "git_protect")
    assert {"system_calls", "process_limit", "memory_limit", "process_lifetime"} <= set(backend.not_enforced(policy()))


def test_on_linux_it_is_refused() -> None:
    """By name, with what to use instead; ``auto`` does not try it."""
    if sys.platform == "darwin":
        pytest.skip("only Linux refuses it")
    with pytest.raises(SandboxError, match="macOS only") as caught:
        build_backend("seatbelt")

    assert "bubblewrap or landlock" in str(caught.value.hint)
