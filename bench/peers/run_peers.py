"""Compares other agent harnesses with the least Python loop, on the same scripted work. See README.md.

usage: run_peers.py --root DIR [--peers NAMES] [--steps 5,50,200] [--rounds 3] [--extra NAME=COMMAND]... [--out FILE]
       run_peers.py --report FILE
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rig import Place, Settings, floor, measure, table

if TYPE_CHECKING:
    from rig import Command, Runner


def node_program(place: Place, peer: str, name: str) -> str:
    """A program that npm installed in a peer's folder."""
    return str(folder_of(place, peer) / "node_modules" / ".bin" / name)


def folder_of(place: Place, peer: str) -> Path:
    """Where a peer is installed."""
    if place.root is None:
        raise SystemExit("--root or PEERS_ROOT must name the folder with one install a peer")
    return place.root / peer


def write(path: Path, text: str) -> None:
    """Write a settings file into a peer's HOME."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def codex(place: Place) -> Command:
    """Speaks Responses."""
    provider = (
        f'model_providers.mock={{name="mock",base_url="{place.url}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    )
    return [
        node_program(place, "codex", "codex"),
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        *("-c", 'model_provider="mock"', "-c", provider, "-m", "mock"),
        place.prompt,
    ], {}


def claude_code(place: Place) -> Command:
    """Speaks Anthropic Messages; started from its platform package, since install scripts did not run."""
    program = folder_of(place, "claude-code") / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
    path = str(program) if program.exists() else node_program(place, "claude-code", "claude")
    return [path, "-p", place.prompt, "--allowedTools", "Bash", "--model", "claude-sonnet-4-5"], {
        "ANTHROPIC_BASE_URL": place.url,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def qwen_code(place: Place) -> Command:
    """Speaks Chat Completions."""
    program = node_program(place, "qwen-code", "qwen")
    return [program, "--auth-type", "openai", "--yolo", "-p", place.prompt], {
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "OPENAI_MODEL": "mock",
    }


def pi(place: Place) -> Command:
    """Speaks Chat Completions; its model is described in a file."""
    model = {
        "id": "mock",
        "name": "mock",
        "reasoning": False,
        "input": ["text"],
        "contextWindow": 1000000,
        "maxTokens": 32000,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {"baseUrl": f"{place.url}/v1", "api": "openai-completions", "apiKey": "sk-test", "models": [model]}
    write(place.home / ".pi/agent/models.json", json.dumps({"providers": {"mock": provider}}))
    program = node_program(place, "pi-coding-agent", "pi")
    return [program, "-p", "--provider", "mock", "--model", "mock", place.prompt], {}


def opencode(place: Place) -> Command:
    """Speaks Chat Completions; started from its platform package, since install scripts did not run."""
    program = folder_of(place, "opencode-ai") / "node_modules/opencode-linux-x64/bin/opencode"
    path = str(program) if program.exists() else node_program(place, "opencode-ai", "opencode")
    model = {"name": "mock", "limit": {"context": 1000000, "output": 32000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mock",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "sk-test"},
        "models": {"mock": model},
    }
    settings = {"provider": {"mock": provider}, "model": "mock/mock", "permission": "allow", "autoupdate": False}
    write(place.home / ".config/opencode/opencode.json", json.dumps({**settings, "share": "disabled"}))
    return [path, "run", "--model", "mock/mock", place.prompt], {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def mini_swe_agent(place: Place) -> Command:
    """Speaks Chat Completions through litellm, without tools: fenced blocks."""
    program = str(folder_of(place, "mini-swe-agent") / "bin/mini")
    log = str(place.home / "traj.json")
    return [program, "-t", place.prompt, "-y", "--exit-immediately", "-m", "openai/mock", "-o", log], {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "OPENAI_API_BASE": f"{place.url}/v1",
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


INSPECT_TASK = """\
import os

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.tool import bash


@task
def bench():
    return Task(dataset=[Sample(input=os.environ["BENCH_PROMPT"])], solver=react(tools=[bash()]), sandbox="local")
"""


def inspect_ai(place: Place) -> Command:
    """Speaks Chat Completions; its command wants a relative path of a task."""
    write(place.work / "bench_task.py", INSPECT_TASK)
    program = str(folder_of(place, "inspect-ai") / "bin/inspect")
    logs = str(place.home / "logs")
    return [
        program,
        *("eval", "bench_task.py", "--model", "openai-api/mock/mock", "--display", "none", "--log-dir", logs),
    ], {"MOCK_API_KEY": "sk-test", "MOCK_BASE_URL": f"{place.url}/v1", "BENCH_PROMPT": place.prompt}


PEERS: dict[str, Runner] = {
    "floor": floor,
    "mini-swe-agent": mini_swe_agent,
    "inspect-ai": inspect_ai,
    "codex": codex,
    "claude-code": claude_code,
    "qwen-code": qwen_code,
    "opencode": opencode,
    "pi": pi,
}


def extra(text: str) -> tuple[str, Runner]:
    """A runner from ``NAME=COMMAND``."""
    name, _, command = text.partition("=")

    def runner(place: Place) -> Command:
        values = {"url": place.url, "home": str(place.home), "work": str(place.work), "prompt": place.prompt}
        return [word.format(**values) for word in shlex.split(command)], {
            "BASE_URL": place.url,
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "ANTHROPIC_BASE_URL": place.url,
        }

    return name, runner


def main() -> None:
    """Measure, or print the table of earlier results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("PEERS_ROOT"), help="folder with one install a peer")
    parser.add_argument("--peers", default="floor", help="names with commas between: " + ", ".join(PEERS))
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more runner; {url} {home} {work} {prompt} are filled in, and BASE_URL is set",
    )
    parser.add_argument("--steps", default="5,50,200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0, help="ms before each answer")
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--sample-last", action="store_true", help="sample the tree's memory in the last round")
    parser.add_argument("--keep", action="store_true", help="keep every run's folder")
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    parser.add_argument("--report", type=Path, metavar="FILE", help="only print the table of earlier results")
    options = parser.parse_args()
    if options.report:
        print(table(json.loads(options.report.read_text(encoding="utf-8"))))
        return
    runners = {name: PEERS[name] for name in options.peers.split(",") if name}
    runners.update(extra(text) for text in options.extra)
    settings = Settings(
        steps=tuple(map(int, options.steps.split(","))),
        rounds=options.rounds,
        latency=options.latency,
        timeout=options.timeout,
        root=Path(options.root).resolve() if options.root else None,
        sample_last=options.sample_last,
        keep=options.keep,
    )
    print(table(measure(settings, runners, options.out)))


if __name__ == "__main__":
    main()
