"""The pydantic model of a profile file (``*.profile.yaml``).

Every key is optional in a file: what a chain of ``extends`` leaves open takes its default, and null
takes it back. What must be there in the end (a provider, a model) is checked by ``resolve``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Discriminator, Field, Tag

from runner.config.section import (
    Count,
    Delay,
    Duration,
    FileOrMapping,
    Memory,
    Names,
    Section,
    Size,
    Text,
    Variable,
    Version,
    in_words,
)
from runner.providers.address import address_problem, masked

if TYPE_CHECKING:
    from collections.abc import Callable

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]


def _address(key: str) -> Callable[[str], str]:
    def words(value: str) -> str:
        return f"{masked(value)!r} {address_problem(value, proxy=key == 'proxy') or 'is no address'}"

    return words


_URL: Final = r"^https?://[^\s/@?#]+(/[^\s?#]*)?$"
_PROXY: Final = r"^http://[^\s/?#]+/?$"
Address = Annotated[str, Field(pattern=_URL), in_words(_URL, _address("base_url"))]
Proxy = Annotated[str, Field(pattern=_PROXY), in_words(_PROXY, _address("proxy"))]
_CURRENCY: Final = r"^[A-Z]{3}$"


class Prices(Section):
    """Money per million tokens. Given here, they replace the known prices of the model."""

    input: Price | None = None
    """Uncached input."""

    cache_read: Price | None = None
    """Input read from the cache. Absent: the price of input."""

    cache_write: Price | None = None
    """Input written to the cache. Absent: the price of input."""

    output: Price | None = None
    """Output, reasoning included."""

    currency: (
        Annotated[str, Field(pattern=_CURRENCY), in_words(_CURRENCY, "is no currency: write three capitals, as in USD")]
        | None
    ) = None
    """Three letters."""


class ModelSection(Section):
    """Which model answers, and how it is reached."""

    provider: Literal["openai", "scripted", "replay"] | None = None
    """`openai`: any endpoint that speaks OpenAI's chat completions. `scripted`: answers from a file, costs nothing.
    `replay`: the answers of a recorded session, costs nothing; ends with LOG_INVALID where the run goes another way."""

    model: Text | None = None
    """Name of the model, as the endpoint knows it."""

    base_url: Address | None = None
    """Address of the endpoint, up to and without `/chat/completions`."""

    api_key_env: Variable | None = None
    """Environment variable that holds the key. Without a `base_url`: OPENAI_API_KEY; with one: no key is sent."""

    api_key_file: Text | None = None
    """File that holds the key, in place of a variable. It must lie outside the workspace."""

    context_window: Size | None = None
    """Tokens that fit the model. Absent: what is known of the model; 128,000 for `scripted`; what was recorded for
    `replay`."""

    unknown_window: Size | None = None
    """Tokens to assume when nothing is known of the model. Absent: an unknown model needs `context_window`."""

    max_output_tokens: Size | None = None
    """Most tokens of one answer; lowered to what fits the window."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature. Absent: the endpoint's own."""

    tool_choice: Literal["auto", "required", "none"] | None = None
    """Whether the model may, must or must not call tools. Absent: the endpoint's own."""

    images: bool | None = None
    """Whether the model takes images: those that `read_file` finds are then sent to it, otherwise only named.
    Absent: true for models that are known to take them."""

    proxy: Proxy | None = None
    """HTTP proxy for the requests to the model. A password in it is kept out of logs and reports."""

    first_token: Duration | None = None
    """Longest wait for the first byte of an answer."""

    prices: Prices | None = None
    """Money per million tokens."""

    script: Text | None = None
    """File with the answers of the `scripted` provider."""

    replay: Text | None = None
    """Session that the `replay` provider plays: an artifacts directory, a log, or an exported ZIP."""

    replay_normalise: list[Text] | None = None
    """Regular expressions, at most 50: what they match may differ between the recording and its replay."""


class SandboxEnvironment(Section):
    """Environment of commands, beyond the few variables that are always passed on."""

    allow: list[Variable] | None = None
    """Variables passed on from the runner's own environment."""

    set: dict[Variable, str | None] | None = None
    """Variables set to a value; null takes an inherited one out."""


class SandboxLimits(Section):
    """Resources of one command."""

    memory: Memory | None = None
    """Bytes of memory, at least 16M."""

    processes: Count | None = None
    """Number of processes."""

    file_size: Size | None = None
    """Bytes of the largest file."""


class NetworkAllow(Section):
    """An allowlist for the network. Commands get through by a proxy, which needs a backend with network namespaces."""

    allow: Annotated[list[Text], Field(min_length=1)]
    """`host:port` each. An address of this machine or of a private network must be named itself, not by a host name."""


# A mapping is an allowlist and anything else one of the words, so that what is wrong is said of one of them only.
Network = Annotated[
    Annotated[Literal["off", "on"], Tag("[word]")] | Annotated[NetworkAllow, Tag("[allowlist]")],
    Discriminator(lambda value: "[allowlist]" if isinstance(value, dict) else "[word]"),
]


class Sandbox(Section):
    """What confines the commands and file tools of the agent."""

    backend: Literal["auto", "bubblewrap", "landlock", "seatbelt"] | None = None
    """`auto` takes the first that passes a probe on this machine. A named one is never replaced by another."""

    require: list[Literal["pid_isolation", "git_protect", "metadata", "private_shm", "signal_scope"]] | None = None
    """Properties without which the run does not start."""

    network: Network | None = None
    """Whether commands reach the network: `off`, `on`, or only the places that `allow` names."""

    unix_sockets: Literal["off", "on"] | None = None
    """Whether commands may connect to Unix sockets."""

    writable: list[Text] | None = None
    """Directories besides the workspace that are writable in workspace-write."""

    hidden: list[Text] | None = None
    """Paths that commands must not see."""

    env: SandboxEnvironment | None = None
    """Environment of commands."""

    limits: SandboxLimits | None = None
    """Resources of one command."""

    unprotected_git: bool | None = None
    """Whether commands may write in `.git`."""

    keep_dac: bool | None = None
    """Whether a root runner keeps the right to write in a workspace that belongs to another user."""


class Tools(Section):
    """Which tools the model is offered, by their exact names."""

    allow: list[Text] | None = None
    """Tools that are offered. Absent: all built-in tools that need no network."""

    deny: list[Text] | None = None
    """Tools that are not offered, even if `allow` lists them."""

    parallel: Annotated[int, Field(ge=1, le=64)] | None = None
    """Most calls that run at once."""


class CompactionValues(Section):
    """How the history is kept inside the window."""

    spill_bytes: Size | None = None
    """A tool result over so many UTF-8 bytes is spilled to a file."""

    spill_head: Size | None = None
    """Bytes of a spilled result's start that stay."""

    spill_tail: Size | None = None
    """Bytes of a spilled result's end that stay."""

    prune_over: Size | None = None
    """Under pressure, older results over so many characters are cut."""

    prune_head: Size | None = None
    """Characters of a cut result's start that stay."""

    prune_tail: Size | None = None
    """Characters of a cut result's end that stay."""

    summary_at: Share | None = None
    """Share of the window at which older messages are replaced by a summary."""

    keep: Share | None = None
    """Share of the window that stays verbatim beside the summary."""

    summary_max_tokens: Size | None = None
    """Most tokens of a summary."""

    summary_model: Text | None = None
    """Model that writes summaries. Absent: the run's own."""

    min_output: Size | None = None
    """Fewest tokens that must be left for an answer."""


class CompactionOverride(CompactionValues):
    """Values for one model; the others are those beside `models`."""


class Compaction(CompactionValues):
    """How the history is kept inside the window, with overrides by model."""

    models: dict[str, CompactionOverride | None] | None = None
    """Values for a model, by its name."""


class Limits(Section):
    """Where a run ends."""

    steps: Count | None = None
    """Model requests with the tool calls they ask for."""

    turns: Count | None = None
    """User messages that are handled, failed checks included."""

    wall: Duration | None = None
    """Time in all."""

    idle: Duration | None = None
    """Time without a byte from the model while no tool, check or setup command runs."""

    tool: Duration | None = None
    """Time of one tool call."""

    cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Money, in the currency of the prices. Absent: no limit."""

    tokens: Size | None = None
    """Input and output tokens in all. Absent: no limit."""

    input_tokens: Size | None = None
    """Input tokens in all, those read from and written to the provider's cache included. Absent: no limit."""

    output_tokens: Size | None = None
    """Output tokens in all, reasoning included. Absent: no limit."""

    tool_time: Duration | None = None
    """Time of all tool calls together; of calls that run at the same time each counts. What runs in the background
    does not. Absent: no limit."""

    output_bytes: Size | None = None
    """Bytes that tools may put out in all."""


class ProfileLimits(Limits):
    """Where a run ends: with the limit's own code, after a warning to the model at 90 %."""


class Retry(Section):
    """How often a failed model request is tried again."""

    attempts: Annotated[int, Field(ge=1, le=100)] | None = None
    """Attempts for one request in all, the first included."""

    seconds: Delay | None = None
    """Time that the attempts for one request may take in all."""


class Artifacts(Section):
    """What is written about the run."""

    visibility: Literal["private"] | None = None
    """Who may read the artifacts."""


class ProfileModel(Section):
    """A profile: model, permissions, sandbox, tools and limits of a run."""

    version: Version
    """Version of the format."""

    extends: Names | None = None
    """Shipped profile or file, or a list of them, that this one builds on. Later ones go before earlier ones:
    mappings merge, scalars and lists replace, null takes the default back."""

    model: ModelSection | None = None
    """Which model answers, and how it is reached."""

    permission_mode: Literal["read-only", "workspace-write", "danger-full-access"] | None = None
    """What the agent may write: nothing, the workspace, or anything."""

    accept_unconfined: bool | None = None
    """Must be true for danger-full-access, which confines nothing."""

    sandbox: Sandbox | None = None
    """What confines commands and file tools."""

    tools: Tools | None = None
    """Which tools the model is offered."""

    approvals: FileOrMapping | None = None
    """Policy file, or the policy itself. The policy of a shipped profile comes with `extends`. Absent: every call is
    denied."""

    on_denied: Literal["continue", "abort"] | None = None
    """Whether the run goes on after a denied call or ends with POLICY_DENIED."""

    compaction: Compaction | None = None
    """How the history is kept inside the window."""

    limits: ProfileLimits | None = None
    """Where a run ends."""

    retry: Retry | None = None
    """How often a failed model request is tried again."""

    artifacts: Artifacts | None = None
    """What is written about the run."""

    overridable: list[Text] | None = None
    """Keys, or prefixes of keys, that `--set` and tasks may change. Not inherited."""
