"""A known secret is found in every form it takes, and nothing else is."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import time
import urllib.parse
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import ConfigError
from runner.redaction import Redactor

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = 'sk-proj/AbC+123"456\\789é=end'
PLAIN = "ghp_0123456789abcdefABCDEF"
FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "percent-encoded": lambda secret: urllib.parse.quote(secret, safe=""),
    "percent-encoded, small letters": lambda secret: re.sub(
        "%..", lambda match: match[0].lower(), urllib.parse.quote(secret, safe="")
    ),
    "percent-encoded path": urllib.parse.quote,
    "form-encoded": urllib.parse.quote_plus,
    "JSON": lambda secret: json.dumps(secret)[1:-1],
    "JSON, unescaped": lambda secret: json.dumps(secret, ensure_ascii=False)[1:-1],
    "JSON in JSON": lambda secret: json.dumps(json.dumps({"key": secret})),
    "hex": lambda secret: secret.encode().hex(),
    "HEX": lambda secret: secret.encode().hex().upper(),
    "base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "base64 of a header": lambda secret: base64.b64encode(b"user:" + secret.encode()).decode(),
    "base64 for addresses": lambda secret: base64.urlsafe_b64encode(b"a" + secret.encode() + b"zz").decode(),
}


@pytest.mark.parametrize("secret", [SECRET, PLAIN])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_secret_in_any_form_is_replaced_by_its_name(form: Callable[[str], str], secret: str) -> None:
    """Between other text, which stays."""
    redactor = Redactor({"MY_KEY": secret})
    written = form(secret)
    text, count = redactor.text(f"before {written} after")

    assert redactor.holds(f"before {written} after")
    assert count == 1
    assert "[redacted MY_KEY]" in text
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert not redactor.holds(text)


@settings(max_examples=200, deadline=None)
@given(
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=6, max_size=40),
    before=st.binary(max_size=8),
    after=st.binary(max_size=8),
)
def test_a_secret_is_found_in_base64_at_every_alignment(secret: str, before: bytes, after: bytes) -> None:
    """Whatever stands before and behind it in the encoded bytes."""
    redactor = Redactor({"K": secret})
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert redactor.holds(encode(before + secret.encode() + after).decode())


def test_the_tools_of_a_shell_do_not_get_a_secret_past_it() -> None:
    """What a command makes of an environment variable on its way out."""
    redactor = Redactor({"MY_KEY": PLAIN})
    for command in (
        "printf %s $K",
        "printf %s $K | base64 -w0",
        "printf x%s $K | base64 -w0",
        "printf %s $K | od -An -tx1",
    ):
        output = subprocess.run(
            ["sh", "-c", command], env={"K": PLAIN, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
        ).stdout
        assert redactor.holds("".join(output.split()))


def test_each_secret_is_replaced_by_its_own_name_and_counted() -> None:
    """A longer one that begins like a shorter one is replaced whole."""
    redactor = Redactor({"SHORT": "abcdef", "LONG": "abcdef-and-more"})

    assert redactor.text("abcdef abcdef-and-more abcdef") == (
        "[redacted SHORT] [redacted LONG] [redacted SHORT]",
        3,
    )


def test_the_long_lines_of_a_private_key_are_secrets_of_their_own() -> None:
    """A program may print them with other line ends, or one alone; the frame around them is public."""
    lines = [
        "-----BEGIN KEY-----",
        "MIIEvQIBADANBgkqhkiG9w0BAQEF",
        "AASCBKcwggSjAgEAAoIBAQC7VJTU",
        "short",
        "-----END KEY-----",
    ]
    redactor = Redactor({"PEM": "\n".join(lines) + "\n"})

    assert redactor.text("\r\n".join(lines))[0].count("[redacted PEM]") == 2
    assert redactor.holds(f"x {lines[1]} y")
    assert not redactor.holds(f"{lines[0]} {lines[3]} {lines[4]}")


def test_ordinary_text_is_left_alone() -> None:
    """The very same object comes back, also without any secret to look for."""
    text = "nothing to see here: sk-proj, ghp_, 0123456789"
    redactor = Redactor({"MY_KEY": SECRET})

    assert redactor.text(text) == (text, 0)
    assert not redactor.holds(text)
    nothing = Redactor({})
    assert nothing.text(SECRET) == (SECRET, 0)
    assert not nothing.holds(SECRET)
    value = {"a": [SECRET]}
    assert nothing.value(value)[0] is value


def test_a_json_value_is_redacted_everywhere() -> None:
    """Keys, values, lists; numbers and null stay what they are."""
    redactor = Redactor({"K": PLAIN})
    value = {"list": ["x", f"a{PLAIN}b", {"deep": PLAIN}], PLAIN: 1, "number": 1.5, "null": None, "yes": True}

    assert redactor.value(value) == (
        {
            "list": ["x", "a[redacted K]b", {"deep": "[redacted K]"}],
            "[redacted K]": 1,
            "number": 1.5,
            "null": None,
            "yes": True,
        },
        3,
    )


@pytest.mark.parametrize("secret", ["", "12345", "ééé"[:2]])
def test_a_secret_too_short_to_be_told_from_text_is_refused(secret: str) -> None:
    """And not shown; six bytes are enough."""
    with pytest.raises(ConfigError, match="the secret MY_KEY is shorter than 6 bytes") as caught:
        Redactor({"MY_KEY": secret})

    assert not secret or secret not in caught.value.message
    assert Redactor({"MY_KEY": "ééé"}).holds("xéééx")


def _wrapped(text: str, columns: int, end: str) -> str:
    return end.join(text[at : at + columns] for at in range(0, len(text), columns))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\\n", "\\r\\n"], ids=["LF", "CRLF", "LF in JSON", "CRLF in JSON"])
@pytest.mark.parametrize("columns", [1, 7, 60, 76])
def test_a_secret_cut_into_lines_is_found(columns: int, end: str) -> None:
    """As base64 and ``xxd -p`` cut it, at every alignment; what stands around it stays."""
    redactor = Redactor({"K": SECRET})
    for before in range(4):
        raw = b"\xff" * before + SECRET.encode() + b"tail"
        for written in (base64.b64encode(raw).decode(), raw.hex(), raw.hex().upper()):
            text, count = redactor.text(f"[{_wrapped(written, columns, end)}]")
            assert count == 1
            assert text.startswith("[")
            assert text.endswith("]")
            assert not redactor.holds(text)


def test_the_tools_of_a_shell_cut_lines_too() -> None:
    """A key long enough for two lines."""
    key = PLAIN * 4
    redactor = Redactor({"MY_KEY": key})
    for command in ("printf %s $K | base64", "printf xx%s $K | base64", "printf %s $K | od -An -v -tx1 | tr -d ' '"):
        output = subprocess.run(
            ["sh", "-c", command], env={"K": key, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
        ).stdout
        assert "\n" in output.strip()
        assert redactor.holds(output)


def _mixed(text: str) -> str:
    return "".join(each.upper() if at % 2 else each.lower() for at, each in enumerate(text))


def test_hex_digits_may_be_of_either_case() -> None:
    """In hex, percent-encoding and JSON escapes; letters of the secret itself may not."""
    redactor = Redactor({"K": SECRET})
    quoted = re.sub("%..", lambda match: _mixed(match[0]), urllib.parse.quote(SECRET, safe=""))
    escaped = json.dumps(SECRET)[1:-1].replace("\\u00e9", "\\u00E9")
    assert "\\u00E9" in escaped
    for written in (_mixed(SECRET.encode().hex()), quoted, escaped, json.dumps(escaped)[1:-1]):
        assert redactor.text(f"a {written} b") == ("a [redacted K] b", 1)
    assert not redactor.holds(SECRET.upper())
    assert not redactor.holds(urllib.parse.quote(SECRET, safe="").upper())


def test_a_form_behind_a_backslash_is_found() -> None:
    """A backslash before it is no part of a line end, whatever letter the form begins with."""
    secret = "\x9f\x9f-0123456789"  # a made-up key
    base = base64.b64encode(b"\0\0" + secret.encode()).decode()
    forms = [base64.urlsafe_b64encode(b"\0" * offset + secret.encode()).decode() for offset in range(3)]
    found = [form[at:] for form in [base, *forms] for at in range(5) if Redactor({"K": secret}).holds(form[at:])]
    assert found
    for form in found:
        assert Redactor({"K": secret}).holds(f"C:\\{form}")
    for first in "nr":
        assert Redactor({"K": f"{first}-0123456789"}).holds(f"C:\\{first}-0123456789")


@pytest.mark.parametrize("text", ["some text and code 0123\n" * 4_000, "QUJDREVG0123abcdef\n" * 5_000])
def test_looking_for_a_secret_is_cheap(text: str) -> None:
    """About a millisecond for 100 KB; a pattern of all forms takes a hundred times longer."""
    redactor = Redactor({"K": SECRET})
    started = time.process_time()
    for _ in range(20):
        redactor.text(text)

    assert (time.process_time() - started) / 20 < 0.01


def test_bytes_are_searched_across_pieces() -> None:
    """Also where they are no text, and behind the marks of a patch's lines."""
    data = b"\xff\x00" * 50 + _wrapped(base64.b64encode(SECRET.encode()).decode(), 20, "\n").encode() + b"\xfe" * 9
    for cut in range(len(data)):
        scan = Redactor({"K": SECRET}).scan()
        scan.feed(data[:cut])
        assert scan.feed(data[cut:]) == "K"
    patch = b"+".join(data.splitlines(keepends=True))
    assert Redactor({"K": SECRET}).scan().feed(patch) is None
    assert Redactor({"K": SECRET}).scan(patch=True).feed(patch) == "K"
    assert Redactor({}).scan().feed(data) is None
    assert Redactor({"K": "another-key"}).scan(patch=True).feed(data) is None
