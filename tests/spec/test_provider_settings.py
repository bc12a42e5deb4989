"""From a model's settings to a provider: keys, addresses, scripts, and every mistake in them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ConfigError
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import COMPATS
from runner.providers.registry import build_provider, dialects, load_secrets
from runner.testing.model_server import ModelServer, chat_reply

if TYPE_CHECKING:
    from pathlib import Path


def spec(**settings: Any) -> ModelSpec:
    """Settings of a model behind a server of one's own."""
    return ModelSpec("openai", "m", **{"base_url": "http://127.0.0.1:9/v1", **settings})


def sent_key(environ: dict[str, str], **settings: Any) -> str | None:
    """The authorization header of a request."""
    with ModelServer([chat_reply("Hi")]) as server:
        provider = build_provider(spec(**{"base_url": server.url, **settings}), environ=environ)
        list(provider.stream(b"{}", cancellation=Cancellation()))
        provider.close()
    return server.requests[0].headers.get("authorization")


def refused(environ: dict[str, str], **settings: Any) -> ConfigError:
    """The mistake in the settings."""
    with pytest.raises(ConfigError) as caught:
        load_secrets(spec(**settings), environ=environ)
    return caught.value


def test_the_key_comes_from_the_named_variable_and_is_reported_as_a_secret() -> None:
    """Under the variable's name."""
    assert sent_key({"MY_KEY": "sk-value-1"}, api_key_env="MY_KEY") == "Bearer sk-value-1"
    assert load_secrets(spec(api_key_env="MY_KEY"), environ={"MY_KEY": "sk-value-1"}) == {"MY_KEY": "sk-value-1"}


def test_the_key_comes_from_a_file_without_its_line_end(tmp_path: Path) -> None:
    """As secret stores write it."""
    path = tmp_path / "key"
    path.write_text("sk-from-file\n")

    assert sent_key({}, api_key_file=str(path)) == "Bearer sk-from-file"
    assert load_secrets(spec(api_key_file=str(path)), environ={}) == {"model.api_key_file": "sk-from-file"}


def test_without_a_variable_and_a_file_there_is_no_key() -> None:
    """Whatever the environment holds."""
    assert sent_key({"OPENAI_API_KEY": "sk-not-asked-for"}) is None


def test_secrets_that_were_read_are_not_read_again() -> None:
    """The variable may be gone by then."""
    with ModelServer([chat_reply("Hi")]) as server:
        settings = spec(base_url=server.url, api_key_env="MY_KEY")
        secrets = load_secrets(settings, environ={"MY_KEY": "sk-value-1"})
        provider = build_provider(settings, environ={}, secrets=secrets)
        list(provider.stream(b"{}", cancellation=Cancellation()))
        provider.close()

    assert server.requests[0].headers["authorization"] == "Bearer sk-value-1"


def test_the_password_of_a_proxy_is_a_secret_too() -> None:
    """Decoded, as programs would print it."""
    assert load_secrets(spec(proxy="http://user:pass%21word@127.0.0.1:1"), environ={}) == {"model.proxy": "pass!word"}


@pytest.mark.parametrize(("environ", "word"), [({}, "not set"), ({"MY_KEY": " \n"}, "empty")])
def test_a_missing_or_empty_variable_is_said_with_its_name(environ: dict[str, str], word: str) -> None:
    """Before anything is sent."""
    found = refused(environ, api_key_env="MY_KEY")

    assert "MY_KEY" in found.message
    assert word in found.message


def test_a_key_with_characters_that_fit_in_no_header_is_refused_and_not_shown(tmp_path: Path) -> None:
    """A line end would let a key write headers of its own."""
    path = tmp_path / "key"
    path.write_bytes(b"\xff\xfe binary")
    for found in (
        refused({"MY_KEY": "sk-one\r\nx-evil: 1"}, api_key_env="MY_KEY"),
        refused({"MY_KEY": "sk-größe"}, api_key_env="MY_KEY"),
        refused({}, api_key_file=str(path)),
    ):
        assert "characters that no key has" in found.message
        assert "sk-" not in found.message


def test_a_key_file_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, empty, or far too long."""
    empty, long = tmp_path / "empty", tmp_path / "long"
    empty.touch()
    long.write_text("x" * 100_000)

    assert "No such file" in refused({}, api_key_file=str(tmp_path / "none")).message
    assert "directory" in refused({}, api_key_file=str(tmp_path)).message
    assert "is empty" in refused({}, api_key_file=str(empty)).message
    assert "too long" in refused({}, api_key_file=str(long)).message


def test_openais_own_endpoint_without_a_key_is_a_mistake() -> None:
    """A server of one's own needs none; OpenAI always does."""
    assert "model.api_key_env" in refused({}, base_url=None).message


def test_an_unknown_provider_and_a_missing_script_are_mistakes() -> None:
    """The hint lists what there is."""
    with pytest.raises(ConfigError, match="no provider gemini") as caught:
        build_provider(ModelSpec("gemini", "m"), environ={})
    assert caught.value.hint == "one of openai, scripted, replay"
    with pytest.raises(ConfigError, match=r"model\.script"):
        build_provider(ModelSpec("scripted", "m"), environ={})
    with pytest.raises(ConfigError, match=r"model\.replay"):
        build_provider(ModelSpec("replay", "m"), environ={})


def test_the_scripted_provider_needs_no_key_and_plays_the_script_it_is_given() -> None:
    """Whatever else the settings say."""
    settings = ModelSpec("scripted", "m", api_key_env="NOT_SET", script="a.script.yaml")
    provider = build_provider(settings, environ={}, script=[{"text": "Hi", "usage": {"input": 1, "output": 1}}])
    body = b'{"config":{},"tools":[],"messages":[{"role":"system","content":""}]}'

    assert load_secrets(settings, environ={}) == {}
    assert list(provider.stream(body, cancellation=Cancellation()))[-1]["type"] == "finish"


def test_every_dialect_is_known_by_the_name_it_writes_into_the_log() -> None:
    """Old requests can be written again."""
    assert {name: dialect.name for name, dialect in dialects().items()} == {
        name: name for name in (*COMPATS, "scripted")
    }


def loaded_after(code: str, *modules: str) -> list[str]:
    """Which of ``modules`` are loaded in a fresh interpreter after ``code``."""
    report = f"import sys\n{code}\nprint(*(name for name in {modules!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_httpx_is_loaded_only_for_a_provider_that_talks_to_a_server() -> None:
    """Dialects, scripts and secrets do without it."""
    code = """
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import COMPATS
from runner.providers.registry import build_provider, dialects, load_secrets
dialects()
build_provider(ModelSpec("scripted", "m"), environ={}, script=[])
load_secrets(ModelSpec("openai", "m", base_url="http://127.0.0.1:9"), environ={})
"""
    assert loaded_after(code, "httpx", "httpcore", "ssl") == []


def test_what_a_provider_needs_can_be_loaded_beside_other_work() -> None:
    """A script needs nothing."""
    code = """
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import COMPATS
from runner.providers.registry import preload
assert preload(ModelSpec("scripted", "m")) is None
preload(ModelSpec("openai", "m")).join()
"""
    assert loaded_after(code, "httpx") == ["httpx"]


def test_httpx_does_not_load_its_own_command_line() -> None:
    """It costs more than the rest of httpx; and httpx stays usable for others."""
    code = "import runner.providers.http, httpx; httpx.Client; assert 'httpx._main' not in sys.modules"

    assert loaded_after(code, "httpx", "rich", "pygments") == ["httpx"]
