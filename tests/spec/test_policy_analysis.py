"""The analysis of shell texts: what it finds, its bounds, and that it never fails."""

from __future__ import annotations

import random
import threading
import time

import pytest

from runner.approvals import tree
from runner.approvals.lexer import MAX_BYTES
from runner.approvals.shell import Analysis, analyse


def found(text: str) -> list[str]:
    """The commands of a text that is analysed."""
    analysis = analyse(text)
    assert analysis.analysed, analysis.reason
    return [str(command) for command in analysis.commands]


def test_commands_are_found_in_the_order_of_the_text() -> None:
    """Those of substitutions come before the command they are for."""
    assert found("a $(b | c) && { d; } || e") == ["b", "c", "a …", "d", "e"]


def test_words_are_what_bash_makes_of_them() -> None:
    """Quotes are removed; of an expansion only its literal start is known."""
    (command,) = analyse("""'a b' "c\\$d"e $'f' g\\*h i"$x"j {k} l{m,n} *o ~p q~ "" r#s [t t=u""").commands

    assert [token.value for token in command.argv if not token.expansion] == [
        "a b", "c$de", "f", "g*h", "{k}", "q~", "", "r#s", "t=u",
    ]  # fmt: skip
    assert [(token.value, token.variable, token.single) for token in command.argv if token.expansion] == [
        ("i", False, True),
        ("l", False, False),
        ("", False, False),
        ("", False, True),
        ("", False, False),
    ]


def test_what_may_become_several_words_says_so() -> None:
    """``"$@"`` does although it stands in quotes, ``$!`` may become nothing; ``"$*"``, ``$?``, ``$#`` stay one word."""
    (command,) = analyse("""a "$@" b"$@" "$*" $! $? $# "$!" x$y""").commands

    assert [(token.value, token.variable, token.single) for token in command.argv[1:]] == [
        ("", True, False),
        ("b", True, False),
        ("", False, True),
        ("", True, False),
        ("", True, True),
        ("", True, True),
        ("", False, True),
        ("x", True, False),
    ]


def test_a_directory_is_followed_as_far_as_its_name_says_where_it_leads() -> None:
    """Behind ``cd LINK`` bash takes ``..`` back by name, the kernel by where the link leads."""
    assert analyse("cd a && (cd b && x > c)").writes == ("a/b/c",)
    assert analyse("cd ../a && (cd b && x > c)").writes == ("../a/b/c",)
    for text in ("cd a && (cd .. && x > c)", "cd a && bash -c 'cd ../b && x > c'", "cd a/.. && x > c"):
        assert not analyse(text).analysed


def test_words_keep_what_is_not_ascii() -> None:
    """Offsets are bytes, words are text."""
    analysis = analyse('echo "größe €" > größe/ß; echo ü$x')

    assert [token.value for token in analysis.commands[0].argv] == ["echo", "größe €"]
    assert analysis.commands[1].argv[1].value == "ü"
    assert analysis.writes == ("größe/ß",)


def test_redirections_are_found_with_their_directory() -> None:
    """Relative to the workspace; behind the chain of a leading ``cd`` both directories are possible."""
    analysis = analyse("cd a && b > c < /d; e >> f 2>&1 >/dev/null")

    assert analysis.writes == ("a/c", "a/f", "f")
    assert analysis.reads == ("/d",)


def test_what_a_text_assigns_is_found() -> None:
    """Names that need a word of every rule, and those of one command."""
    analysis = analyse("A=1; x=2; for B in c; do D=1 e; read -r F; done; env G=1 h")

    assert analysis.assigned == ("A", "B", "F")
    assert [(str(command), command.env) for command in analysis.commands] == [
        ("e", ("D",)),
        ("read -r F", ()),
        ("h", ("G",)),
    ]


def test_a_text_that_is_not_analysed_says_why() -> None:
    """The reason is for the model, which can write it in another way."""
    analysis = analyse("ls; eval x")

    assert (analysis.analysed, analysis.reason) == (False, "`eval` is not analysed")
    assert "ls" in [str(command) for command in analysis.commands]


def test_texts_have_a_largest_size() -> None:
    """16 KiB of UTF-8."""
    fits = "echo " + "a" * (MAX_BYTES - 5)

    assert analyse(fits).analysed
    assert analyse(fits + "a").reason == "it is longer than 16 KiB"
    assert not analyse("echo " + "ä" * (MAX_BYTES // 2)).analysed
    assert analyse("echo " + "ä" * (MAX_BYTES // 2 - 3)).analysed


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("( ", " )"), ("echo $(", ")"), ("{ ", "; }"), ("if true; then ", "; fi"), ("for x in a; do ", "; done")],
)
def test_texts_have_a_largest_depth(opening: str, closing: str) -> None:
    """50, of whatever kind."""
    assert analyse(opening * 20 + "ls" + closing * 20).analysed
    assert not analyse(opening * 60 + "ls" + closing * 60).analysed


def test_wrappers_have_a_largest_depth() -> None:
    """So that long chains of them end."""
    assert analyse("env " * 20 + "ls").analysed
    assert not analyse("env " * 200 + "ls").analysed
    text = "ls"
    for _ in range(4):
        text = "bash -c '" + text.replace("'", "'\\''") + "'"
    assert found(text) == ["ls"]


def test_long_lists_are_no_depth() -> None:
    """A chain of many commands is as flat as it looks."""
    assert len(found(" && ".join(["ls"] * 300))) == 300


@pytest.mark.parametrize(
    "piece",
    ["${", "((", "a `", "case x in ", "<<A ", '"$(', "if ", "[[ ", "(", "a|", "x=(", "${x:", "$((", "'", "\\", "{", ")",
     "a;", "<<A\n", "a &&", "\n", "$(", "`", "=(", "a=b ", "[", "!", "é", "$'", '$"', "&", ";;", "*", "~", "#\n"],
)  # fmt: skip
def test_no_text_takes_long(piece: str) -> None:
    """Error recovery of the parser is quadratic; the analysis is stopped in time."""
    text = (piece * (MAX_BYTES // len(piece.encode())))[: MAX_BYTES // 2]
    analyse("ls")
    start = time.thread_time()

    analyse(text)

    assert time.thread_time() - start < 2


@pytest.mark.parametrize(
    "text",
    [
        "env " * 49 + "sh -c '" + "a;" * 30_000 + "'",
        "env " + "eval " * 49 + "a;" * 30_000,
        "eval " * 2_000,
        "sh -c '" * 3_000,
        "$(" * 30_000,
        "a" * 5_000_000,
        "(" * 30_000 + ")" * 30_000,
        "x=${x:-" * 9_000,
    ],
    ids=lambda text: text[:12],
)
def test_the_search_for_denies_ends(text: str) -> None:
    """However long and nested a text is."""
    start = time.thread_time()

    assert not analyse(text).analysed

    assert time.thread_time() - start < 10


def test_the_time_limit_ends_an_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes too long is not analysed, wherever the time went."""
    monkeypatch.setattr(tree, "SECONDS", -1.0)

    assert not analyse(" && ".join(["ls -l"] * 200)).analysed


def test_the_analysis_never_raises() -> None:
    """Random characters, all of Unicode among them, and lone surrogates."""
    source = random.Random(1)
    alphabet = "ab -=;&|()<>{}[]$`'\"\\\n\t#!*?~0123é\u200b\x00\r\udc80\U0001f600" + "$(`'\"" * 3

    for _ in range(3_000):
        text = "".join(source.choices(alphabet, k=source.randrange(40)))
        analysis = analyse(text)
        assert isinstance(analysis, Analysis)
        assert analysis.analysed or analysis.reason


def test_texts_are_analysed_in_several_threads_at_once() -> None:
    """Nothing is shared between analyses."""
    results: list[bool] = []

    def work(number: int) -> None:
        results.extend(found(f"a{number} $(b{at})") == [f"b{at}", f"a{number} …"] for at in range(100))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [True] * 400
