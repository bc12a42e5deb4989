"""Analysed texts are run in a real bash: every argv and every written file was foreseen.

The programs on PATH are stubs that log how they were called. Texts come from a grammar with nasty
quoting, and from changing single characters of such texts; seeds are fixed.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.approvals.commands import TRANSPARENT
from runner.approvals.shell import analyse, is_exempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runner.approvals.shell import Analysis, SimpleCommand, Token

PROGRAMS = ("alpha", "beta", "gamma", "git", "cat", "python", "tee")
REAL_WRAPPERS = ("env", "timeout", "nice", "nohup", "xargs", "find", "bash")
MARKS = ("MARK", "FLAG")

SECONDS = 3.0
"""Longest run of one text; a loop without end is cut, and what was logged until then is checked."""

PIECES = (
    "$x", "${x}", "${#x}", '"$x"', '"${y}"', "$?", "$#", "$1", '"$@"', "$@", '"a$"', "$((1+2))", "$(( 3 * (2-1) ))",
    "~", "~/x", "*.txt", "s*", "?", "[ab]*", "{a,b}", "x{1..3}", "{}", "HEAD@{1}", "a{b", "=~", "x=~", "a:~", "$'a b'",
    "a#b", "!", "foo$", "''", '""',
)  # fmt: skip
"""Parts of words as they are written."""

LITERALS = (
    "a", "b.txt", "--flag", "-v", "-n", "a b", "*", "$x", "{a,b}", "~", "#c", "!", "", "é", "\\", '"', "'", "`", "[",
    "]", "=", "a=b", ";", "|", "&", "(", "if", "do", "}", "x\ny", "$(alpha)", "<", ">out", "[[", "a[0]", "-exec", "+",
    "1", "2", "in", "==", "=~", "%n", "€uro", "a\tb",
)  # fmt: skip
"""Words after quote removal."""


# --- texts -----------------------------------------------------------------------------------------


class Texts:
    """Random shell texts, most of them in the part of bash that is analysed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.depth = 0

    def one(self, *choices: str | Callable[[], str]) -> str:
        """One of the choices."""
        choice = self.random.choice(choices)
        return choice if isinstance(choice, str) else choice()

    def chance(self, share: float) -> bool:
        """True for this share of the calls."""
        return self.random.random() < share

    def text(self) -> str:
        """A whole text."""
        self.depth = 0
        text = self.one("", "", "", "cd sub && ", "cd sub/deep && ", "\n", " ") + self.statements()
        for _ in range(self.random.choice((0, 0, 0, 1, 1, 2, 4))):
            text = self.mutate(text)
        return text

    def mutate(self, text: str) -> str:
        """Change one character."""
        at = self.random.randrange(len(text) + 1)
        piece = self.one(*"\"'`$\\ \n\t;&|()<>{}[]*?~#!=-+0129abx", "$(", "<<", ">&", "&&", "\\\n", "E", "${", "$'")
        kind = self.random.randrange(4)
        if kind == 0:
            return text[:at] + piece + text[at:]
        if kind == 1:
            return text[:at] + text[at + 1 :]
        if kind == 2:
            return text[:at] + piece + text[at + 1 :]
        other = self.random.randrange(len(text) + 1)
        start, end = min(at, other), min(max(at, other), min(at, other) + 12)
        return text[:at] + text[start:end] + text[at:]

    def statements(self) -> str:
        """Some statements."""
        text = self.statement()
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3))):
            text += self.one(
                ";", "; ", " ; ", " && ", "&&", " || ", "||", " | ", "|", " |& ", "\n", "\n\n", " &\n", " & ", "; \n",
                " &&\n ", " |\n", " \\\n && ", " ||\n\n",
            ) + self.statement()  # fmt: skip
        return text + self.one("", "", "", ";", "\n", " ", " &")

    def statement(self) -> str:
        """One command, simple or compound."""
        if self.depth > 3 or self.chance(0.75):
            return self.simple()
        self.depth += 1
        try:
            return self.one(
                lambda: f"({self.statements()})" + self.tail(),
                lambda: f"( cd sub && {self.statements()} )",
                lambda: f"{{ {self.simple()}; {self.simple()}; }}" + self.tail(),
                lambda: f"{{\n{self.statements()}\n}}",
                lambda: f"if {self.condition()}; then {self.statements()}\nelse {self.simple()}; fi" + self.tail(),
                lambda: f"if {self.condition()}\nthen\n{self.statements()}\nfi",
                lambda: f"for v in {self.words()}; do {self.statements()}\ndone" + self.tail(),
                lambda: f"for v in {self.words()}\ndo {self.simple()}; done",
                lambda: f"beta | while read -r l; do {self.statements()}\ndone",
                lambda: f"case {self.word()} in {self.pattern()}) {self.simple()};; *) {self.simple()};; esac",
                lambda: f"case {self.word()} in\n ({self.pattern()}|x) {self.statements()}\n;;\n esac",
                lambda: f"! {self.simple()}",
                lambda: f"[[ {self.test()} ]]" + self.one("", " && ", " || ") + self.simple(),
            )
        finally:
            self.depth -= 1

    def tail(self) -> str:
        """Redirections of a compound command."""
        return self.one(
            "", "", "", lambda: f" {self.redirection()}", lambda: f" {self.redirection()} {self.redirection()}"
        )

    def condition(self) -> str:
        """A condition that ends."""
        return self.one("true", "false", self.simple, lambda: f"[[ {self.test()} ]]", lambda: f"[ {self.bracket()} ]")

    def test(self) -> str:
        """The inside of double brackets."""
        return self.one(
            lambda: f"{self.operand()} {self.one('==', '!=', '=', '<', '>', '=~', '-nt')} {self.operand()}",
            lambda: f"{self.one('-f', '-n', '-z', '-d', '! -e')} {self.operand()}",
            lambda: f"( {self.operand()} ) && ! {self.operand()} == b*",
            lambda: f"{self.operand()} || -n {self.operand()}",
        )

    def bracket(self) -> str:
        """The inside of single brackets."""
        return self.one(
            lambda: f'"$x" {self.one("=", "!=", "-nt")} {self.literal()}',
            lambda: f"{self.one('-f', '-n', '-z')} {self.literal()}",
            lambda: '! -e "$x"',
            lambda: "$# -eq 0",
            lambda: f"{self.literal()} -a {self.literal()}",
        )

    def operand(self) -> str:
        """A word for a test."""
        return self.one(self.word, "x", '"$x"', "$x", "a")

    def pattern(self) -> str:
        """A pattern of a ``case``."""
        return self.one("a", "x*", "'a b'", '"$x"', "$x", "[ab]", "-*", self.literal)

    def simple(self) -> str:
        """A simple command."""
        if self.chance(0.05):
            return self.one("x=1", "x='a b'", "x=$(alpha)", 'y="-v a[0]"', "x=*", "MARK=1", "x= y=2", "x=~", "> out")
        if self.chance(0.08):
            return self.here_document()
        parts = [self.assignment() for _ in range(self.random.choice((0, 0, 0, 0, 0, 1, 2)))]
        parts.append(self.command())
        while self.chance(0.3):
            parts.insert(self.random.randrange(len(parts) + 1), self.redirection())
        return self.blank().join(parts)

    def command(self) -> str:
        """A program with its arguments, or a wrapper around one."""
        if self.chance(0.7) or self.depth > 4:
            return self.plain()
        self.depth += 1
        try:
            return self.one(
                lambda: f"env {self.assignment()} {self.plain()}",
                lambda: f"env -u MARK {self.plain()}",
                lambda: f"env {self.command()}",
                lambda: f"timeout {self.one('5', '-k 1 5', '--signal=TERM 5s')} {self.command()}",
                lambda: f"nice {self.one('', '-n 5', '-5')} {self.command()}",
                lambda: f"nohup {self.command()}",
                lambda: f"time {self.one('', '-p')} {self.command()}",
                self.xargs,
                self.find,
                self.bash,
            )
        finally:
            self.depth -= 1

    def xargs(self) -> str:
        """A pipe into ``xargs``."""
        options, place = self.one("", "-n 1", "-r", "-I{}", "-0"), self.one("", "{}", "a{}")
        return f"beta | xargs {options} {self.plain()} {place}"

    def find(self) -> str:
        """A ``find`` that runs something."""
        options, end = self.one("", "-type f", "-name x", '-name "$x"'), self.one("\\;", "+", "';'")
        return f"find {self.one('sub', 'sub', '.')} {options} -exec {self.plain()} {{}} {end}"

    def bash(self) -> str:
        """A text for another bash."""
        text = self.quote(self.statements())
        return f"bash {self.one('-c', '-ec', '--norc -c')} {text} {self.one('', 'a')}"

    def plain(self) -> str:
        """A program or builtin with its arguments."""
        return self.one(
            lambda: f"{self.name()}{self.blank()}{self.words()}",
            lambda: f"{self.name()}{self.blank()}{self.words()}",
            lambda: f"{self.name()}{self.blank()}{self.words()}",
            self.name,
            lambda: f"echo {self.words()}",
            lambda: f"printf '%s\\n' {self.words()}",
            lambda: f"printf {self.word()} {self.word()}",
            lambda: f"test {self.bracket()}",
            lambda: f"[ {self.bracket()} ]",
            lambda: f"read -r {self.one('a', 'x', 'y x', '')}",
            lambda: f"set {self.one('-e', '-u', '-x', '-eu', '-o pipefail', '+e')}",
            lambda: f"cd {self.one('sub', 'link', '..', '-', 'nowhere')}",
            "true",
        )

    def name(self) -> str:
        """The name of a program, spelled in some way."""
        name = self.random.choice(PROGRAMS)
        return self.one(
            name, name, name, f'"{name}"', f"'{name}'", f"\\{name}", f"{name[:2]}'{name[2:]}'",
            f'{name[0]}""{name[1:]}', "./run", "sub/run",
        )  # fmt: skip

    def blank(self) -> str:
        """What separates words."""
        return self.one(*[" "] * 12, "  ", "\t", " \\\n", "\\\n ", " \\\n  ")

    def words(self) -> str:
        """Some words."""
        return self.blank().join(self.word() for _ in range(self.random.choice((1, 1, 2, 3))))

    def word(self) -> str:
        """One word."""
        if self.chance(0.55):
            return self.literal()
        pieces = [self.piece() for _ in range(self.random.choice((1, 1, 1, 2, 3)))]
        return "".join(pieces)

    def piece(self) -> str:
        """A part of a word that may expand."""
        in_quotes = ("a", "$x", "\\$", "é", "*")
        return self.one(
            *PIECES,
            *[self.literal] * 4,
            lambda: f"$({self.inner()})",
            lambda: f'"$({self.inner()})"',
            lambda: f"`{self.backquoted()}`",
            lambda: f'"{self.one(*in_quotes)} `{self.backquoted()}`"',
        )

    def inner(self) -> str:
        """The inside of a substitution."""
        self.depth += 1
        try:
            return self.statements() if self.depth < 4 else "alpha"
        finally:
            self.depth -= 1

    def backquoted(self) -> str:
        """The inside of backquotes."""
        return self.one("alpha", "beta a", 'gamma "a b"', "alpha | beta", "alpha 'x y'", "alpha > out")

    def literal(self) -> str:
        """A literal word, quoted in some way."""
        return self.quote(self.random.choice(LITERALS))

    def quote(self, text: str) -> str:
        """A spelling of ``text``."""
        if text and all(each.isalnum() or each in "-_./=:,@%+é€" for each in text) and self.chance(0.6):
            return text
        double = '"' + "".join(f"\\{each}" if each in '$`"\\' else each for each in text) + '"'
        if "'" in text:
            return double
        single = f"'{text}'"
        if text and not set(text) & set("\n \t") and self.chance(0.3):
            return "".join(f"\\{each}" for each in text)
        if len(text) > 1 and self.chance(0.2):
            return f"'{text[0]}'" + self.quote(text[1:])
        return self.one(double, single, single)

    def assignment(self) -> str:
        """An assignment before a command."""
        return f"{self.one('x', 'MARK', 'FLAG', 'lower_case')}={self.one('1', '', self.literal, self.piece)}"

    def redirection(self) -> str:
        """A redirection."""
        target = self.one(
            "out", "sub/out", "'a file'", "é", "link/out", "out2", '"o"ut', "/dev/null", "$x", "*", "~/out"
        )
        return self.one(
            lambda: f"{self.one('', '2', '1', '3')}{self.one('>', '>>', '>|')}{self.one('', ' ')}{target}",
            lambda: f"{self.one('&>', '&>>')}{self.one('', ' ')}{target}",
            lambda: f"<{self.one('', ' ')}{self.one('b.txt', '/dev/null', 'sub/x')}",
            "2>&1", ">&2", "1>&2", "2>&-", "<&-", "<&0", ">/dev/null",
        )  # fmt: skip

    def here_document(self) -> str:
        """A command that reads a here-document."""
        delimiter = self.one("E", "'E'", '"E"', "EOF", "'EOF'")
        body = self.one("", "text\n", "a b\n  indented\n\n", "$x `alpha`\n", "E F\n", "'\n", "alpha; beta\n", "\\\n")
        after = self.one("", "", " > out", " | alpha", " && beta", " | python", "; gamma")
        end = delimiter.strip("'\"")
        return f"{self.one('cat', 'alpha', 'tee out', 'python')} <<{self.one('', ' ')}{delimiter}{after}\n{body}{end}\n"


# --- running ---------------------------------------------------------------------------------------

LOG = """#!/bin/sh
{{ printf '%s\\000' "$#" "$0" "${{MARK-}}" "${{FLAG-}}" "$@"; }} >> {log}
{then}
"""

OUTPUT = {
    "alpha": "printf 'one two\\n'",
    "beta": "printf '%s\\n' 'a b' -v '*' '$(alpha)' '-exec alpha' 'x[$(alpha)]'",
    "gamma": "exit 1",
    "git": "printf -- '--output=x\\n'",
    "cat": "printf 'x\\n'",
    "tee": ":",
    "python": ":",
}


class Place:
    """A workspace, stubs on a PATH, and their log. Runs as nobody where it may."""

    def __init__(self, directory: Path) -> None:
        self.workspace = directory / "workspace"
        self.stubs = directory / "stubs"
        self.log = directory / "log"
        self.stubs.mkdir()
        for name in PROGRAMS:
            self._stub(self.stubs / name, OUTPUT[name])
        for name in REAL_WRAPPERS:
            real = shutil.which(name, path="/usr/bin:/bin")
            assert real is not None
            options = "--noprofile --norc " if name == "bash" else ""
            self._stub(self.stubs / name, f'exec {real} {options}"$@"')
        directory.chmod(0o777)
        self.clean: dict[str, tuple[int, int]] | None = None
        self.user = 65534 if os.geteuid() == 0 else None

    def _stub(self, path: Path, then: str) -> None:
        path.write_text(LOG.format(log=self.log, then=then))
        path.chmod(0o755)

    def prepare(self) -> None:
        """Make the workspace anew, unless it still is as it was made."""
        self.log.write_text("")
        self.log.chmod(0o666)
        if self.clean is not None and self.clean == self.files():
            return
        shutil.rmtree(self.workspace, ignore_errors=True)
        for folder in (self.workspace, self.workspace / "sub", self.workspace / "sub" / "deep"):
            folder.mkdir()
            folder.chmod(0o777)
        (self.workspace / "link").symlink_to("sub")
        for name in ("b.txt", "sub/x", "-v", "*lit"):
            (self.workspace / name).write_text("")
        for name in ("run", "sub/run", "sub/deep/run"):
            self._stub(self.workspace / name, ":")
        self.clean = self.files()

    def files(self) -> dict[str, tuple[int, int]]:
        """Path → inode and time of last change, of all files in the workspace."""
        found = {}
        for folder, _, names in os.walk(self.workspace):
            for name in names:
                path = f"{folder}/{name}"
                state = os.lstat(path)
                if stat.S_ISREG(state.st_mode):
                    found[os.path.relpath(path, self.workspace)] = (state.st_ino, state.st_mtime_ns)
        return found

    def run(self, text: str) -> tuple[list[list[str]], set[str]]:
        """Run a text; returns how stubs were called (argv behind two marks), and the files that changed."""
        self.prepare()
        before = self.clean or {}
        alive, held = os.pipe()
        process = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc", "-c", text],
            cwd=self.workspace,
            env={"PATH": str(self.stubs), "HOME": str(self.workspace), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(held,),
            start_new_session=True,
            user=self.user,
        )
        os.close(held)
        try:
            # The pipe ends when the last process that holds it ends, those in the background too.
            select.select([alive], [], [], SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(alive)
        calls = []
        fields = self.log.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        while fields:
            size = int(fields[0]) + 4
            program = fields[1].removeprefix(f"{self.stubs}/")
            calls.append([*fields[2:4], program, *fields[4:size]])
            del fields[:size]
        after = self.files()
        return calls, {name for name, state in after.items() if before.get(name) != state}


def matches(tokens: Sequence[Token], words: Sequence[str]) -> bool:
    """Whether a command line is one of those that the tokens stand for."""
    if not tokens:
        return not words
    token, rest = tokens[0], tokens[1:]
    if not token.expansion:
        return bool(words) and words[0] == token.value and matches(rest, words[1:])
    if token.single:
        return bool(words) and words[0].startswith(token.value) and matches(rest, words[1:])
    least = 1 if token.value else 0
    return any(
        (not size or words[0].startswith(token.value)) and matches(rest, words[size:])
        for size in range(least, len(words) + 1)
    )


def foreseen(call: list[str], analysis: Analysis) -> bool:
    """Whether the analysis named this call, with the variables it got."""
    marks, argv = call[:2], call[2:]
    set_names = {name for name, value in zip(MARKS, marks, strict=True) if value}

    def fits(command: SimpleCommand) -> bool:
        return matches(command.argv, argv) and set_names <= {*command.env, *analysis.assigned}

    wrappers = [shadow for shadow in analysis.shadows if shadow.name in {*TRANSPARENT, "bash"}]
    return any(fits(command) for command in analysis.commands) or any(
        matches(wrapper.argv, argv) for wrapper in wrappers
    )


def resolved(workspace: Path, path: str) -> str:
    """A path of the analysis, relative to the workspace, links followed."""
    return os.path.relpath(os.path.realpath(workspace / path), workspace)


@contextlib.contextmanager
def new_place() -> Iterator[Place]:
    """A place that the user nobody can enter."""
    directory = Path(tempfile.mkdtemp(prefix="policy-bash-")).resolve()
    try:
        yield Place(directory)
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def place() -> Iterator[Place]:
    """A place of the test's own."""
    with new_place() as made:
        yield made


def check_texts(place: Place, seed: int, count: int) -> tuple[int, int]:
    """Run ``count`` analysed texts; returns how many texts were made and how many calls were logged."""
    texts = Texts(seed)
    made = logged = 0
    for _ in range(count):
        while True:
            made += 1
            text = texts.text()
            analysis = analyse(text)
            # A script for bash may run anything; that is the matter of the rule that allows it.
            scripts = any(command.name == "bash" for command in analysis.commands)
            if analysis.analysed and not scripts and (analysis.commands or analysis.writes):
                break
        calls, written = place.run(text)
        logged += len(calls)
        for call in calls:
            assert foreseen(call, analysis), f"{text!r} ran {call}\nforeseen: {list(map(str, analysis.commands))}"
        expected = {resolved(place.workspace, path) for path in analysis.writes}
        assert written <= expected, f"{text!r} wrote {written}\nforeseen: {expected}"
    return made, logged


@pytest.mark.parametrize("seed", range(4))
def test_what_bash_runs_and_writes_was_foreseen(place: Place, seed: int) -> None:
    """250 analysed texts a seed: each argv that a stub logs and each file that changes is in the analysis."""
    _, logged = check_texts(place, seed, 250)

    assert logged > 250


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 120, 4))
def test_what_bash_runs_and_writes_was_foreseen_at_length(seed: int) -> None:
    """The same for 20,000 texts in all, four places at a time."""

    def work(number: int) -> int:
        with new_place() as place:
            return check_texts(place, number, 1000)[1]

    with ThreadPoolExecutor(4) as pool:
        logged = list(pool.map(work, range(seed, seed + 4)))

    assert min(logged) > 1000


def test_the_check_itself_finds_an_unforeseen_call(place: Place) -> None:
    """A call and a file that the analysis of another text does not know are noticed."""
    calls, written = place.run("alpha a; beta > out")
    analysis = analyse("alpha b; gamma")

    assert [call[2:] for call in calls] == [["alpha", "a"], ["beta"]]
    assert not any(foreseen(call, analysis) for call in calls)
    assert written == {"out"}
    assert analysis.writes == ()


def test_exempt_variables_are_those_no_program_is_steered_by() -> None:
    """Lower-case names are free for a whole text, proxies and others are not."""
    names = ["x", "my_name", "PATH", "Mixed", "http_proxy", "_", "IFS"]

    assert [name for name in names if is_exempt(name)] == ["x", "my_name"]
