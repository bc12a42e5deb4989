"""Signals become a cancellation; the second one ends the process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys, time
from runner.cancellation import Cancellation
from runner.signals import CancelOnSignal
{before}
cancellation = Cancellation()
with CancelOnSignal(cancellation, say=lambda text: print(text, file=sys.stderr, flush=True)):
    for name in {names}:
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.2)
print(cancellation.reason)
{after}
"""

FULL = """
read, write = os.pipe2(os.O_NONBLOCK)
try:
    while True:
        os.write(write, bytes(4096))
except BlockingIOError:
    os.set_blocking(write, True)
os.dup2(write, 2)
"""


def run(*names: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Send signals to a process that turns them into a cancellation."""
    program = PROGRAM.format(names=names, before=before, after=after)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


def test_the_first_signal_cancels() -> None:
    """By its name, and the process goes on."""
    done = run("SIGTERM")

    assert (done.returncode, done.stdout, done.stderr) == (0, "SIGTERM\n", "")


def test_a_second_signal_before_there_is_a_log_says_so() -> None:
    """The exit code is that of the second one."""
    done = run("SIGTERM", "SIGINT")

    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "ended at once by a second signal, SIGINT: no result was written\n"


def test_a_second_signal_ends_the_process_though_nothing_can_be_said() -> None:
    """Stderr is a pipe that is full and that nobody reads."""
    done = run("SIGTERM", "SIGTERM", before=FULL)

    assert (done.returncode, done.stdout) == (143, "")


def test_signals_are_ignored_behind_the_run() -> None:
    """Its exit code stands."""
    done = run(after="os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGINT); print('still here')")

    assert (done.returncode, done.stdout, done.stderr) == (0, "None\nstill here\n", "")


def test_a_hangup_that_was_ignored_from_the_start_stays_ignored() -> None:
    """That is what `nohup` asks for."""
    done = run("SIGHUP", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")

    assert (done.returncode, done.stdout) == (0, "None\n")
