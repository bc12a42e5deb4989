"""Measure what deciding one call costs: python bench/bench_policy.py.

Prints the median over many rounds, in microseconds, for ordinary commands under a shipped policy: reading the
text into lexemes, the parse, the whole analysis, and the whole decision; and what the first decision costs,
which loads the parser.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runner.approvals.lexer import lex
from runner.approvals.policy import CallFacts, decide
from runner.approvals.shell import analyse
from runner.approvals.tree import Clock, parse
from runner.config.policy import read_policy
from runner.config.shape import shipped_directory
from runner.permission import Mode, Trust

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 400

TEXTS = (
    "ls",
    "pytest -q",
    "python -m pytest -q -p no:cacheprovider tests/test_app.py 2>&1 | tail -n 40",
    "git diff --stat HEAD~1 -- src && git status",
    'for f in src/*.py; do wc -l "$f"; done',
    "cd src && grep -rn 'TODO' . | sort | uniq -c | sort -rn | head -n 20",
    "cat > src/new.py <<'EOF'\n" + 'print("hello world")\n' * 60 + "EOF\npython src/new.py",
    "git push origin HEAD",
    'eval "$x"',
)


def microseconds(work: Callable[[], object]) -> float:
    """The median of ``ROUNDS`` calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def main() -> None:
    """Measure and print."""
    start = time.process_time_ns()
    policy = read_policy(shipped_directory() / "policies" / "refactor.policy.yaml")
    loaded = (time.process_time_ns() - start) / 1e6
    examples = sum(len(each or ()) for rule in policy.value["rules"] for each in (rule.get("examples") or {}).values())
    print(f"loading the policy with its {examples} self-tests, the parser included: {loaded:.1f} ms of CPU")
    print(f"{'lex':>7} {'parse':>7} {'analyse':>8} {'decide':>7}  µs")
    for text in TEXTS:
        facts = CallFacts("shell", text)

        def decision(facts: CallFacts = facts) -> object:
            return decide(policy, facts, workspace="/srv/space", mode=Mode.WORKSPACE_WRITE, trust=Trust.TRUSTED)

        row = (
            microseconds(lambda text=text: lex(text, strict=False)),
            microseconds(lambda text=text: parse(text, Clock())),
            microseconds(lambda text=text: analyse(text)),
            microseconds(decision),
        )
        shown = text if len(text) <= 60 else f"{text[:59]}…"
        print("{:7.0f} {:7.0f} {:8.0f} {:7.0f}  {!r}".format(*row, shown))
    read = CallFacts("read_file", read=("/srv/space/src/app.py",))
    cost = microseconds(
        lambda: decide(policy, read, workspace="/srv/space", mode=Mode.WORKSPACE_WRITE, trust=Trust.TRUSTED)
    )
    print(f"{'':24} {cost:7.0f}  read_file")


if __name__ == "__main__":
    main()
