"""The built-in tools do the same under every sandbox backend and without one."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.prompt import SYSTEM_PROMPT
from runner.errors import ErrorCode, StorageError
from runner.messages import text_of
from runner.permission import Mode
from runner.session.tokens import estimate_header, estimate_tools
from runner.testing.tools import BACKENDS, Bench
from runner.tools.builtin.files import IMAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """The tools under one backend."""
    made = Bench(request.param, Path(os.path.realpath(tmp_path)))
    # Under Landlock new entries can only be made in folders that were there at the start.
    (made.root / "src").mkdir()
    (made.root / "src" / "a.py").write_text("one = 1\ntwo = 2\n")
    yield made
    made.close()


def test_a_file_is_made_read_edited_and_found(bench: Bench) -> None:
    """The usual life of a file, each step with a short answer."""
    assert bench.good("write_file", path="src/new/b.py", content="x = 1\ny = 2\n") == "made src/new/b.py (12 bytes)"
    assert bench.good("read_file", path="src/new/b.py") == "x = 1\ny = 2\n"
    assert bench.good("edit_file", path="src/new/b.py", edits=[{"old": "y = 2", "new": "y = 3"}]) == (
        "edited src/new/b.py at line 2"
    )
    assert (bench.root / "src/new/b.py").read_text() == "x = 1\ny = 3\n"
    assert bench.good("glob", pattern="**/*.py") == "src/a.py\nsrc/new/b.py"
    assert (
        bench.good("grep", pattern="= [13]$", path="src")
        == "src/a.py:1:one = 1\nsrc/new/b.py:1:x = 1\nsrc/new/b.py:2:y = 3"
    )
    assert bench.good("grep", pattern="two", path="src/a.py") == "src/a.py:2:two = 2"
    assert bench.good("write_file", path="src/a.py", content="x") == "replaced src/a.py (1 byte)"
    assert bench.good("write_file", path="src/a.py", content="") == "replaced src/a.py (0 bytes)"
    assert bench.good("read_file", path="src/a.py") == "[empty]"


def test_file_tools_and_shell_see_the_same_files(bench: Bench) -> None:
    """A file written by one is there for the other, in the temporary folder too."""
    tmp = bench.executor.tmp

    bench.good("shell", command='echo from shell > "$TMPDIR/x" && echo more > src/y')
    bench.good("write_file", path=f"{tmp}/z", content="from tool\n")

    assert bench.good("read_file", path=f"{tmp}/x") == "from shell\n"
    assert bench.good("read_file", path="src/y") == "more\n"
    assert bench.good("shell", command='cat "$TMPDIR/z"') == "from tool\n"


def test_a_file_beside_a_protected_git_folder_can_be_written(bench: Bench) -> None:
    """Where new files cannot be made beside it an old one still gets its new content, whole or not at all."""
    (bench.root / ".git").mkdir()
    (bench.root / ".git" / "config").write_text("kept\n")
    top = bench.root / "setup.py"
    top.write_text("version = 1\n")
    top.chmod(0o750)

    bench.good("edit_file", path="setup.py", edits=[{"old": "1", "new": "22"}])
    assert top.read_text() == "version = 22\n"
    bench.good("write_file", path="setup.py", content="v\n")

    assert top.read_text() == "v\n"
    assert top.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in bench.root.iterdir()) == [".git", "setup.py", "src"]
    if bench.mode is Mode.WORKSPACE_WRITE:
        error, text = bench.bad("write_file", path=".git/config", content="x")
        assert error is ErrorCode.SANDBOX_DENIED
        assert "(mode workspace-write)" in text
        assert (bench.root / ".git" / "config").read_text() == "kept\n"


def test_paths_are_decided_on_resolved_and_used_as_decided(bench: Bench) -> None:
    """The policy sees where links lead; writes do not follow the last one."""
    (bench.root / "src" / "real").mkdir()
    (bench.root / "src" / "real" / "f").write_text("target\n")
    (bench.root / "src" / "link").symlink_to("real")
    (bench.root / "src" / "file-link").symlink_to("real/f")
    (bench.root / "src" / "out").symlink_to("/etc/hostname")
    root = str(bench.root)

    assert bench.good("read_file", path="src/link/../real/f") == "target\n"
    bench.good("read_file", path="src/file-link")
    bench.run("read_file", path="src/out")
    bench.good("write_file", path="src/link/new/g", content="x")
    error, text = bench.bad("write_file", path="src/file-link", content="x")
    bench.good("glob", pattern=f"{root}/src/link/*")

    reads = [facts.read for facts in bench.facts]
    writes = [facts.write for facts in bench.facts]
    assert reads[:3] == [(f"{root}/src/real/f",), (f"{root}/src/real/f",), (os.path.realpath("/etc/hostname"),)]
    assert reads[3:5] == [(), ()]
    assert writes[3:5] == [(f"{root}/src/real/new/g",), (f"{root}/src/file-link",)]
    assert reads[5] == (f"{root}/src/real",)
    assert error is ErrorCode.SANDBOX_DENIED
    assert text == "src/file-link is a symbolic link to real/f, and links are not followed here"
    assert (bench.root / "src/real/f").read_text() == "target\n"


def test_a_path_that_names_no_file_is_refused_before_the_policy(bench: Bench) -> None:
    """Nothing is asked and nothing runs."""
    for path in ("", "~/x", "a\0b", "src/", "src/..", "."):
        error, text = bench.bad("write_file", path=path, content="x")

        assert error is ErrorCode.INVALID_ARGS
        assert text.startswith("Denied at stage validate: path: ")
    assert bench.events == []


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("read_file", {"path": "src/b.py"}, "src/b.py does not exist"),
    ("read_file", {"path": "src"}, "src is a folder"),
    ("read_file", {"path": "src/a.py", "offset": 9}, "has 2 lines"),
    ("read_file", {"path": "src/binary"}, "binary"),
    ("read_file", {"path": "spill:nothing"}, "no result spill:nothing"),
    ("read_file", {"path": "spill:../../etc/passwd"}, "no result"),
    ("write_file", {"path": "src", "content": ""}, "src is a folder"),
    ("edit_file", {"path": "src/a.py", "edits": [{"old": " = ", "new": ""}]}, "at lines 1, 2"),
    ("edit_file", {"path": "src/a.py", "edits": [{"old": "tow = 2", "new": ""}]}, "2: two = 2"),
    ("read_file", {"path": "src/loop"}, "src/loop is a symbolic link to loop, which leads back to it"),
    ("write_file", {"path": "src/loop", "content": ""}, "which leads back to it"),
    ("glob", {"pattern": "../*"}, "not relative"),
    ("glob", {"pattern": ""}, "is empty"),
    ("glob", {"pattern": "*", "path": "gone"}, "gone does not exist"),
    ("grep", {"pattern": "("}, "no regular expression"),
]


def test_a_failed_file_operation_says_what_to_do_differently(bench: Bench) -> None:
    """The message names the file as the model does; the run goes on."""
    (bench.root / "src" / "binary").write_bytes(b"\0\1\2")
    (bench.root / "src" / "loop").symlink_to("loop")

    for name, arguments, says in MISTAKES:
        error, text = bench.bad(name, **arguments)

        assert error is ErrorCode.TOOL_FAILED
        assert says in text
        assert str(bench.root) not in text


def test_a_long_file_comes_in_pages(bench: Bench) -> None:
    """The first line of a page says which lines these are and how to go on."""
    (bench.root / "src" / "long").write_text("".join(f"{n}\n" for n in range(1, 5001)))

    first = bench.good("read_file", path="src/long")
    middle = bench.good("read_file", path="src/long", offset=2001, limit=2.0)

    assert first.startswith("[lines 1-2000 of 5000, read on with offset 2001]\n1\n2\n")
    assert middle == "[lines 2001-2002 of 5000, read on with offset 2003]\n2001\n2002\n"


IMAGES = {
    "png": (b"\x89PNG\r\n\x1a\n" + b"\0" * 20 + b"IEND\xaeB`\x82", "image/png"),
    "jpg": (b"\xff\xd8\xff\xe0" + b"\0" * 20 + b"\xff\xd9", "image/jpeg"),
    "gif": (b"GIF89a" + b"\0" * 20 + b";", "image/gif"),
    "webp": (b"RIFF" + (24).to_bytes(4, "little") + b"WEBP" + b"\0" * 20, "image/webp"),
}


def test_an_image_becomes_an_image_block(bench: Bench) -> None:
    """Known by its first bytes, whatever its name; the bytes lie beside the log, once."""
    for extension, (data, kind) in IMAGES.items():
        (bench.root / "src" / f"{extension}.bin").write_bytes(data)
        result = bench.run("read_file", path=f"src/{extension}.bin", offset=7)

        digest = hashlib.sha256(data).hexdigest()
        assert result.error is None
        assert result.content == [{"type": "image", "mediaType": kind, "sha256": digest, "bytes": len(data)}]
        kept = bench.root.parent / "session" / "media" / f"{digest}.{extension}"
        assert kept.read_bytes() == data
        assert result.meta["bytes"] == len(data)


def test_an_image_that_cannot_be_shown_is_refused(bench: Bench) -> None:
    """Too large, or cut off, which a model's API would refuse in every later request."""
    for extension, (data, _) in IMAGES.items():
        (bench.root / "src" / extension).write_bytes(data[:15])
        error, text = bench.bad("read_file", path=f"src/{extension}")
        assert error is ErrorCode.TOOL_FAILED
        assert "it is damaged" in text
    (bench.root / "src" / "large").write_bytes(IMAGES["png"][0] + b"\0" * IMAGE_BYTES)
    assert "more than the 5000000 that can be shown" in bench.bad("read_file", path="src/large")[1]
    (bench.root / "src" / "svg").write_text("<svg/>")
    assert bench.good("read_file", path="src/svg") == "<svg/>"
    assert not (bench.root.parent / "session" / "media").exists()


def test_a_shell_result_says_how_the_command_ended(bench: Bench) -> None:
    """Output first, then a line only if there is something to say; the exit status is a field too."""
    fine = bench.run("shell", command="echo out; echo err >&2")
    failed = bench.run("shell", command="printf x; exit 3")
    silent = bench.run("shell", command="true")
    killed = bench.run("shell", command="kill -KILL $$")
    bench.timeout = 1.0
    late = bench.run("shell", command="echo early; sleep 60", timeout=30)

    texts = [text_of(list(result.content)) for result in (fine, failed, silent, killed, late)]
    killed_text = "[killed by SIGKILL]" if killed.meta["exitCode"] is None else "[exit 137, as after SIGKILL]"
    assert texts == ["out\nerr\n", "x\n[exit 3]", "[no output]", killed_text, "early\n[timed out after 1 s]"]
    assert [result.error for result in (fine, failed, silent, killed)] == [None] * 4
    assert late.error is ErrorCode.TOOL_TIMEOUT
    assert late.meta["timedOut"] is True
    assert failed.meta["exitCode"] == 3
    assert (killed.meta["exitCode"], killed.meta.get("signal")) in ((None, "SIGKILL"), (137, None))
    assert fine.meta["backend"] == bench.executor.backend_name


def test_the_shorter_time_limit_holds(bench: Bench) -> None:
    """A call may ask for less than the run allows, never for more."""
    started = time.monotonic()

    result = bench.run("shell", command="sleep 60", timeout=1)

    assert result.error is ErrorCode.TOOL_TIMEOUT
    assert time.monotonic() - started < 10


def test_a_command_is_bash_without_startup_files_input_or_terminal(bench: Bench) -> None:
    """The shell is the one that the policy analysed for."""
    text = bench.good(
        "shell", command='echo "$0 $BASH"; shopt -q login_shell || echo no login; read -r line || echo no input; tty'
    )

    assert text == "/bin/bash /bin/bash\nno login\nno input\nnot a tty\n[exit 1]"


def test_output_that_is_not_text_is_escaped_without_loss(bench: Bench) -> None:
    """Bytes that are no UTF-8 and NUL stand as escapes; what only looks like one is marked."""
    assert bench.good("shell", command=r"printf 'a\xff\0b\\x41'") == "a\\xff\\x00b\\\\x41"
    assert bench.good("shell", command=r"printf 'plain \\x41 \\'") == "plain \\x41 \\"


def test_a_huge_output_is_bounded_and_kept_whole(bench: Bench) -> None:
    """Head and tail come, the rest is a page away; memory and log stay small."""
    result = bench.run("shell", command="seq 1 600000; echo 'the end'; exit 4")
    text = text_of(list(result.content))
    spilled = result.meta["spill"]

    assert len(text) < 10_000
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("600000\nthe end\n\n[exit 4]")
    assert (result.meta["truncated"], result.meta["bytes"]) == (True, spilled["bytes"])
    assert spilled["bytes"] == len("".join(f"{n}\n" for n in range(1, 600001)) + "the end\n")
    name = spilled["path"].removeprefix("spill/").removesuffix(".txt")
    assert f"spill:{name}" in text
    page = bench.good("read_file", path=f"spill:{name}", offset=500_000, limit=2)
    assert page == "[lines 500000-500001 of 600001, read on with offset 500002]\n500000\n500001\n"
    assert bench.facts[-1].read == ()


def test_secrets_in_output_are_taken_out_of_log_and_spill(bench: Bench) -> None:
    """A secret that a command prints stands nowhere, short or long."""
    (bench.root / "src" / "secret").write_text("hunter22\n")

    short = bench.run("shell", command="cat src/secret")
    long = bench.run("shell", command="seq 400000; cat src/secret")

    assert text_of(list(short.content)) == "[redacted KEY]\n"
    assert [event.TYPE for event in short.events] == ["redaction"]
    spilled = Path(bench.spill._store._directory).parent / long.meta["spill"]["path"]
    assert spilled.read_text().endswith("400000\n[redacted KEY]\n")
    assert bench.bad("shell", command="echo hunter22")[0] is ErrorCode.INVALID_ARGS


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("may", [True, False])
def test_a_denial_by_the_sandbox_is_named_as_such(tmp_path: Path, backend: str, may: bool) -> None:
    """A failed command gets one line on what may have stopped it, and whether more may be asked for."""
    bench = Bench(backend, Path(os.path.realpath(tmp_path)), mode=Mode.READ_ONLY)
    bench.may_escalate = may
    (bench.root / "a").write_text("kept")

    shell = bench.good("shell", command="echo x > a")
    error, written = bench.bad("write_file", path="a", content="x")
    plain = bench.good("shell", command="ls nowhere")
    bench.close()

    assert "the sandbox (mode read-only) may have stopped this; escalation may" in shell
    assert ("may not be asked" in shell) is not may
    assert error is ErrorCode.SANDBOX_DENIED
    assert "(mode read-only)" in written
    assert "sandbox" not in plain
    assert (bench.root / "a").read_text() == "kept"


def test_a_command_for_the_background_runs_on_and_ends_with_the_turn(bench: Bench) -> None:
    """The result says where to look; two calls with one id are two processes."""
    for number in (1, 2):
        result = bench.run("shell", "same id", command=f"echo started {number}; exec sleep 600", background=True)
        assert result.error is None
        assert not re.search(r"process|\bpid\b", text_of(list(result.content)))
        output = text_of(list(result.content)).split("`tail ")[1].split("`")[0]
        deadline = time.monotonic() + 10
        while "started" not in bench.good("shell", command=f"cat {output}") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert bench.good("read_file", path=output) == f"started {number}\n"

    assert len(bench.executor.background()) == 2
    assert len(bench.executor.stop_background()) == 2
    assert bench.executor.background() == []


def test_a_background_file_that_cannot_be_made_is_a_failed_call(bench: Bench) -> None:
    """Somebody took the name: the call fails, the run goes on."""
    Path(f"{bench.executor.tmp}/background-x-1.log").symlink_to("/etc/hostname")

    result = bench.run("shell", "x", command="true", background=True)

    assert result.error is ErrorCode.TOOL_FAILED
    assert "could not be started" in text_of(list(result.content))


def test_cancelling_ends_a_command_and_a_search(bench: Bench) -> None:
    """Both come back at once, as cancelled."""
    (bench.root / "src" / "trap").write_text("a" * 60 + "!\n")
    threading.Timer(0.5, bench.cancellation.cancel, ["SIGTERM"]).start()
    started = time.monotonic()

    command = bench.run("shell", command="sleep 60")
    search = bench.run("grep", pattern="(a|a)*$")

    assert (command.error, search.error) == (ErrorCode.CANCELLED, ErrorCode.CANCELLED)
    assert time.monotonic() - started < 8


def test_a_regular_expression_without_end_runs_into_its_time_limit(bench: Bench) -> None:
    """The search is ended, and the next one works."""
    (bench.root / "src" / "trap").write_text("a" * 60 + "!\n")
    bench.timeout = 1.0

    error, text = bench.bad("grep", pattern="(a|a)*$")

    assert error is ErrorCode.TOOL_TIMEOUT
    assert "1 s" in text
    assert bench.good("grep", pattern="two") == "src/a.py:2:two = 2"


def test_searches_say_what_they_left_out(bench: Bench) -> None:
    """Too many paths and lines, and no match at all."""
    many = bench.root / "many"
    many.mkdir()
    for number in range(1_050):
        (many / f"{number:04}.txt").write_text("match\n")
    (bench.root / "src" / "binary").write_bytes(b"\0nothing here")

    paths = bench.good("glob", pattern="many/*").splitlines()
    lines = bench.good("grep", pattern="match").splitlines()

    assert (len(paths), paths[-1]) == (1_001, "[more than 1000 paths; narrow the pattern]")
    assert (len(lines), lines[-1]) == (251, "[more matches than the first 250; narrow the pattern, path or glob]")
    assert bench.good("glob", pattern="*.nothing") == "no file matches"
    assert bench.good("grep", pattern="nothing here", path="src") == "no line matches\n[1 binary file skipped]"
    (bench.root / "src" / ".gitignore").write_text("binary\n*.log\n")
    (bench.root / "src" / "x.log").write_text("match\n")
    left_out = "[1 file or folder that git ignores left out; name one as path to look into it]"
    assert bench.good("glob", pattern="**/*.log") == f"no file matches\n{left_out}"
    some = "[1 file or folder that git ignores left out]"
    (bench.root / "src" / ".gitignore").write_text("*.log\n")
    assert bench.good("glob", pattern="**/*", path="src") == f"src/.gitignore\nsrc/a.py\nsrc/binary\n{some}"
    assert bench.good("grep", pattern="two", path="src") == f"src/a.py:2:two = 2\n{some}"
    assert bench.good("grep", pattern="match", path="src/x.log") == "src/x.log:1:match"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"command": "a\0b"}, "NUL"),
        ({"command": "x" * 130_000}, "script file"),
        ({"command": "ls", "sandbox_permissions": "danger-full-access"}, "justification"),
        ({"command": "ls", "sandbox_permissions": "danger-full-access", "justification": "  "}, "justification"),
        ({"command": "ls", "sandbox_permissions": "root"}, "sandbox_permissions"),
        ({"command": "ls", "timeout": 0}, "timeout"),
        ({"command": "ls", "timeout": "1"}, "timeout"),
        ({"command": ["ls"]}, "command"),
        ({}, "command"),
        ({"command": "ls", "cwd": "/"}, "cwd"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    """Before the policy, with what is wrong."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))

    error, text = bench.bad("shell", **arguments)
    bench.close()

    assert error is ErrorCode.INVALID_ARGS
    assert says in text
    assert bench.events == []


def test_output_that_could_not_be_kept_ends_the_run(tmp_path: Path) -> None:
    """A missing place for long output is a failure of the storage, not of the command."""
    root = Path(os.path.realpath(tmp_path))
    bench = Bench("none", root)
    (root / "overflow").write_text("a file where the folder should be")

    with pytest.raises(StorageError):
        bench.run("shell", command="true")
    bench.close()


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_an_escalation_is_a_question_only_if_it_asks_for_more(tmp_path: Path, backend: str) -> None:
    """The mode the run has already is no escalation; more holds for the one call."""
    bench = Bench(backend, Path(os.path.realpath(tmp_path)))
    bench.may_escalate = True
    why = {"justification": "needs it"}

    same = bench.run("shell", command="true", sandbox_permissions="workspace-write", **why)
    more = bench.run("shell", command="true", sandbox_permissions="danger-full-access", **why)
    bench.close()

    assert [facts.escalation for facts in bench.facts] == [None, Mode.DANGER_FULL_ACCESS]
    assert (same.meta["mode"], same.meta["backend"]) == ("workspace-write", backend)
    assert (more.meta["mode"], more.meta["backend"]) == ("danger-full-access", "none")


def test_a_todo_list_goes_into_the_log(tmp_path: Path) -> None:
    """The event holds the list as given, the model gets a count."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))
    todos = [{"content": "look", "status": "completed"}, {"content": "fix", "status": "in_progress"}]

    result = bench.run("todo", todos=todos)
    error, _ = bench.bad("todo", todos=[{"content": "x", "status": "done"}])
    assert bench.good("todo", todos=todos[:1]) == "1 todo: 0 pending, 0 in_progress, 1 completed"
    bench.close()

    assert text_of(list(result.content)) == "2 todos: 0 pending, 1 in_progress, 1 completed"
    assert [event.record()["data"] for event in result.events] == [{"todos": todos}]
    assert error is ErrorCode.INVALID_ARGS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": "src/gone.py"}, "does not exist"),
        ({"path": "src"}, "is no file"),
        ({"path": "../x"}, "lies outside"),
        ({"path": "/etc/passwd"}, "lies outside"),
        ({"path": "src/../../../etc/passwd"}, "lies outside"),
        ({"path": "./src/a.py"}, "write it as src/a.py"),
        ({"path": "out"}, "leads out of the workspace"),
        ({"path": "a\0b"}, "NUL"),
        ({"path": ""}, "path"),
        ({"line": 0}, "line"),
        ({"line": 1.5}, "line"),
        ({"endLine": 3}, "endLine: needs a line"),
        ({"line": 4, "endLine": 3}, "endLine: needs a line"),
        ({"severity": "grave"}, "severity"),
        ({"message": " \n"}, "message: is blank"),
        ({"message": "x" * 4_001}, "more than 4,000 characters"),
        ({"rule": ""}, "rule: is blank"),
        ({"column": 1}, "column"),
    ],
)  # fmt: skip
def test_a_finding_that_no_report_can_show_is_refused(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    """Before the policy, so that a call without an error is a finding in its final form."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))
    (bench.root / "src").mkdir()
    (bench.root / "src" / "a.py").write_text("x\n")
    (bench.root / "out").symlink_to("/etc/hostname")
    given = {"path": "src/a.py", "severity": "error", "message": "wrong", **arguments}

    error, text = bench.bad("report_finding", **given)
    assert error is ErrorCode.INVALID_ARGS
    assert says in text
    assert bench.events == []
    fine = bench.good(
        "report_finding", path="src/a.py", line=1, endLine=1, severity="warning", message="wrong", rule="r"
    )
    bench.close()

    assert fine == "recorded: warning at src/a.py:1"


def test_reads_and_searches_may_overlap_and_nothing_else(tmp_path: Path) -> None:
    """What changes something, or counts in order, runs alone."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))
    calls: dict[str, dict[str, Any]] = {
        "shell": {"command": "ls"},
        "read_file": {"path": "a"},
        "write_file": {"path": "a", "content": ""},
        "edit_file": {"path": "a", "edits": [{"old": "a", "new": "b"}]},
        "glob": {"pattern": "*"},
        "grep": {"pattern": "a"},
        "todo": {"todos": []},
        "apply_patch": {"patch": ""},
        "report_finding": {"path": "a", "severity": "note", "message": "x"},
    }

    tools = bench.registry.tools()
    safe = {name for name, arguments in calls.items() if tools[name].is_concurrency_safe(arguments)}
    bench.close()

    assert safe == {"read_file", "glob", "grep"}


def test_the_prompt_and_the_tool_table_are_small(tmp_path: Path) -> None:
    """Prompt and tools together fit in 1,500 tokens, estimated as reports do; the table takes 950 of them."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))
    offered = bench.registry.offered()
    bench.close()

    assert [tool["name"] for tool in offered] == [
        "shell", "read_file", "write_file", "edit_file", "apply_patch", "glob", "grep", "todo", "report_finding",
    ]  # fmt: skip
    assert estimate_tools(offered) <= 950
    assert estimate_header({"config": {}, "system": SYSTEM_PROMPT, "tools": offered}) <= 1_200
