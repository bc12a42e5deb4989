"""Builds the provider a profile names, and knows every dialect a log may name."""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.messages import JsonObject
    from runner.providers.base import Dialect, ModelSpec, Provider
    from runner.providers.recording import Recording

PROVIDERS = ("openai", "scripted", "replay")
"""Names that ``model.provider`` may have."""

LOCAL = ("scripted", "replay")
"""Those that call nobody: they need no key and cost nothing."""

KEY_FILE_BYTES = 65_536
"""Longest file that may hold a key."""


def dialects() -> dict[str, Dialect]:
    """Every dialect by the name that stands in ``request/sent``."""
    from runner.providers.openai_chat import COMPATS, ChatDialect
    from runner.providers.scripted import ScriptedDialect

    return {**{name: ChatDialect(name) for name in COMPATS}, ScriptedDialect.name: ScriptedDialect()}


def replay_dialect(recording: Recording) -> Dialect:
    """The dialect of a recording's requests, so that bodies can be compared; of a log that names none, the plainest.

    Raises:
        ConfigError: CONFIG_INVALID, this version does not know it.
    """
    known = dialects()
    name = recording.dialect or "scripted"
    if name not in known:
        raise ConfigError(
            f"{recording.name}: its requests have the dialect {name[:100]!r}, which this version does not know",
            hint=f"known: {', '.join(known)}",
        )
    return known[name]


def load_secrets(spec: ModelSpec, *, environ: Mapping[str, str]) -> dict[str, str]:
    """Secrets of the model's settings by a name that may be shown: the key, and the proxy's password.

    The key is read here, once. Without ``api_key_env`` and ``api_key_file`` there is none, which is right
    for a server of one's own.

    Raises:
        ConfigError: The variable or the file is missing, empty, or holds what is no key; OpenAI's own
            endpoint is meant and no key is named.
    """
    secrets: dict[str, str] = {}
    if spec.provider in LOCAL:
        return secrets
    if spec.api_key_env is not None:
        value = environ.get(spec.api_key_env, "")
        if not value.strip():
            raise ConfigError(
                f"model.api_key_env: the environment variable {spec.api_key_env} is "
                f"{'empty' if spec.api_key_env in environ else 'not set'}",
                hint=f"set {spec.api_key_env} to the API key, or name another variable",
            )
        secrets[spec.api_key_env] = _checked(value, f"model.api_key_env: {spec.api_key_env}")
    elif spec.api_key_file is not None:
        secrets["model.api_key_file"] = _checked(_read(spec.api_key_file), f"model.api_key_file: {spec.api_key_file}")
    elif spec.base_url is None:
        raise ConfigError(
            "model.api_key_env: OpenAI's API needs a key, and no variable or file is named",
            hint="set model.api_key_env, or model.base_url for a server of your own",
        )
    password = _proxy_password(spec.proxy)
    if password is not None:
        secrets["model.proxy"] = password
    return secrets


def preload(spec: ModelSpec) -> threading.Thread | None:
    """Begin to import what the provider needs, in a thread; None where there is nothing to gain.

    The HTTP libraries take 65 ms of CPU, and a run that is being set up waits for git, probes and disks
    meanwhile. Nothing depends on the thread: whoever needs a module first imports it or waits for it.
    """
    if spec.provider != "openai":
        return None
    thread = threading.Thread(target=importlib.import_module, args=("runner.providers.http",), daemon=True)
    thread.start()
    return thread


def build_provider(
    spec: ModelSpec,
    *,
    environ: Mapping[str, str],
    script: Sequence[JsonObject] | None = None,
    recording: Recording | None = None,
    secrets: Mapping[str, str] | None = None,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    now: Callable[[], float] = time.time,
) -> Provider:
    """The provider ``spec`` names.

    Args:
        spec: The model's settings.
        environ: Variables of the run; read for the key, ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` only.
        script: The parsed responses of ``spec.script``, for ``scripted``.
        recording: What ``spec.replay`` holds, for ``replay``.
        secrets: What ``load_secrets`` returned, so that the key is not read twice.
        new_id: A random part for ids of calls that came without one.
        now: Seconds since the epoch.

    Raises:
        ConfigError: An unknown provider, a missing key, an unusable address, no script.
    """
    if spec.provider == "scripted":
        from runner.providers.scripted import ScriptedProvider

        if script is None:
            raise ConfigError("model.script: the provider scripted needs a script", hint="set model.script to a file")
        return ScriptedProvider(script, source=spec.script or "the script", idle=spec.idle)
    if spec.provider == "replay":
        from runner.providers.replay import ReplayProvider

        if recording is None:
            raise ConfigError("model.replay: the provider replay needs a session", hint="set model.replay to one")
        return ReplayProvider(recording, dialect=replay_dialect(recording))
    if spec.provider == "openai":
        from runner.providers.openai_chat import OpenAIChatProvider

        preload(spec)
        if secrets is None:
            secrets = load_secrets(spec, environ=environ)
        return OpenAIChatProvider(
            spec,
            api_key=secrets.get(spec.api_key_env or "model.api_key_file"),
            new_id=new_id,
            now=now,
            authorities=environ.get("SSL_CERT_FILE") or environ.get("SSL_CERT_DIR"),
        )
    raise ConfigError(f"model.provider: there is no provider {spec.provider}", hint=f"one of {', '.join(PROVIDERS)}")


def skip_answered(provider: Provider, answered: int) -> None:
    """Tell a provider that plays given answers how many an earlier part of the session used."""
    from runner.providers.replay import ReplayProvider
    from runner.providers.scripted import ScriptedProvider

    if isinstance(provider, (ReplayProvider, ScriptedProvider)):
        provider.skip(answered)


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"model.api_key_file: cannot read {path}: {error.strerror}", hint="name a file that holds the key alone"
        ) from error
    if len(raw) > KEY_FILE_BYTES:
        raise ConfigError(f"model.api_key_file: {path} is no key: it is too long", hint="the file holds the key alone")
    return raw.decode("utf-8", "replace")


def _checked(value: str, where: str) -> str:
    """The key without the line end that files have; its characters must fit in a header. Never shown."""
    key = value.strip()
    if not key:
        raise ConfigError(f"{where} is empty", hint="it must hold the API key")
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError(f"{where} holds characters that no key has", hint="it must hold the API key alone")
    return key


def _proxy_password(proxy: str | None) -> str | None:
    if proxy is None:
        return None
    from urllib.parse import unquote, urlsplit

    try:
        password = urlsplit(proxy).password
    except ValueError:
        return None  # the address is refused when the client is built
    return unquote(password) if password else None
