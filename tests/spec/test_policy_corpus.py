"""Every line of the corpus is decided as it says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.approvals.policy import DEFAULT_RULE, CallFacts, Policy, decide
from runner.config.load import Document, Mark
from runner.config.policy import load_policy
from runner.config.shape import demand
from runner.permission import Mode, Trust

CORPUS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("policy_corpus.yaml").read_text(encoding="utf-8"))
LINES = [
    (name, group, expected, text)
    for name in CORPUS["policies"]
    for group, lines in CORPUS[name].items()
    for expected, text in lines
]


@cache
def corpus_policy(name: str) -> Policy:
    """A policy of the corpus."""
    document = Document(name, CORPUS["policies"][name], {(): Mark(name, 0, 0, "/")})
    demand("policy", document)
    return load_policy(document)


@pytest.mark.parametrize(
    ("policy", "group", "expected", "text"), LINES, ids=[f"{line[0]}: {line[1]}: {line[3]!r}" for line in LINES]
)
def test_each_line_of_the_corpus_is_decided_as_it_says(policy: str, group: str, expected: str, text: str) -> None:
    """The rule named decides; a text that is not analysed says so."""
    decision = decide(
        corpus_policy(policy),
        CallFacts("shell", text),
        workspace="/srv/space",
        mode=Mode.WORKSPACE_WRITE,
        trust=Trust.TRUSTED,
    )
    actual = decision.rule if decision.allowed else f"-{decision.rule}"
    if actual == f"-{DEFAULT_RULE}" and decision.reason.startswith("the command cannot be analysed"):
        actual = "-unanalysed"

    assert actual == expected, f"{group}: {decision.reason}"


def test_the_corpus_is_large_and_says_nothing_twice() -> None:
    """At least 300 lines, each once."""
    texts = [(policy, text) for policy, _, _, text in LINES]

    assert len(texts) >= 300
    assert len(texts) == len(set(texts))
