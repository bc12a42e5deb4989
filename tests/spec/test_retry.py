"""How often a failed model request is tried again, after which waits, and what is said in the end."""

from __future__ import annotations

import pytest

from runner.agent.hook import RequestEnded
from runner.agent.settings import RetrySpec
from runner.errors import ErrorCode, ProviderError
from runner.hooks.retry import RetryHook


def asked(
    error: ProviderError, *, attempt: int = 1, waited: float = 0.0, spec: RetrySpec | None = None
) -> float | None:
    """What the hook answers, without jitter."""
    return RetryHook(spec or RetrySpec(), random=lambda: 0.0).on_response(RequestEnded(error, attempt, waited))


def passing(retry_after: float | None = None, hint: str | None = None) -> ProviderError:
    """A failure that may pass."""
    return ProviderError("overloaded", retryable=True, retry_after=retry_after, hint=hint)


def test_waits_double_up_to_a_cap() -> None:
    """0.5 s to 8 s, less up to a quarter."""
    spec = RetrySpec(attempts=20)

    assert [asked(passing(), attempt=n, spec=spec) for n in range(1, 8)] == [0.5, 1, 2, 4, 8, 8, 8]
    assert RetryHook(spec, random=lambda: 1.0).on_response(RequestEnded(passing(), 1, 0)) == 0.375


def test_a_wait_that_the_server_asks_for_is_kept() -> None:
    """Without jitter; nonsense below zero is none."""
    assert asked(passing(7.0)) == 7.0
    assert asked(passing(-1.0)) == 0.0


@pytest.mark.parametrize(
    ("attempt", "waited", "retry_after", "said"),
    [
        (5, 12.3, None, "overloaded (given up after 5 attempts in 12 s)"),
        (5, 0.2, 9000.0, "overloaded (given up after 5 attempts in 0 s)"),
        (1, 0.2, 3600.0, "overloaded (given up after 1 attempt, since the server asks to wait 3,600 s, more than 120)"),
        (2, 299.9, None, "overloaded (given up after 2 attempts in 300 s, since retry.seconds is 300)"),
        (2, 200.0, 110.0, "overloaded (given up after 2 attempts in 200 s, since retry.seconds is 300)"),
    ],
)
def test_a_failure_that_could_have_passed_says_how_often_it_was_tried(
    attempt: int, waited: float, retry_after: float | None, said: str
) -> None:
    """And what ended that, where it was not the number of attempts."""
    error = passing(retry_after)

    assert asked(error, attempt=attempt, waited=waited) is None
    assert error.message == said
    assert error.hint == "run it again later, or raise retry.attempts and retry.seconds"


def test_one_attempt_is_one() -> None:
    """A profile that wants no retries."""
    error = passing(hint="is the server running?")

    assert asked(error, spec=RetrySpec(attempts=1)) is None
    assert error.message == "overloaded (given up after 1 attempt)"
    assert error.hint == "is the server running?"


def test_a_failure_that_will_not_pass_stands_as_it_is() -> None:
    """Nothing was given up."""
    error = ProviderError("bad key", code=ErrorCode.PROVIDER_AUTH)

    assert asked(error) is None
    assert (error.message, error.hint) == ("bad key", None)
