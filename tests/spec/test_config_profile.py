"""A profile is merged from its files; ``--set`` and tasks change only what they may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runner.config.resolve import DEFAULT_PROFILE, load_run
from runner.errors import ConfigError
from runner.permission import Mode

if TYPE_CHECKING:
    from pathlib import Path

    from runner.config.spec import RunSpec

BASE = """\
version: 1
model: {provider: openai, model: gpt-5-mini, base_url: http://127.0.0.1:1/v1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an empty workspace."""
    (tmp_path / "ws").mkdir()
    return tmp_path


def load(folder: Path, profile: str | None = None, *, task: str = "", **options: Any) -> RunSpec:
    """Load a task with ``profile`` as its profile file."""
    (folder / "t.task.yaml").write_text(f"version: 1\nprompt: x\n{task}")
    if profile is not None:
        (folder / "p.profile.yaml").write_text(profile)
    arguments: dict[str, Any] = {
        "task": folder / "t.task.yaml",
        "prompt": None,
        "profile": None if profile is None else "./p.profile.yaml",
        "workspace": str(folder / "ws"),
        "environ": {},
        "cwd": folder,
    }
    return load_run(**{**arguments, **options})


def refused(folder: Path, profile: str | None = None, **options: Any) -> ConfigError:
    """The error that a profile is refused with."""
    with pytest.raises(ConfigError) as caught:
        load(folder, profile, **options)
    return caught.value


def test_a_profile_takes_the_documented_defaults(folder: Path) -> None:
    """The smallest profile that says which model."""
    profile = load(folder, BASE).profile

    assert profile.mode is Mode.READ_ONLY
    assert (profile.limits.steps, profile.limits.turns, profile.limits.wall, profile.limits.idle) == (200, 8, 1800, 120)
    assert (profile.limits.tool, profile.limits.output_bytes) == (600, 100_000_000)
    assert (profile.limits.cost, profile.limits.tokens) == (None, None)
    assert (profile.retry.attempts, profile.retry.seconds) == (5, 300)
    assert (profile.compaction.spill_bytes, profile.compaction.summary_at, profile.compaction.keep) == (
        50_000,
        0.8,
        0.16,
    )
    assert (profile.sandbox.backend, profile.sandbox.network, profile.sandbox.unix_sockets) == ("auto", False, False)
    assert (profile.sandbox.limits.memory, profile.sandbox.limits.processes) == (4_000_000_000, 512)
    assert profile.tools.allow is None
    assert profile.tools.parallel == 10
    assert profile.on_denied == "continue"
    assert profile.accept_unconfined is False
    assert profile.model.idle == 120


def test_everything_a_profile_may_say_is_taken(folder: Path) -> None:
    """All keys of the format at once."""
    (folder / "cache").mkdir()
    profile = load(
        folder,
        """\
version: 1
model:
  {provider: openai, model: m, base_url: "http://127.0.0.1:1/v1", api_key_env: KEY, context_window: 1M,
   max_output_tokens: 16k, temperature: 0, tool_choice: auto, proxy: "http://u:p@127.0.0.1:2", first_token: 90s,
   prices: {input: 1, cache_read: 0.1, cache_write: 1.25, output: 4, currency: EUR}}
permission_mode: workspace-write
accept_unconfined: true
sandbox:
  backend: landlock
  require: [git_protect, pid_isolation]
  network: on
  unix_sockets: on
  writable: [cache]
  hidden: [~/.secret, secret]
  env: {allow: [LANG], set: {A: b}}
  limits: {memory: 2G, processes: 64, file_size: 100m}
  unprotected_git: true
  keep_dac: true
tools: {allow: [shell, read_file], deny: [shell], parallel: 2}
approvals: {version: 1, default: deny, rules: []}
on_denied: abort
compaction: {spill_bytes: 60k, keep: 0.1, min_output: 1000, models: {gpt-4.1: {summary_at: 0.7}}}
limits: {steps: 9, turns: 3, wall: 2h, idle: 250ms, tool: 90, cost: 2, tokens: 5M, output_bytes: 1g}
retry: {attempts: 1, seconds: 0}
artifacts: {visibility: private}
overridable: [model, limits.steps]
""",
        environ={"KEY": "k", "HOME": "/home/user"},
    ).profile

    assert profile.name == "p"
    assert (profile.model.context_window, profile.model.max_output_tokens) == (1_000_000, 16_000)
    assert (profile.model.temperature, profile.model.first_token, profile.model.idle) == (0, 90.0, 0.25)
    assert (profile.model.prices.cache_write, profile.model.prices.currency) == (1.25, "EUR")
    assert profile.model.proxy == "http://u:p@127.0.0.1:2"
    assert profile.sandbox.require == ("git_protect", "pid_isolation")
    assert (profile.sandbox.network, profile.sandbox.unix_sockets) == (True, True)
    assert profile.sandbox.writable == (str(folder / "cache"),)
    assert profile.sandbox.hidden == ("/home/user/.secret", str(folder / "secret"))
    assert (profile.sandbox.env_allow, dict(profile.sandbox.env_set)) == (("LANG",), {"A": "b"})
    assert (profile.sandbox.limits.memory, profile.sandbox.limits.file_size) == (2_000_000_000, 100_000_000)
    assert (profile.tools.allow, profile.tools.deny, profile.tools.parallel) == (("shell", "read_file"), ("shell",), 2)
    assert profile.compaction.spill_bytes == 60_000
    assert profile.compaction_models["gpt-4.1"].summary_at == 0.7
    assert profile.compaction_models["gpt-4.1"].keep == 0.1
    assert (profile.limits.wall, profile.limits.tool, profile.limits.cost) == (7200, 90, 2)
    assert (profile.limits.tokens, profile.limits.output_bytes) == (5_000_000, 1_000_000_000)
    assert (profile.retry.attempts, profile.retry.seconds) == (1, 0)


def test_without_a_name_the_shipped_review_profile_is_taken(folder: Path) -> None:
    """It writes nothing, so forgetting to name one is harmless."""
    run = load(folder, environ={"OPENAI_API_KEY": "k"})

    assert DEFAULT_PROFILE == "review"
    assert run.profile.name == "review"
    assert run.profile.mode is Mode.READ_ONLY
    assert run.origins["task.profile"] == "default"


def test_the_command_line_profile_goes_before_the_tasks(folder: Path) -> None:
    """The task's own is not even read."""
    run = load(folder, BASE, task="profile: ./absent.profile.yaml\n")

    assert run.profile.name == "p"


def test_a_name_is_only_a_shipped_profile(folder: Path) -> None:
    """A file of the same name in the folder is not looked at."""
    (folder / "refactorr").write_text(BASE)

    error = refused(folder, profile=None, task="profile: refactorr\n")

    assert error.problems[0] == "t.task.yaml:3:10: profile: no shipped profile is called 'refactorr'"
    assert error.hint is not None
    assert "did you mean 'refactor'?" in error.hint
    assert "deps, eval, nightly, quickstart, refactor, review" in error.hint


def test_a_missing_profile_is_reported_where_it_is_named(folder: Path) -> None:
    """In the task, or in the file that extends it."""
    error = refused(folder, task="profile: ./absent.profile.yaml\n")
    assert error.problems[0].startswith("t.task.yaml:3:10: profile: absent.profile.yaml: no such file")

    error = refused(folder, "version: 1\nextends: [./absent.profile.yaml]\n")
    assert error.problems[0].startswith("p.profile.yaml:2:11: extends[0]: absent.profile.yaml: no such file")


def test_mappings_merge_and_others_replace_and_null_resets(folder: Path) -> None:
    """The order is: what is extended, in its order, then the file itself."""
    (folder / "a.profile.yaml").write_text(
        BASE + "limits: {steps: 10, turns: 2, cost: 1}\ntools: {deny: [shell, grep]}\nretry: {attempts: 1}\n"
    )
    (folder / "b.profile.yaml").write_text("version: 1\nlimits: {turns: 5, wall: 1m}\nretry: null\n")

    run = load(
        folder,
        "version: 1\nextends: [a.profile.yaml, b.profile.yaml]\nlimits: {steps: 20, cost: }\ntools: {deny: [glob]}\n",
    )

    limits = run.profile.limits
    assert (limits.steps, limits.turns, limits.wall, limits.cost) == (20, 5, 60, None)
    assert run.profile.tools.deny == ("glob",)
    assert run.profile.retry.attempts == 5
    assert run.origins["profile.limits.steps"] == "p.profile.yaml:3"
    assert run.origins["profile.limits.turns"] == "b.profile.yaml:2"
    assert run.origins["profile.limits.cost"] == "default"
    assert run.origins["profile.model.model"] == "a.profile.yaml:2"


def test_null_takes_one_inherited_variable_out(folder: Path) -> None:
    """The others stay."""
    (folder / "a.profile.yaml").write_text(BASE + "sandbox: {env: {set: {A: x, B: y}}}\n")

    run = load(folder, "version: 1\nextends: ./a.profile.yaml\nsandbox: {env: {set: {A: null}}}\n")

    assert dict(run.profile.sandbox.env_set) == {"B": "y"}


def test_overridable_is_not_inherited(folder: Path) -> None:
    """Each file decides for itself what a command line may change."""
    (folder / "a.profile.yaml").write_text(BASE + "overridable: [model]\n")

    error = refused(folder, "version: 1\nextends: a.profile.yaml\n", sets=["model.model=other"])

    assert error.message == "--set model.model: the profile does not let this key be set"


def test_relative_paths_belong_to_the_file_that_declares_them(folder: Path) -> None:
    """However deep the file that extends it lies."""
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "s.script.yaml").write_text("version: 1\nresponses: [{text: from sub}]\n")
    (folder / "sub" / "a.profile.yaml").write_text(
        "version: 1\nmodel: {provider: scripted, script: s.script.yaml}\nsandbox: {hidden: [x]}\n"
    )
    (folder / "sub" / "deep" / "b.profile.yaml").write_text("version: 1\nextends: ../a.profile.yaml\n")

    run = load(folder, "version: 1\nextends: sub/deep/b.profile.yaml\n")

    assert run.responses == ({"text": "from sub"},)
    assert run.profile.model.script == str(folder / "sub" / "s.script.yaml")
    assert run.profile.sandbox.hidden == (str(folder / "sub" / "x"),)


def test_a_circle_of_profiles_is_refused(folder: Path) -> None:
    """With the way it goes."""
    (folder / "a.profile.yaml").write_text("version: 1\nextends: ./p.profile.yaml\n")

    error = refused(folder, "version: 1\nextends: ./a.profile.yaml\n")

    assert error.problems[0].startswith(
        "a.profile.yaml:2:10: extends: goes in a circle: p.profile.yaml → a.profile.yaml"
    )


@pytest.mark.parametrize(("steps", "allowed"), [(8, True), (9, False)])
def test_a_chain_of_more_than_eight_steps_is_refused(folder: Path, steps: int, allowed: bool) -> None:
    """Eight steps of ``extends`` are the most."""
    (folder / "0.profile.yaml").write_text(BASE)
    for step in range(1, steps):
        (folder / f"{step}.profile.yaml").write_text(f"version: 1\nextends: ./{step - 1}.profile.yaml\n")
    text = f"version: 1\nextends: ./{steps - 1}.profile.yaml\n"

    if allowed:
        assert load(folder, text).profile.model.model == "gpt-5-mini"
    else:
        assert "the chain is longer than 8 steps" in refused(folder, text).problems[0]


def test_a_bush_of_profiles_is_refused(folder: Path) -> None:
    """Lists of lists would multiply."""
    (folder / "0.profile.yaml").write_text(BASE)
    for step in range(1, 8):
        (folder / f"{step}.profile.yaml").write_text(
            f"version: 1\nextends: [{', '.join([f'./{step - 1}.profile.yaml'] * 9)}]\n"
        )

    error = refused(folder, "version: 1\nextends: ./7.profile.yaml\n")

    assert "more than 64 files" in error.problems[0]


def test_every_file_of_a_chain_is_checked(folder: Path) -> None:
    """A wrong value is wrong even where a child replaces it."""
    (folder / "a.profile.yaml").write_text(BASE + "limits: {steps: many}\n")

    error = refused(folder, "version: 1\nextends: ./a.profile.yaml\nlimits: {steps: 5}\n")

    assert error.problems[0].startswith("a.profile.yaml:3:17: limits.steps: a whole number is needed")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("modell: {}", "p.profile.yaml:3:1: modell: unknown key, did you mean 'model'?"),
        ("permission_mode: write", "3:18: permission_mode: the text 'write' is none of the choices: write 'read-only'"),
        ("sandbox: {network: true}", "3:20: sandbox.network: true is none of the choices: write 'off' or 'on'"),
        ("sandbox: {network: {allow: []}}", "3:28: sandbox.network.allow: is empty"),
        ("sandbox: {network: {allow: [x]}}", "3:29: sandbox.network.allow[0]: 'x' is no host and port"),
        ("sandbox: {network: {allow: ['*:1']}}", "3:29: sandbox.network.allow[0]: '*:1' is no host and port"),
        ("sandbox: {network: {allow: ['a:b']}}", "3:29: sandbox.network.allow[0]: 'a:b' is no host and port"),
        ("sandbox: {network: {allow: ['a:1'], deny: []}}", "sandbox.network.deny: unknown key"),
        ("sandbox: {backend: docker}", "3:20: sandbox.backend: the text 'docker' is none of the choices"),
        ("sandbox: {require: [magic]}", "3:21: sandbox.require[0]: the text 'magic' is none of the choices"),
        ("sandbox: {limits: {memory: lots}}", "3:28: sandbox.limits.memory: the text 'lots' is no size"),
        (
            "sandbox: {limits: {memory: 15M}}",
            "3:28: sandbox.limits.memory: the text '15M' is out of range: write at least 16M",
        ),
        ("sandbox: {limits: {memory: 1000}}", "3:28: sandbox.limits.memory: the number 1000 is out of range: write at"),
        ("retry: {attempts: 0}", "3:19: retry.attempts: the number 0 is out of range: write at least 1"),
        ('sandbox: {hidden: ["a\\0b"]}', "3:20: sandbox.hidden[0]: the text 'a\\x00b' holds a NUL"),
        ('extends: "./a\\0b"', "3:10: extends: holds a NUL"),
        ('approvals: "a\\0b"', "3:12: approvals: the text 'a\\x00b' holds a NUL"),
        ("sandbox: {env: {set: {A: 1}}}", "3:26: sandbox.env.set.A: a text is needed, this is the number 1: put it in"),
        (
            "sandbox: {env: {allow: [LD_PRELOAD]}}",
            "3:25: sandbox.env.allow[0]: LD_PRELOAD is refused: it makes programs",
        ),
        ("sandbox: {env: {set: {GIT_DIR: x}}}", "3:32: sandbox.env.set.GIT_DIR: GIT_DIR is refused: it makes programs"),
        ("sandbox: {env: {allow: [HOME]}}", "3:25: sandbox.env.allow[0]: HOME is set by the sandbox itself"),
        ('sandbox: {env: {set: {A: "x\\0"}}}', "3:26: sandbox.env.set.A: the value of A holds a NUL"),
        ("sandbox: {writable: [absent]}", "3:22: sandbox.writable[0]: no such directory"),
        ("sandbox: {writable: [/]}", "3:22: sandbox.writable[0]: is the root of the file system"),
        ("sandbox: {hidden: [~/x]}", "3:20: sandbox.hidden[0]: HOME is not set, so ~ means nothing"),
        ("tools: {allow: [shel]}", "3:17: tools.allow[0]: 'shel': unknown tool, did you mean 'shell'?"),
        ("tools: {deny: ['*']}", "3:16: tools.deny[0]: '*': unknown tool"),
        ("approvals: [a]", "3:12: approvals: a file or a mapping is needed, this is a list"),
        ("approvals: absent.policy.yaml", "3:12: approvals: absent.policy.yaml: no such file"),
        (
            "approvals: {version: 1, default: deny, rules: [], rulez: []}",
            "approvals.rulez: unknown key, did you mean 'rules'?",
        ),
        ("on_denied: ask", "3:12: on_denied: the text 'ask' is none of the choices: write 'continue' or 'abort'"),
        ("compaction: {keep: 0.9}", "3:13: compaction: keep, 0.9, is not below summary_at, 0.8, so a summary frees"),
        ("compaction: {keep: 0.8}", "3:13: compaction: keep, 0.8, is not below summary_at, 0.8, so a summary frees"),
        (
            "compaction: {spill_head: 48k}",
            "3:13: compaction: spill_head and spill_tail keep 50000 together, which is not below spill_bytes, 50000",
        ),
        (
            "compaction: {prune_over: 5120}",
            "3:13: compaction: prune_head and prune_tail keep 5120 together, which is not below prune_over, 5120",
        ),
        ("compaction: {models: {m: {keep: 0.9}}}", "3:26: compaction.models.m: keep, 0.9, is not below summary_at"),
        ("compaction: {models: {m: {models: {}}}}", "3:27: compaction.models.m.models: unknown key"),
        ("artifacts: {visibility: public}", "3:25: artifacts.visibility: the text 'public' is none of the choices"),
        ("overridable: [modle]", "3:15: overridable[0]: 'modle' is no key of a profile"),
        ("limits: {children: 8}", "3:10: limits.children: unknown key"),
        ("extends: []", "3:10: extends: a text or a list of texts is needed"),
        ("permission_mode: danger-full-access", "3:18: permission_mode: danger-full-access confines nothing"),
        ("limits: {cost: -1}", "3:16: limits.cost: the number -1 is out of range: write more than 0"),
        ("limits: {cost: true}", "3:16: limits.cost: a number is needed, this is true"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_to_do(folder: Path, lines: str, problem: str) -> None:
    """One problem each, at its place."""
    error = refused(folder, f"{BASE}{lines}\n")

    assert len(error.problems) == 1
    assert problem in error.problems[0]
    assert error.problems[0].startswith("p.profile.yaml:")


def test_a_home_that_is_no_absolute_path_stands_for_nothing(folder: Path) -> None:
    """It would mean another folder wherever the runner is started."""
    with pytest.raises(ConfigError) as caught:
        load(folder, BASE + "sandbox: {hidden: [~/x]}\n", environ={"HOME": "home"})

    assert "sandbox.hidden[0]: HOME is 'home', no absolute path, so ~ means nothing" in caught.value.message


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("{}", "model: provider is missing: add model.provider"),
        ("{provider: openai}", "model: model is missing: add model.model"),
        ("{provider: anthropic, model: m}", "model.provider: the text 'anthropic' is none of the choices"),
        ("{provider: gemini, model: m}", "model.provider: the text 'gemini' is none of the choices"),
        ("{provider: openai, model: m, reasoning: high}", "model.reasoning: unknown key"),
        ("{provider: openai, model: m, record: true}", "model.record: unknown key"),
        ("{provider: openai, model: 1.10}", "model.model: a text is needed, this is the number 1.1: put it in quotes"),
        (
            "{provider: openai, model: gpt-5, base_url: 'localhost:80/v1'}",
            "model.base_url: 'localhost:80/v1' has no scheme: write http://localhost:80/v1",
        ),
        (
            "{provider: openai, model: gpt-5, base_url: api.example.com/v1}",
            "model.base_url: 'api.example.com/v1' has no scheme: write https://api.example.com/v1",
        ),
        (
            "{provider: openai, model: gpt-5, base_url: 'http://h:70000'}",
            "model.base_url: 'http://h:70000' is no address, Port out of range 0-65535: write for example http://",
        ),
        (
            "{provider: openai, model: gpt-5, proxy: 'proxy:3128'}",
            "model.proxy: 'proxy:3128' has no scheme: write http://proxy:3128",
        ),
        (
            "{provider: openai, model: gpt-5, proxy: 'https://user:word@proxy:3128'}",
            "model.proxy: 'https://***@proxy:3128' begins with https://: write http://",
        ),
        (
            "{provider: openai, model: gpt-5, api_key_env: my-key}",
            "model.api_key_env: the text 'my-key' is no name of a variable: write letters, digits and '_'",
        ),
        (
            "{provider: openai, model: gpt-5, prices: {currency: euro}}",
            "model.prices.currency: the text 'euro' is no currency: write three capitals",
        ),
        ("{provider: openai, model: gpt-5, context_window: 0}", "model.context_window: the number 0 is out of range"),
        ("{provider: openai, model: nobody-knows}", "model.model: nothing is known of the model 'nobody-knows'"),
        ("{provider: openai, model: gpt-5, script: s.yaml}", "model.script: has no effect with provider openai"),
        ("{provider: openai, model: gpt-5, api_key_env: A, api_key_file: f}", "stands beside api_key_env: keep one"),
        (
            "{provider: openai, model: gpt-5, api_key_file: ws/key}",
            "model.api_key_file: lies where the agent may write",
        ),
        (
            "{provider: openai, model: gpt-5, context_window: 1000}",
            "the window of 1000 tokens does not hold the system prompt, about ",
        ),
        ("{provider: scripted}", "model: script is missing"),
        ("{provider: scripted, script: absent.yaml}", "model.script: absent.yaml: no such file"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_before_anything_starts(folder: Path, model: str, problem: str) -> None:
    """Providers and keys of later features are unknown ones."""
    error = refused(folder, f"version: 1\nmodel: {model}\n", environ={"OPENAI_API_KEY": "k", "A": "k"})

    assert any(problem in each for each in error.problems), error.problems


def test_the_variable_with_the_key_must_be_set(folder: Path) -> None:
    """The message names it; ``plan`` does not ask for it."""
    profile = "version: 1\nmodel: {provider: openai, model: gpt-5, api_key_env: MY_KEY}\n"

    error = refused(folder, profile, environ={"MY_KEY": " "})

    assert len(error.problems) == 1
    assert error.problems[0].startswith(
        "p.profile.yaml:2:54: model.api_key_env: the variable MY_KEY with the key is not"
    )
    assert load(folder, profile, check_credentials=False).profile.model.api_key_env == "MY_KEY"


def test_without_an_address_openai_and_its_variable_are_meant(folder: Path) -> None:
    """With an address of one's own, no key is sent unless one is named."""
    theirs = load(
        folder, "version: 1\nmodel: {provider: openai, model: gpt-5}\n", check_credentials=False
    ).profile.model
    own = load(folder, BASE).profile.model

    assert (theirs.base_url, theirs.api_key_env) == ("https://api.openai.com/v1", "OPENAI_API_KEY")
    assert (own.base_url, own.api_key_env) == ("http://127.0.0.1:1/v1", None)


def test_a_file_with_the_key_must_be_readable(folder: Path) -> None:
    """And it replaces the default variable."""
    profile = "version: 1\nmodel: {provider: openai, model: gpt-5, api_key_file: key}\n"
    assert "with the key cannot be read" in refused(folder, profile).problems[0]

    (folder / "key").write_text("k")
    model = load(folder, profile).profile.model
    assert (model.api_key_file, model.api_key_env) == (str(folder / "key"), None)


def test_an_unknown_model_may_have_a_window_to_assume(folder: Path) -> None:
    """``unknown_window`` is for unknown models only; ``context_window`` is for all."""

    def window(keys: str) -> int:
        text = f"version: 1\nmodel: {{provider: openai, base_url: 'http://127.0.0.1:1', {keys}}}\n"
        return load(folder, text).profile.model.context_window

    assert window("model: nobody-knows, unknown_window: 64k") == 64_000
    assert window("model: gpt-4o, unknown_window: 64k") == 128_000
    assert window("model: gpt-4o, context_window: 32k, unknown_window: 64k") == 32_000


@pytest.mark.parametrize(
    ("keys", "images"),
    [
        ("model: gpt-5-mini", True),
        ("model: gpt-5-mini, images: false", False),
        ("model: deepseek-v4-flash", False),
        ("model: other, context_window: 1000000", False),
        ("model: other, context_window: 1000000, images: true", True),
    ],
)
def test_images_go_to_models_that_are_known_to_take_them(folder: Path, keys: str, images: bool) -> None:
    """Or of which the profile says so."""
    text = f"version: 1\nmodel: {{provider: openai, base_url: 'http://127.0.0.1:1', {keys}}}\n"

    assert load(folder, text).profile.model.images is images


def test_a_cost_limit_needs_known_prices(folder: Path) -> None:
    """Of input and output; a price of input holds for cached input as well."""
    profile = (
        "version: 1\nmodel: {{provider: openai, model: m, context_window: 9k, base_url: 'http://127.0.0.1:1'{}}}\n"
    )
    cost = "limits: {cost: 2.00}\n"

    error = refused(folder, profile.format("") + cost)
    assert error.problems[0].startswith(
        "p.profile.yaml:3:16: limits.cost: limits.cost is 2, but the price of 'm' is not"
    )
    assert refused(folder, profile.format(", prices: {input: 1}") + cost).problems

    prices = load(folder, profile.format(", prices: {input: 1, output: 4}") + cost).profile.model.prices
    assert (prices.cache_read, prices.cache_write) == (1, 1)
    assert load(folder, profile.format("")).profile.model.prices.input is None


def test_a_scripted_model_costs_nothing_and_has_a_window(folder: Path) -> None:
    """So a cost limit is no error; prices given for a test hold."""
    (folder / "s.yaml").write_text("version: 1\nresponses: []\n")
    text = "version: 1\nmodel: {provider: scripted, script: s.yaml%s}\nlimits: {cost: 1}\n"

    model = load(folder, text % "").profile.model
    assert (model.model, model.context_window, model.prices.output) == ("scripted", 128_000, 0)
    assert load(folder, text % ", prices: {input: 1, output: 2}").profile.model.prices.output == 2


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("version: 1\nresponses: [{}]\n", "2:13: responses[0]: says nothing: add `text`, `calls` or `error`"),
        (
            "version: 1\nresponses: [{text: a, error: {status: 429}}]\n",
            "2:13: responses[0]: an error stands alone: remove the other keys",
        ),
        ("version: 1\nresponses: [{text: a, finish: done}]\n", "2:31: responses[0].finish: the text 'done' is none of"),
        ("version: 1\nresponses: [{calls: [{args: {}}]}]\n", "2:22: responses[0].calls[0].tool: is missing: add it"),
        ("version: 1\nresponses: [{text: a, delay: -1}]\n", "2:30: responses[0].delay: the number -1 is out of range"),
        ("version: 1\n", "1:1: responses: is missing: add it"),
    ],
)
def test_a_script_is_checked_before_the_run(folder: Path, script: str, problem: str) -> None:
    """A wrong script is no surprise in the middle."""
    (folder / "s.script.yaml").write_text(script)

    error = refused(folder, "version: 1\nmodel: {provider: scripted, script: s.script.yaml}\n")

    assert len(error.problems) == 1
    assert error.problems[0].startswith(f"s.script.yaml:{problem}")


def test_a_script_becomes_plain_values(folder: Path) -> None:
    """Durations in seconds, null left out, except inside the arguments of a call."""
    (folder / "s.script.yaml").write_text(
        "version: 1\nresponses:\n"
        "  - {text: a, usage: , delay: 1.5s, calls: [{tool: x}, {tool: y, id: c1, args: {z: null}}]}\n"
        "  - error: {status: 429, code: rate_limit, retryAfter: 2m}\n"
    )

    run = load(folder, "version: 1\nmodel: {provider: scripted, script: s.script.yaml}\n")

    assert run.responses == (
        {
            "text": "a",
            "delay": 1.5,
            "calls": [{"tool": "x", "args": {}}, {"tool": "y", "id": "c1", "args": {"z": None}}],
        },
        {"error": {"status": 429, "code": "rate_limit", "retryAfter": 120.0}},
    )


LIMITED = BASE + "limits: {steps: 100, cost: 5}\ntools: {allow: [shell, grep], deny: [grep], parallel: 4}\n"


@pytest.mark.parametrize(
    "sets",
    [
        ["limits.steps=100", "limits.wall=29m", "limits.tokens=1M"],
        ["limits.steps=1"],
        ["tools.allow=[shell]", "tools.deny=[grep, glob]", "tools.parallel=1"],
        ["compaction.summary_at=0.5", "compaction.models.gpt-4.1.keep=0.1", "compaction={keep: 0.2}"],
        ["limits={steps: 3, wall: 1m}"],
    ],
)
def test_compaction_is_free_and_limits_and_tools_may_be_tightened(folder: Path, sets: list[str]) -> None:
    """Without any ``overridable``."""
    run = load(folder, LIMITED, sets=sets)

    assert "--set" in run.origins.values()


def test_of_several_values_of_a_key_only_the_last_one_is_judged(folder: Path) -> None:
    """One that would be refused is no mistake when a later one takes its place, and the other way round."""
    run = load(folder, LIMITED, sets=["limits.steps=500", "limits.steps=10"])

    assert run.profile.limits.steps == 10
    with pytest.raises(ConfigError, match=r"limits\.steps"):
        load(folder, LIMITED, sets=["limits.steps=10", "limits.steps=500"])


@pytest.mark.parametrize(
    "text",
    [
        "limits.steps=101",
        "limits.steps=",
        "limits.wall=31m",
        "limits.cost=",
        "limits.idle=1h",
        "limits={steps: 3, turns: 9}",
        "tools.allow=[shell, read_file]",
        "tools.allow=",
        "tools.deny=[]",
        "tools.deny=",
        "tools.parallel=5",
        "tools.parallel=",
    ],
)
def test_loosening_is_refused(folder: Path, text: str) -> None:
    """An emptied value falls back to its default, which may be looser."""
    error = refused(folder, LIMITED, sets=[text])

    assert "may only be tightened" in error.message
    assert error.message.startswith(f"--set {text.partition('=')[0]}")


@pytest.mark.parametrize(
    "key", ["model.model", "permission_mode", "sandbox.network", "approvals", "on_denied", "retry.attempts"]
)
def test_other_keys_are_refused_unless_overridable(folder: Path, key: str) -> None:
    """The message says what may be set."""
    error = refused(folder, LIMITED, sets=[f"{key}=x"])

    assert error.message == f"--set {key}: the profile does not let this key be set"
    assert error.hint is not None
    assert "compaction.* is free, limits and tools may be tightened" in error.hint


@pytest.mark.parametrize("key", ["extends", "overridable", "version", "limits", "tools"])
def test_what_a_file_is_made_of_cannot_be_set(folder: Path, key: str) -> None:
    """Not even when the file itself would list it; and no section can be emptied as a whole."""
    listed = "overridable: [extends, version, overridable]\n"

    assert f"--set {key}: " in refused(folder, LIMITED + listed, sets=[f"{key}="]).message


def test_overridable_lists_keys_and_prefixes(folder: Path) -> None:
    """``model`` covers ``model.temperature``, but not ``modelling``; the last value wins."""
    profile = LIMITED + "overridable: [model, limits.steps, permission_mode]\n"

    run = load(
        folder,
        profile,
        sets=[
            "model.model=gpt-4o",
            "model={temperature: 1}",
            "limits.steps=500",
            "limits.steps=400",
            "permission_mode=read-only",
        ],
    )

    assert (run.profile.model.model, run.profile.model.temperature) == ("gpt-4o", 1)
    assert run.profile.model.base_url == "http://127.0.0.1:1/v1"
    assert run.profile.limits.steps == 400
    assert run.origins["profile.limits.steps"] == "--set"
    assert "may only be tightened" in refused(folder, profile, sets=["limits.turns=9"]).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limits.stepz=1", "--set limits.stepz: the profile has no such key"),
        ("limits", "--set limits: has no key and value"),
        ("=1", "--set =1: has no key and value"),
        ("limits.steps=[", "--set limits.steps: 1 problem"),
        ("limits.steps={a: 1, a: 2}", "--set limits.steps: a: given twice"),
        ("limits.steps=many", "--set: limits.steps: a whole number is needed, this is the text 'many'"),
        ("compaction.keep=2", "--set: compaction.keep: the number 2 is out of range"),
        ("compaction.models.gpt-4.1={kep: 1}", "--set: compaction.models.gpt-4.1.kep: unknown key"),
    ],
)
def test_a_set_that_makes_no_sense_is_refused(folder: Path, text: str, message: str) -> None:
    """The option is named in place of a file."""
    assert message in refused(folder, LIMITED, sets=[text]).message


def test_a_relative_path_that_is_set_starts_at_the_current_directory(folder: Path) -> None:
    """Wherever the profile lies."""
    (folder / "own.script.yaml").write_text("version: 1\nresponses: [{text: own}]\n")
    profile = "version: 1\nmodel: {provider: scripted, script: /absent}\noverridable: [model.script]\n"

    assert load(folder, profile, sets=["model.script=own.script.yaml"]).responses == ({"text": "own"},)


def test_a_task_may_tighten_limits_only(folder: Path) -> None:
    """The message shows the profile's; the origin shows the task's line."""
    run = load(folder, LIMITED, task="limits: {steps: 50, wall: 10m}\n")
    assert (run.profile.limits.steps, run.profile.limits.wall) == (50, 600)
    assert run.origins["profile.limits.steps"] == "t.task.yaml:3"

    error = refused(folder, LIMITED, task="limits: {steps: 150}\n")
    assert len(error.problems) == 1
    assert error.problems[0].startswith("t.task.yaml:3:17: limits.steps: is more than the profile's 100: lower it, or")


def test_a_task_may_raise_a_limit_that_is_overridable(folder: Path) -> None:
    """``overridable`` holds for tasks, too."""
    run = load(folder, LIMITED + "overridable: [limits]\n", task="limits: {steps: 150}\n")

    assert run.profile.limits.steps == 150


def test_the_tighter_of_task_and_command_line_holds(folder: Path) -> None:
    """Whichever of the two it is."""
    tighter = load(folder, LIMITED, task="limits: {steps: 50}\n", sets=["limits.steps=5"])
    looser = load(folder, LIMITED, task="limits: {steps: 50}\n", sets=["limits.steps=80"])
    raised = load(
        folder, LIMITED + "overridable: [limits]\n", task="limits: {steps: 150}\n", sets=["limits.steps=1000"]
    )

    assert tighter.profile.limits.steps == 5
    assert tighter.origins["profile.limits.steps"] == "--set"
    assert looser.profile.limits.steps == 50
    assert raised.profile.limits.steps == 150


def test_a_password_of_the_proxy_is_in_no_shown_value(folder: Path) -> None:
    """The configuration goes into the log."""
    run = load(folder, BASE.replace("}", ", proxy: 'http://me:secret@127.0.0.1:3'}"))

    assert run.profile.model.proxy == "http://me:secret@127.0.0.1:3"
    assert run.values["profile.model.proxy"] == "http://***@127.0.0.1:3"
    assert "secret" not in str(run.config)


@pytest.mark.parametrize("name", ["review", "refactor", "deps", "nightly", "quickstart", "eval"])
def test_shipped_profiles_load(folder: Path, name: str) -> None:
    """With their policies, and only ``eval`` lets anything be overridden."""
    run = load(folder, task=f"profile: {name}\n", environ={"OPENAI_API_KEY": "k"})

    assert run.profile.name == name
    assert run.profile.mode is (Mode.READ_ONLY if name in {"review", "quickstart"} else Mode.WORKSPACE_WRITE)
    assert run.values["profile.overridable"] == (
        ["permission_mode", "sandbox", "limits", "model"] if name == "eval" else []
    )


def test_the_eval_profile_is_wide(folder: Path) -> None:
    """Steps, turns and time are wide, nothing caps cost or tokens, unknown models get a window."""
    run = load(
        folder,
        task="profile: eval\n",
        sets=["model.model=local", "model.base_url=http://127.0.0.1:1/v1", "permission_mode=danger-full-access"],
    )

    limits = run.profile.limits
    assert (limits.steps, limits.turns, limits.wall) == (10_000, 1_000, 21_600)
    assert (limits.cost, limits.tokens) == (None, None)
    assert run.profile.model.context_window == 128_000
    assert run.profile.tools.allow is None
    assert run.profile.mode is Mode.DANGER_FULL_ACCESS


def test_an_allowlist_is_a_network_that_is_off_with_places_that_are_reached(folder: Path) -> None:
    """Names in lower case, addresses in their shortest form, nothing twice; shown by plan as it was written."""
    places = "['PyPI.org:443', 'pypi.org.:443', '[0:0::1]:80', '10.0.0.1:5432']"
    run = load(folder, f"{BASE}sandbox: {{network: {{allow: {places}}}}}\n")

    assert run.profile.sandbox.network is False
    assert [str(each) for each in run.profile.sandbox.egress] == ["pypi.org:443", "[::1]:80", "10.0.0.1:5432"]
    assert run.values["profile.sandbox.network.allow"] == [
        "PyPI.org:443",
        "pypi.org.:443",
        "[0:0::1]:80",
        "10.0.0.1:5432",
    ]


def test_danger_full_access_takes_no_allowlist(folder: Path) -> None:
    """Nothing would keep to it."""
    lines = "permission_mode: danger-full-access\naccept_unconfined: true\nsandbox: {network: {allow: ['a:1']}}\n"
    error = refused(folder, f"{BASE}{lines}")

    assert "sandbox.network: nothing keeps to an allowlist in danger-full-access" in error.problems[0]


def test_fetch_url_is_offered_only_where_it_is_named_and_something_is_reached(folder: Path) -> None:
    """An absent list is the tools without the network; a tool that can reach nothing is an error of the profile."""
    plain = load(folder, f"{BASE}sandbox: {{network: on}}\n").profile
    named = load(folder, f"{BASE}sandbox: {{network: on}}\ntools: {{allow: [fetch_url]}}\n").profile
    listed = load(folder, f"{BASE}sandbox: {{network: {{allow: ['a:1']}}}}\ntools: {{allow: [fetch_url]}}\n").profile
    error = refused(folder, f"{BASE}tools: {{allow: [shell, fetch_url]}}\n")

    assert (plain.tools.offers("fetch_url"), plain.tools.offers("shell")) == (False, True)
    assert (named.tools.offers("fetch_url"), named.tools.offers("shell")) == (True, False)
    assert listed.tools.offers("fetch_url")
    assert "tools.allow[1]: fetch_url needs sandbox.network on, or an allowlist there" in error.problems[0]
