"""A merged profile becomes a ``ProfileSpec``: defaults filled in, contradictions refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from runner.agent.settings import CompactionSpec, Limits, RetrySpec, compaction_for
from runner.approvals.words import KNOWN_TOOLS, NETWORK_TOOLS
from runner.config.directories import check_directory
from runner.config.effective import digest
from runner.config.load import Document, Mark, config_error, unknown_name
from runner.config.merge import read_referenced
from runner.config.recorded import NO_NETWORK, check_confined
from runner.config.responses import parse_script
from runner.config.shape import demand, schema_of, split_key
from runner.config.spec import ProfileSpec, ToolsSpec
from runner.config.trust import is_inside, shipped_policy_hint
from runner.config.values import LIMIT_VALUES, parse_duration, parse_memory, parse_size
from runner.errors import ConfigError
from runner.permission import Mode, Trust
from runner.providers.address import address_problem, masked
from runner.providers.base import ModelSpec, Prices
from runner.providers.registry import LOCAL
from runner.record import fields, replace
from runner.sandbox.base import SandboxLimits, SandboxSpec, disabled_backends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from runner.approvals.policy import Policy
    from runner.config.effective import Effective
    from runner.config.load import Location
    from runner.config.spec import InputValue
    from runner.config.trust import Reader, Trigger
    from runner.messages import JsonObject
    from runner.providers.recording import Recording
    from runner.sandbox.egress import Endpoint

Settings = TypeVar("Settings")

DEFAULT_BASE_URL: Final = "https://api.openai.com/v1"
DEFAULT_KEY: Final = "OPENAI_API_KEY"
SCRIPTED_WINDOW: Final = 128_000

DEFAULTS: Final[dict[str, Any]] = {
    "ProfileModel.permission_mode": Mode.READ_ONLY.value,
    "ProfileModel.accept_unconfined": False,
    "ProfileModel.on_denied": "continue",
    "Artifacts.visibility": "private",
    "Sandbox.backend": SandboxSpec().backend,
    "Sandbox.network": "off",
    "Sandbox.unix_sockets": "off",
    "Sandbox.unprotected_git": False,
    "Sandbox.keep_dac": False,
    "Patch.required": False,
    "ModelSection.base_url": DEFAULT_BASE_URL,
}
"""Defaults that no settings class has under the key's own name: section of the model and key → value."""


def untrusted_reason(trigger: Trigger, inputs: Sequence[InputValue]) -> str | None:
    """Why the run gets no network: None when nothing untrusted takes part."""
    if trigger.trust is Trust.UNTRUSTED:
        return "untrusted trigger"
    return "untrusted input" if any(each.trust is Trust.UNTRUSTED for each in inputs) else None


def resolve_profile(
    profile: Effective,
    reader: Reader,
    workspace: str,
    *,
    environ: Mapping[str, str],
    check_credentials: bool,
    untrusted: str | None,
    responses: tuple[JsonObject, ...],
    recording: Recording | None,
) -> tuple[ProfileSpec, JsonObject]:
    """Resolve a checked profile.

    Args:
        profile: The merged profile, ``--set`` and the task's limits applied; notes every value.
        reader: Reads the policy.
        workspace: Canonical path of the workspace.
        environ: Environment of the runner.
        check_credentials: Whether the variable or file with the key must be there.
        untrusted: Why the run gets no network, None if it may have one.
        responses: The script's answers.
        recording: What the provider replay plays.

    Returns:
        The profile, and the policy's resolved value.

    Raises:
        ConfigError: With all contradictions at once.
    """
    limits = _section(profile, "limits", Limits())
    compaction = _section(profile, "compaction", CompactionSpec())
    overrides = {
        name: _section(profile, "compaction", compaction, "models", name)
        for name, given in (profile.raw("compaction", "models") or {}).items()
        if given is not None
    }
    model = _model(
        profile,
        limits,
        environ,
        workspace,
        reader,
        check_credentials=check_credentials,
        responses=responses,
        recording=recording,
    )
    own = compaction_for(compaction, overrides, model.model)
    _check_compaction(profile, compaction, overrides)
    _check_window(profile, own, model)
    mode = Mode(profile.take("permission_mode", default=DEFAULTS["ProfileModel.permission_mode"]))
    accepted = profile.take("accept_unconfined", default=DEFAULTS["ProfileModel.accept_unconfined"])
    if mode is Mode.DANGER_FULL_ACCESS and not accepted:
        text = "danger-full-access confines nothing: set accept_unconfined to true, or use workspace-write"
        profile.problem(("permission_mode",), text)
    disabled_backends(environ)
    sandbox = _sandbox(profile, environ, untrusted if recording is None else NO_NETWORK)
    tools = _tools(profile, sandbox, untrusted if recording is None else NO_NETWORK)
    profile.take("artifacts", "visibility", default=DEFAULTS["Artifacts.visibility"])
    overridable = profile.take("overridable", default=[])
    for index, entry in enumerate(overridable):
        if split_key(schema_of("profile"), entry) is None:
            profile.problem(("overridable", index), f"{entry!r} is no key of a profile: correct or remove it")
    policy, value = _policy(profile, reader)
    if recording is not None:
        check_confined(profile, mode, policy)
    spec = ProfileSpec(
        name=_profile_name(profile.document.source),
        model=model,
        mode=mode,
        sandbox=sandbox,
        tools=tools,
        policy=policy,
        on_denied=profile.take("on_denied", default=DEFAULTS["ProfileModel.on_denied"]),
        compaction=compaction,
        compaction_models=overrides,
        summary_prices=_summary_prices(profile, own, model, limits),
        limits=limits,
        retry=_section(profile, "retry", RetrySpec()),
        accept_unconfined=accepted,
    )
    if profile.problems:
        raise config_error(profile.document.source, profile.problems)
    return spec, value


def _profile_name(source: str) -> str:
    return re.sub(r"(\.profile)?\.ya?ml$", "", source.replace(":", "/").rpartition("/")[2])


_CONVERT: Final[dict[str, Callable[[Any], Any]]] = {
    **LIMIT_VALUES,
    "file_size": parse_size,
    **dict.fromkeys(("spill_bytes", "spill_head", "spill_tail", "prune_over", "prune_head", "prune_tail"), parse_size),
    **dict.fromkeys(("summary_max_tokens", "min_output", "max_output_tokens", "context_window"), parse_size),
    "memory": parse_memory,
    "first_token": parse_duration,
    "seconds": lambda value: parse_duration(value, zero=True),
}
"""Key → how its value in YAML becomes the one in the settings."""


def _section(profile: Effective, name: str, defaults: Settings, *below: str) -> Settings:
    """A section of the profile as the settings class of ``defaults``, which has the same keys.

    An override (``below``) notes only the keys that it gives.
    """
    changed = {}
    for each in fields(defaults):
        location = (name, *below, each.name)
        if below and profile.raw(*location) is None:
            continue
        default = getattr(defaults, each.name)
        changed[each.name] = profile.take(*location, default=default, convert=_CONVERT.get(each.name))
    return replace(defaults, **changed)


def _check_compaction(profile: Effective, spec: CompactionSpec, overrides: Mapping[str, CompactionSpec]) -> None:
    """Refuse thresholds that contradict each other, for any model; what is wrong for all is said once."""
    problems = list(_contradictions(spec))
    for text in problems:
        profile.problem(("compaction",), text)
    for name, each in overrides.items():
        for text in _contradictions(each):
            if text not in problems:
                profile.problem(("compaction", "models", name), text)


def _contradictions(spec: CompactionSpec) -> Iterator[str]:
    for limit, head, tail in (("spill_bytes", "spill_head", "spill_tail"), ("prune_over", "prune_head", "prune_tail")):
        ends, most = getattr(spec, head) + getattr(spec, tail), getattr(spec, limit)
        if ends >= most:
            yield f"{head} and {tail} keep {ends} together, which is not below {limit}, {most}: lower them"
    if spec.keep >= spec.summary_at:
        yield f"keep, {spec.keep:g}, is not below summary_at, {spec.summary_at:g}, so a summary frees nothing: lower it"


def _check_window(profile: Effective, spec: CompactionSpec, model: ModelSpec) -> None:
    """Refuse a window that is full before the task is told."""
    from runner.agent.prompt import SYSTEM_PROMPT
    from runner.session.tokens import cautious, estimate_system

    system, window = estimate_system(SYSTEM_PROMPT, cautious), model.context_window
    if system + spec.min_output >= window:
        text = f"the window of {window} tokens does not hold the system prompt, about {system}, and min_output, "
        profile.problem(("compaction",), f"{text}{spec.min_output}: lower min_output, or raise model.context_window")
    elif spec.threshold(window) <= system:
        text = f"summary_at, {spec.summary_at:g}, is {spec.threshold(window)} of {window} tokens, and the system "
        profile.problem(("compaction",), f"{text}prompt alone has about {system}: raise it, or model.context_window")


def _model(
    profile: Effective,
    limits: Limits,
    environ: Mapping[str, str],
    workspace: str,
    reader: Reader,
    *,
    check_credentials: bool,
    responses: tuple[JsonObject, ...],
    recording: Recording | None,
) -> ModelSpec:
    section = "model"
    provider = profile.take(section, "provider")
    local = provider in LOCAL
    recorded = None if recording is None else recording.model
    name = profile.take(section, "model", default=(recorded or provider) if local else None)
    for key, value in (("provider", provider), ("model", name)):
        if value is None:
            profile.problem((section,), f"{key} is missing: add model.{key}")
    from runner.providers.prices import takes_images

    defaults = ModelSpec(provider=provider or "", model=name or "")
    base_url = profile.take(section, "base_url", default=None if local else DEFAULT_BASE_URL)
    key_file = profile.raw(section, "api_key_file")
    default_key = None if local or key_file or profile.raw(section, "base_url") else DEFAULT_KEY
    key_env = profile.take(section, "api_key_env", default=default_key)
    if key_env is not None and key_file is not None:
        profile.problem(
            (section, "api_key_file"), "stands beside api_key_env: keep one, null takes an inherited one back"
        )
    file = profile.take(section, "api_key_file", convert=lambda text: _path(profile, (section, "api_key_file"), text))
    if check_credentials and not local:
        _check_key(profile, key_env, file, environ)
    if file is not None:
        _check_key_file(profile, file, workspace, reader)
    contents = {"scripted": digest(list(responses)), "replay": None if recording is None else recording.sha256}
    script = _answers(profile, "script", "scripted", contents["scripted"])
    replay = _answers(profile, "replay", "replay", contents["replay"])
    patterns = () if recording is None else tuple(profile.take(section, "replay_normalise", default=[]))
    if recording is None and profile.raw(section, "replay_normalise") is not None:
        profile.problem((section, "replay_normalise"), f"has no effect with provider {provider}: remove it")
    proxy = profile.take(section, "proxy")
    for key, address in (("base_url", base_url), ("proxy", proxy)):
        problem = None if address is None else address_problem(address, proxy=key == "proxy")
        if problem is not None:
            profile.problem((section, key), f"{masked(address)!r} {problem}")
    if proxy is not None:
        profile.note((section, "proxy"), masked(proxy), profile.origins[section, "proxy"])
    return ModelSpec(
        provider=defaults.provider,
        model=defaults.model,
        base_url=base_url,
        api_key_env=key_env,
        api_key_file=file,
        context_window=_window(profile, defaults.model, local=local, recording=recording),
        proxy=proxy,
        idle=limits.idle if limits.idle is not None else defaults.idle,
        script=script,
        replay=replay,
        replay_normalise=patterns,
        prices=_prices(profile, defaults.model, limits, local=local),
        images=profile.take(section, "images", default=not local and takes_images(defaults.model)),
        max_output_tokens=profile.take(
            section,
            "max_output_tokens",
            default=(recording and recording.max_output) or defaults.max_output_tokens,
            convert=parse_size,
        ),
        **{
            key: profile.take(section, key, default=getattr(defaults, key), convert=_CONVERT.get(key))
            for key in ("temperature", "tool_choice", "first_token")
        },
    )


def _answers(profile: Effective, key: str, provider: str, content: str | None) -> str | None:
    """The file that a provider takes its answers from; None for another provider, which must name none."""
    given, chosen, location = profile.raw("model", key), profile.raw("model", "provider"), ("model", key)
    if chosen != provider:
        if given is not None:
            profile.problem(location, f"has no effect with provider {chosen}: remove it, or use {provider}")
        return None
    profile.take(*location, private=True)
    profile.note(("model", f"{key}_sha256"), content, profile.origins[location])
    return _path(profile, location, given)


def _check_key(profile: Effective, variable: str | None, file: str | None, environ: Mapping[str, str]) -> None:
    if variable is not None and not environ.get(variable, "").strip():
        text = f"the variable {variable} with the key is not set: set it, or name another one"
        profile.problem(("model", "api_key_env"), text)
    if file is not None and not os.access(file, os.R_OK):
        profile.problem(("model", "api_key_file"), f"{file} with the key cannot be read: check path and permissions")


def _check_key_file(profile: Effective, file: str, workspace: str, reader: Reader) -> None:
    location = ("model", "api_key_file")
    roots = [
        workspace,
        *(_path(profile, ("sandbox", "writable"), each) for each in profile.raw("sandbox", "writable") or []),
    ]
    if any(is_inside(path, root) for path in (file, os.path.realpath(file)) for root in roots):
        profile.problem(
            location, "lies where the agent may write: keep keys outside the workspace and sandbox.writable"
        )
    elif reader.under_test(Path(file)) is not None:
        profile.problem(location, "is part of the untrusted checkout: keep keys outside of it")


def _path(profile: Effective, location: Location, text: str) -> str:
    """An absolute path: relative ones belong to the file that declares them."""
    return os.path.normpath(os.path.join(profile.document.mark(location).directory, text))  # noqa: PTH118  # texts


def _window(profile: Effective, model: str, *, local: bool, recording: Recording | None) -> int:
    from runner.providers.prices import known_window

    location = ("model", "context_window")
    assumed = profile.take("model", "unknown_window", convert=parse_size)
    recorded = None if recording is None else recording.window
    known = (recorded or SCRIPTED_WINDOW) if local else known_window(model) if model else 1
    given: int | None = profile.take(*location, default=known, convert=parse_size)
    if given is not None:
        return given
    if assumed is None:
        profile.problem(
            ("model", "model"), f"nothing is known of the model {model!r}: add model.context_window, its size in tokens"
        )
        return SCRIPTED_WINDOW
    profile.note(location, assumed, profile.document.mark(("model", "unknown_window")).origin)
    return int(assumed)


def _prices(profile: Effective, model: str, limits: Limits, *, local: bool) -> Prices:
    """Prices of the model: the profile's, else the known ones; a provider that calls nobody is free."""
    from runner.providers.prices import FREE, lookup

    known = FREE if local else lookup(model)
    if profile.raw("model", "prices"):
        known = Prices(**{k: v for k, v in profile.raw("model", "prices").items() if v is not None})
    prices = _filled(known or Prices())
    for each in fields(prices):
        profile.take("model", "prices", each.name, default=getattr(prices, each.name))
    if limits.cost is not None and (prices.input is None or prices.output is None):
        what = f"limits.cost is {limits.cost:g}, but the price of {model!r} is not known: "
        location = ("limits", "cost") if profile.raw("limits", "cost") is not None else ("model",)
        profile.problem(location, what + "add model.prices (input and output, per million tokens), or drop the limit")
    return prices


def _summary_prices(profile: Effective, spec: CompactionSpec, model: ModelSpec, limits: Limits) -> Prices:
    """Prices of the model that writes summaries: the known ones, unless it is the run's own."""
    from runner.providers.prices import lookup

    name = spec.summary_model
    if name is None or name == model.model or model.provider in LOCAL:
        return model.prices
    prices = lookup(name)
    if prices is None:
        if limits.cost is not None:
            what = f"summary_model: limits.cost is {limits.cost:g}, but the price of {name!r} is not known: "
            profile.problem(("compaction",), what + "use a model with known prices, or drop the limit")
        return Prices()
    return _filled(prices)


def _filled(prices: Prices) -> Prices:
    """An input price holds for cached input as well where that has none of its own."""
    return replace(
        prices,
        cache_read=prices.input if prices.cache_read is None else prices.cache_read,
        cache_write=prices.input if prices.cache_write is None else prices.cache_write,
    )


def read_script(profile: Effective, reader: Reader) -> tuple[JsonObject, ...]:
    """The answers of the ``scripted`` provider; none for another provider.

    Raises:
        ConfigError: The script is not named, cannot be read or is no script.
    """
    if profile.raw("model", "provider") != "scripted":
        return ()
    location = ("model", "script")
    text = profile.raw(*location)
    if text is None:
        problem = profile.document.problem(("model",), "script is missing: scripted takes its answers from a file")
        raise config_error(profile.document.source, [problem], hint="add model.script")
    path = Path(_path(profile, location, text))
    return parse_script(read_referenced(reader, path, profile.document, location))


def _sandbox(profile: Effective, environ: Mapping[str, str], untrusted: str | None) -> SandboxSpec:
    section = "sandbox"
    limits = _section(profile, section, SandboxLimits(), "limits")
    for each in fields(limits):
        if (section, "limits", each.name) not in profile.values:
            profile.note((section, "limits", each.name), getattr(limits, each.name), "default")
    network, egress = _network(profile, untrusted)
    sockets = profile.take(section, "unix_sockets", default=DEFAULTS["Sandbox.unix_sockets"])
    if sockets == "on" and untrusted == NO_NETWORK:
        sockets = "off"
        profile.note((section, "unix_sockets"), sockets, untrusted)
    allowed = tuple(profile.take(section, "env", "allow", default=[]))
    assigned = profile.take(section, "env", "set", default={}, convert=_without_null)
    for index, name in enumerate(allowed):
        _check_variables(profile, (section, "env", "allow", index), SandboxSpec(env_allow=(name,)))
    for name, text in assigned.items():
        _check_variables(profile, (section, "env", "set", name), SandboxSpec(env_set={name: text}))
    key_env = profile.raw("model", "api_key_env")
    if key_env in allowed:
        profile.problem((section, "env", "allow", allowed.index(key_env)), "is the model's key: remove it")
    return SandboxSpec(
        backend=profile.take(section, "backend", default=DEFAULTS["Sandbox.backend"]),
        require=tuple(profile.take(section, "require", default=[])),
        network=network,
        egress=egress,
        unix_sockets=sockets == "on",
        writable=_writable(profile, environ),
        hidden=_hidden(profile, environ),
        env_allow=allowed,
        env_set=dict(assigned),
        limits=limits,
        unprotected_git=profile.take(section, "unprotected_git", default=DEFAULTS["Sandbox.unprotected_git"]),
        keep_dac=profile.take(section, "keep_dac", default=DEFAULTS["Sandbox.keep_dac"]),
    )


def _network(profile: Effective, untrusted: str | None) -> tuple[bool, tuple[Endpoint, ...]]:
    """Whether commands reach the network, and if not, what they reach through the proxy."""
    location = ("sandbox", "network")
    given = profile.raw(*location)
    if untrusted and given not in (None, "off"):
        profile.note(location, "off", untrusted)
        return False, ()
    if not isinstance(given, dict):
        return profile.take(*location, default=DEFAULTS["Sandbox.network"]) == "on", ()
    from runner.sandbox.egress import parse_endpoint

    rules = []
    for index, text in enumerate(profile.take(*location, "allow")):
        try:
            rules.append(parse_endpoint(text))
        except ConfigError as error:
            profile.problem((*location, "allow", index), f"{error.message}; {error.hint}")
    if profile.raw("permission_mode") == Mode.DANGER_FULL_ACCESS.value:
        profile.problem(location, "nothing keeps to an allowlist in danger-full-access: choose another mode, off or on")
    return False, tuple(dict.fromkeys(rules))


def _check_variables(profile: Effective, location: Location, spec: SandboxSpec) -> None:
    """Let the sandbox say whether a variable may be passed on, and point to where it stands."""
    from runner.sandbox.environment import check_env_names

    try:
        check_env_names(spec)
    except ConfigError as error:
        for problem in error.problems:
            profile.problem(location, f"{problem.partition(': ')[2]}: remove it")


def _without_null(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _writable(profile: Effective, environ: Mapping[str, str]) -> tuple[str, ...]:
    paths = []
    for index, text in enumerate(profile.raw("sandbox", "writable") or []):
        location: Location = ("sandbox", "writable", index)
        path, problem = check_directory(text, profile.document.mark(location).directory, environ)
        if problem:
            profile.problem(location, problem)
        paths.append(path)
    profile.take("sandbox", "writable", default=[], convert=lambda _: paths)
    return tuple(paths)


def _hidden(profile: Effective, environ: Mapping[str, str]) -> tuple[str, ...]:
    paths = []
    for index, text in enumerate(profile.raw("sandbox", "hidden") or []):
        location: Location = ("sandbox", "hidden", index)
        home = environ.get("HOME")
        if text == "~" or text.startswith("~/"):
            if not os.path.isabs(home or ""):  # noqa: PTH117  # a text
                what = f"HOME is {home!r}, no absolute path" if home else "HOME is not set"
                profile.problem(location, f"{what}, so ~ means nothing: write the whole path")
            text = f"{home or ''}{text[1:]}"  # noqa: PLW2901  # the same path, written out
        paths.append(_path(profile, location, text))
    profile.take("sandbox", "hidden", default=[], convert=lambda _: paths)
    return tuple(paths)


def _tools(profile: Effective, sandbox: SandboxSpec, untrusted: str | None) -> ToolsSpec:
    default = ToolsSpec()
    reaches_nothing = not sandbox.network and not sandbox.egress
    allow = profile.take("tools", "allow")
    deny = profile.take("tools", "deny", default=[])
    for key, names in (("allow", allow or []), ("deny", deny)):
        for index, name in enumerate(names):
            if name not in KNOWN_TOOLS:
                profile.problem(("tools", key, index), f"{name!r}: {unknown_name(name, KNOWN_TOOLS, what='tool')}")
            elif key == "allow" and name in NETWORK_TOOLS and reaches_nothing and not untrusted:
                profile.problem(("tools", key, index), f"{name} needs sandbox.network on, or an allowlist there")
    parallel = profile.take("tools", "parallel", default=default.parallel)
    if reaches_nothing and allow is not None and any(name in NETWORK_TOOLS for name in allow):
        allow = [name for name in allow if name not in NETWORK_TOOLS]
        profile.note(("tools", "allow"), allow, untrusted or "sandbox.network")
    return ToolsSpec(allow=None if allow is None else tuple(allow), deny=tuple(deny), parallel=parallel)


def _policy(profile: Effective, reader: Reader) -> tuple[Policy, JsonObject]:
    """The policy and its resolved value."""
    from runner.config.policy import load_policy

    location: Location = ("approvals",)
    declared = profile.raw("approvals")
    if declared is None:
        document = Document("default", {"version": 1, "default": "deny", "rules": []}, {(): Mark("default", 0, 0, "/")})
        profile.note(location, None, "default", private=True)
    elif isinstance(declared, str):
        path = Path(_path(profile, location, declared))
        try:
            document = read_referenced(reader, path, profile.document, location)
        except ConfigError as error:
            if not path.exists():
                error.hint = shipped_policy_hint(declared) or error.hint
            raise
        profile.take("approvals", private=True)
    else:
        document = profile.document.child(location)
        document.value = _without_null(document.value)
        profile.note(location, "in the profile", profile.document.mark(location).origin, private=True)
    demand("policy", document)
    return load_policy(document), document.value
