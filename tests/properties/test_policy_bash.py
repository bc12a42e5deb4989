"""Analysed texts are run in a real bash: every argv and every written file was foreseen.

The programs on PATH are stubs that log how they were called. Texts come from a grammar with nasty quoting, from the
lines of the corpus, from joining both, and from changing single characters of all of them; seeds are fixed. Counted are
texts that were analysed and run. About two more for each of them were made and not analysed.
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
import yaml

from runner.approvals.commands import TRANSPARENT
from runner.approvals.shell import analyse, is_exempt
from runner.approvals.words import MATCHED_BUILTINS
from runner.tools.builtin.shell import BASH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from runner.approvals.shell import Analysis, SimpleCommand, Token

PROGRAMS = ("alpha", "beta", "gamma", "git", "cat", "python", "tee")
FURTHER = (
    "curl", "grep", "head", "ls", "make", "npm", "pytest", "rm", "sort", "sudo", "tail", "time", "wc", "wget",
    *sorted(MATCHED_BUILTINS),
)  # fmt: skip
"""Programs of the corpus, and programs named like builtins: whether one of those runs was foreseen, too."""

REAL_WRAPPERS = ("env", "timeout", "nice", "nohup", "xargs", "find", "bash")
MARKS = ("MARK", "FLAG")

SECONDS = 3.0
"""Longest run of one text; a loop without end is cut, and what was logged until then is checked."""

VARIABLES = {"x": "-exec alpha", "y": "a[$(alpha)]", "v": "--output=v", "l": ";"}
"""What half of the texts find in variables."""

CORPUS = yaml.safe_load((Path(__file__).parent.parent / "spec" / "policy_corpus.yaml").read_text(encoding="utf-8"))
LINES = tuple(line for name in CORPUS["policies"] for lines in CORPUS[name].values() for _, line in lines)

NASTY = (
    *"\"'`$\\ \n\t;&|()<>{}[]*?~#!=-+0129abx", "$(", "<<", ">&", "&&", "\\\n", "E", "${", "$'", "||", "|&", ";;",
    "&>", "2>", "<&", "<<E\n", "\nE\n", '"$@"', "$@", "$1", "$x", '"$y"', "$?", "$#", "{}", "\\;", " + ", "--",
    " -I{} ", "-exec ", "cd ..", "cd link && ", "( ", " )", "{ ", "; }", "if ", "then ", "fi", "do ", "done", "esac",
    "[[ ", " ]]", "[ ", " ]", "! ", "time ", "env ", "xargs ", "bash -c ", "MARK=", "IFS=1;", "read -r ", "%n", "é",
    "\r", "\x01", "\u00a0", "\u2028",
)  # fmt: skip
"""What is put into texts."""

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
        kind = self.random.random()
        if kind < 0.5:
            text = self.one("", "", "", "cd sub && ", "cd link && ", "\n", " ") + self.statements()
        elif kind < 0.7:
            text = self.random.choice(LINES)
        elif kind < 0.9:
            text = self.joined(self.random.choice(LINES), self.one(*LINES[::7], self.statements, self.statements))
        else:
            text = "".join(self.random.choices(NASTY, k=self.random.randrange(1, 9)))
            text = self.one("", "alpha ", "cd sub && ", "beta | ", "x=") + text
        for _ in range(self.random.choice((0, 0, 0, 1, 1, 2, 4))):
            text = self.mutate(text)
        return text

    def joined(self, first: str, second: str) -> str:
        """Two texts in one."""
        return self.one(
            lambda: first + self.one(";", "\n", " && ", " | ", "||", " & ", "|& ", " ", "") + second,
            lambda: first[: self.random.randrange(len(first) + 1)] + second[self.random.randrange(len(second) + 1) :],
            lambda: f"({first})",
            lambda: f"{{ {first}; }} > out",
            lambda: f"if {first}; then {second}; fi",
            lambda: f"for v in a b; do {first}; done",
            lambda: f"case a in a) {first};; esac",
            lambda: f'alpha "$({first})" $({second})',
            lambda: f"bash -c {self.quote(first)} {self.words()}",
            lambda: f"cd link && ({first})",
            lambda: f"beta | while read -r v; do {first}; done",
            lambda: f"xargs {first}",
            lambda: f"find sub {first} \\;",
            lambda: f"env {first}",
        )

    def mutate(self, text: str) -> str:
        """Change a character, or move some."""
        at, other = self.random.randrange(len(text) + 1), self.random.randrange(len(text) + 1)
        piece = self.random.choice(NASTY)
        start, end = min(at, other), min(max(at, other), min(at, other) + 12)
        return self.one(
            text[:at] + piece + text[at:],
            text[:at] + text[at + 1 :],
            text[:at] + piece + text[at + 1 :],
            text[:at] + text[start:end] + text[at:],
            text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :],
        )

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
        options, place = self.one("", "-n 1", "-r", "-I{}", "-0", "-Ia", "-I{} -n 1"), self.one("", "{}", "a{}")
        return f"beta | xargs {options} {self.plain()} {place}"

    def find(self) -> str:
        """A ``find`` that runs something."""
        options = self.one("", "", "-type f", "-name x", '-name "$x"', "-newermt x", "-D exec", self.word)
        end = self.one("\\;", "+", "';'")
        return f"find {self.one('sub', 'sub', '.', self.word)} {options} -exec {self.plain()} {{}} {end}"

    def bash(self) -> str:
        """A text for another bash."""
        text = self.quote(self.statements())
        return f"bash {self.one('-c', '-ec', '--norc -c')} {text} {self.one('', 'a', self.words)}"

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
        self.workspace = directory / "around" / "workspace"
        self.stubs = directory / "stubs"
        self.log = directory / "log"
        self.stubs.mkdir()
        for name in (*PROGRAMS, *FURTHER):
            self._stub(self.stubs / name, OUTPUT.get(name, ":"))
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
        around = self.workspace.parent
        shutil.rmtree(around, ignore_errors=True)
        for folder in (around, self.workspace, self.workspace / "sub", self.workspace / "sub" / "deep"):
            folder.mkdir()
            folder.chmod(0o777)
        (self.workspace / "link").symlink_to("sub/deep")
        for name in ("b.txt", "sub/x", "-v", "*lit", "alpha"):
            (self.workspace / name).write_text("")
        for name in ("run", "sub/run", "sub/deep/run"):
            self._stub(self.workspace / name, ":")
        self.clean = self.files()

    def files(self) -> dict[str, tuple[int, int]]:
        """Path → inode and time of last change, of all files in the workspace and beside it."""
        found = {}
        for folder, _, names in os.walk(self.workspace.parent):
            for name in names:
                path = f"{folder}/{name}"
                state = os.lstat(path)
                if stat.S_ISREG(state.st_mode):
                    found[os.path.relpath(path, self.workspace)] = (state.st_ino, state.st_mtime_ns)
        return found

    def run(self, text: str, variables: Mapping[str, str] | None = None) -> tuple[list[list[str]], set[str]]:
        """Run a text; returns how stubs were called (argv behind two marks), and the files that changed."""
        self.prepare()
        before = self.clean or {}
        alive, held = os.pipe()
        process = subprocess.Popen(
            [*BASH, text],
            cwd=self.workspace,
            env={"PATH": str(self.stubs), "HOME": str(self.workspace), "LC_ALL": "C.UTF-8", **(variables or {})},
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
        by_program = command.external or argv[0] not in MATCHED_BUILTINS
        return by_program and matches(command.argv, argv) and set_names <= {*command.env, *analysis.assigned}

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


def beyond(command: SimpleCommand) -> bool:
    """Whether a command runs or writes what is the matter of the rule that allows it: scripts, files of ``find``."""
    if command.name == "find":
        return any(token.value.startswith(("-delete", "-fprint", "-fls")) for token in command.argv)
    return command.name in {"bash", "kill"} or command.name.startswith("/")


def check_texts(place: Place, seed: int, count: int) -> tuple[int, int]:
    """Run ``count`` analysed texts; returns how many texts were made and how many calls were logged."""
    texts = Texts(seed)
    made = logged = 0
    for _ in range(count):
        while True:
            made += 1
            text = texts.text()
            analysis = analyse(text)
            if analysis.analysed and (analysis.commands or analysis.writes) and not any(map(beyond, analysis.commands)):
                break
        calls, written = place.run(text, texts.random.choice((VARIABLES, None)))
        logged += len(calls)
        for call in calls:
            assert foreseen(call, analysis), f"{text!r} ran {call}\nforeseen: {list(map(str, analysis.commands))}"
        expected = {resolved(place.workspace, path) for path in analysis.writes}
        assert written <= expected, f"{text!r} wrote {written}\nforeseen: {expected}"
    return made, logged


def check_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """``check_texts`` for every seed, several at a time; returns how many calls were logged for each."""

    def work(seed: int) -> int:
        with new_place() as place:
            return check_texts(place, seed, count)[1]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, seeds))


@pytest.mark.timeout(300)
def test_what_bash_runs_and_writes_was_foreseen() -> None:
    """1,000 analysed texts: each argv that a stub logs and each file that changes is in the analysis."""
    logged = check_seeds(range(4), 250)

    assert min(logged) > 200


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 120, 4))
def test_what_bash_runs_and_writes_was_foreseen_at_length(seed: int) -> None:
    """The same for 20,000 analysed texts in all."""
    logged = check_seeds(range(seed, seed + 4), 1000)

    assert min(logged) > 800


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
