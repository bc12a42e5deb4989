"""The image on a real engine: how it is built, what it runs as, and that the sandbox holds inside it.

The base is a Debian made with debootstrap and kept in ``build/docker``, since a test must not depend on
a registry of images. A missing engine fails these tests; it does not skip them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
PACKAGES = "bubblewrap,git,python3,python3-venv"  # bubblewrap, to see that it is tried and found not to work
UNUSED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "dev")

DEMO = "python -c 'import runner, pathlib; print(pathlib.Path(runner.__file__).parent / \"configs/demo/run.py\")'"


def run_command(*command: str | Path) -> None:
    """Run a command of the preparation; its output is shown when it fails."""
    result = subprocess.run(
        command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


@dataclass(frozen=True)
class Container:
    """A container that has ended."""

    exit_code: int
    output: str


@dataclass(frozen=True)
class Built:
    """The image under test and the engine it is on."""

    client: docker.DockerClient
    image: str

    def run(self, arguments: Sequence[str], **options: Any) -> Container:
        """Run a container without a network to its end; the output is stdout and stderr as they came."""
        container = self.client.containers.run(self.image, list(arguments), detach=True, network_mode="none", **options)
        try:
            exit_code = container.wait(timeout=300)["StatusCode"]
            return Container(exit_code, container.logs().decode())
        finally:
            container.remove(force=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    """A client of the engine that answers here."""
    answer = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.fail(f"no Docker engine answers here: {answer.stderr.strip()}", pytrace=False)
    client = docker.from_env(timeout=300)
    yield client
    client.close()


@pytest.fixture(scope="module")
def base_image(engine: docker.DockerClient) -> str:
    """A minimal Debian with Python and git, made with debootstrap once and kept as an archive."""
    key = hashlib.sha256(f"{SUITE} {PACKAGES} {UNUSED}".encode()).hexdigest()[:12]
    archive = REPOSITORY / "build" / "docker" / f"base-{key}.tar"
    if not archive.exists():
        tree = archive.with_suffix(".tree")
        shutil.rmtree(tree, ignore_errors=True)
        tree.parent.mkdir(parents=True, exist_ok=True)
        as_root = [] if os.getuid() == 0 else ["sudo", "-n"]
        run_command(*as_root, "debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, tree)
        left_out = [f"--exclude=./{path}/*" for path in UNUSED]
        partial = archive.with_suffix(".partial")
        run_command(*as_root, "tar", "-cf", partial, *left_out, "-C", tree, ".")
        run_command(*as_root, "rm", "-rf", tree)
        partial.rename(archive)
    tag = f"nightshift-test-base:{key}"
    if not engine.images.list(name=tag):
        run_command("docker", "import", archive, tag)
    return tag


@pytest.fixture(scope="module")
def built(engine: docker.DockerClient, base_image: str) -> Iterator[Built]:
    """The image, built with the same command that users have."""
    tag = f"nightshift-test:{os.getpid()}"
    printed = engine.containers.run(base_image, ["python3", "-c", PYTHON_VERSION], remove=True, network_mode="none")
    version = printed.decode().strip()
    venv = Path(sys.executable).parents[1]
    run_command("make", "image", f"BASE={base_image}", f"IMAGE_PYTHON={version}", f"IMAGE={tag}", f"VENV={venv}")
    yield Built(engine, tag)
    engine.images.remove(tag, force=True)


PYTHON_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def test_the_image_runs_nightshift_as_a_user_without_rights(built: Built) -> None:
    """The entry point is the command, and the user is not root."""
    assert built.client.images.get(built.image).attrs["Config"]["User"] == "nightshift"
    assert built.run(["--version"]).output.startswith("nightshift")
    assert built.run(["-u"], entrypoint="id").output.strip() == "10001"


def test_the_image_holds_no_wheels_and_no_sources(built: Built) -> None:
    """What the installation needed is not left in the image."""
    found = built.run(
        ["/", "-xdev", "-name", "*.whl", "-not", "-path", "*/ensurepip/*"], entrypoint="find", user="root"
    )

    assert [line for line in found.output.splitlines() if "/usr/share/python-wheels/" not in line] == []


RESTRICTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without capabilities": {"cap_drop": ["ALL"]},
    "as uid 1000": {"user": "1000:1000", "environment": {"HOME": "/tmp"}},
    "as root": {"user": "root"},
    "as root without capabilities": {"user": "root", "cap_drop": ["ALL"]},
    "with a read-only root": {"environment": {"HOME": "/tmp"}, "read_only": True, "tmpfs": {"/tmp": ""}},
    "with all of it": {
        "user": "1000:1000",
        "environment": {"HOME": "/tmp"},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "tmpfs": {"/tmp": ""},
        "pids_limit": 200,
        "mem_limit": "1g",
    },
}
"""What may be asked of a container, as options of ``Built.run``. None has a network, all have the default filter."""


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A writable folder for any user, mounted at ``/volume``, as an option of ``Built.run``."""
    folder = tmp_path / "work"
    folder.mkdir()
    folder.chmod(0o777)
    yield {"volumes": {str(folder): {"bind": "/volume", "mode": "rw"}}}
    if os.getuid() != 0:
        run_command("sudo", "-n", "rm", "-rf", folder)


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_in_any_container_landlock_is_chosen(built: Built, name: str) -> None:
    """A container forbids new namespaces: doctor says so, names the way out, and chooses Landlock."""
    doctor = built.run(["doctor", "--json"], **RESTRICTIONS[name])

    assert doctor.exit_code == 0, doctor.output
    found = json.loads(doctor.output)
    bubblewrap, landlock = found["backends"]
    assert (bubblewrap["ok"], landlock["ok"], found["chosen"]) == (False, True, "landlock")
    assert "landlock" in bubblewrap["fix"]
    assert found["container"] == "docker"


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_the_demo_passes_in_any_container(built: Built, name: str, volume: dict[str, Any]) -> None:
    """The whole task runs in a container without a network, under Landlock, and its check passes."""
    script = f'exec python "$({DEMO})" quick /volume/demo'
    demo = built.run(["-c", script], entrypoint="sh", **RESTRICTIONS[name], **volume)

    assert demo.exit_code == 0, demo.output
    report = dict(
        line.split(maxsplit=1) for line in demo.output.splitlines() if line.startswith(("outcome", "sandbox"))
    )
    assert report["outcome"].startswith("COMPLETED, exit code 0")
    assert report["sandbox"] == "landlock, workspace-write"


ASKED = """
import json, os, pathlib, subprocess, sys
from runner.testing.model_server import ModelServer, chat_reply

mode = sys.argv[1]
volume = pathlib.Path("/volume")
(volume / "repository" / "src").mkdir(parents=True)
rules = [{"id": "all", "tool": "*", "command": "any", "decision": "allow"}]
call = chat_reply(calls=[("c1", "write_file", json.dumps({"path": "src/new", "content": "x"}))])
with ModelServer([call, chat_reply("Done.")]) as server:
    model = {"provider": "openai", "model": "m", "base_url": server.url, "api_key_env": "A_KEY"}
    for name, content in {
        "policy": {"version": 1, "default": "deny", "rules": rules},
        "profile": {
            "version": 1,
            "model": {**model, "context_window": 100_000},
            "permission_mode": mode,
            "approvals": "t.policy.yaml",
        },
        "task": {"version": 1, "name": "t", "prompt": "Write.", "profile": "t.profile.yaml"},
    }.items():
        (volume / f"t.{name}.yaml").write_text(json.dumps(content))
    places = ["--workspace", volume / "repository", "--artifacts", volume / "artifacts"]
    done = subprocess.run(
        ["nightshift", "run", volume / "t.task.yaml", *places],
        env={**os.environ, "A_KEY": "sk-some-key-1"},
        capture_output=True,
        text=True,
    )
    requests = len(server.requests)
files = sorted(path.name for path in (volume / "repository").rglob("*") if path.is_file())
print(json.dumps({"exit": done.returncode, "requests": requests, "files": files, "stderr": done.stderr}))
"""


def ask(built: Built, mode: str, disabled: str, volume: dict[str, Any]) -> dict[str, Any]:
    """What a run with a model server of its own comes to in a container where some backends are switched off."""
    options = {"environment": {"NIGHTSHIFT_DISABLE_BACKENDS": disabled}}
    ended = built.run(["-c", ASKED, mode], entrypoint="python", **options, **volume)
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    return found


@pytest.mark.parametrize("mode", ["read-only", "workspace-write"])
def test_without_a_backend_a_container_makes_no_request_and_writes_nothing(
    built: Built, mode: str, volume: dict[str, Any]
) -> None:
    """Code 3, whatever the mode."""
    found = ask(built, mode, "bubblewrap,landlock", volume)

    assert (found["exit"], found["requests"], found["files"]) == (3, 0, []), found["stderr"]
    assert found["stderr"].count("switched off") == 2


def test_with_one_the_same_run_asks_and_writes(built: Built, volume: dict[str, Any]) -> None:
    """The positive twin."""
    found = ask(built, "workspace-write", "bubblewrap", volume)

    assert (found["exit"], found["requests"], found["files"]) == (0, 2, ["new"]), found["stderr"]
