"""What the built-in rules find, and that masking loses nothing."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.redaction import Making, cases, measure
from gateway.redaction.masking import Masking, unmasked
from gateway.redaction.rules import Rules

JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c"
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7\n-----END PRIVATE KEY-----"


spans, private = Rules().spans, Rules().private


def found(text: str) -> list[str]:
    return [f"{span.kind} {text[span.start : span.end]}" for span in spans(text)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("write to <anna.o'brien+x@mail.example.co.uk>.", "email anna.o'brien+x@mail.example.co.uk"),
        ("mailto:müller@münchen.de", "email müller@münchen.de"),
        ("(+49 30 1234567)", "phone +49 30 1234567"),
        ("(030 1234567)", "phone 030 1234567"),
        ("Tel. 5551234", "phone 5551234"),
        ("refund DE89 3704 0044 0532 0130 00 please", "iban DE89 3704 0044 0532 0130 00"),
        ("gb29nwbk60161331926819", "iban gb29nwbk60161331926819"),
        ("4111-1111-1111-1111, exp 12/27", "card 4111-1111-1111-1111"),
        ("3782 822463 10005", "card 3782 822463 10005"),
        (f"Bearer {JWT}", f"secret {JWT}"),
        (f"key:\n{PEM}\n", f"secret {PEM}"),
        ("AWS AKIAIOSFODNN7EXAMPLE".replace("EXAMPLE", "ABCDEFG"), "secret AKIAIOSFODNN7ABCDEFG"),
        ("ssh root@10.1.2.3", "ip 10.1.2.3"),
        ("http://[2001:db8::8a2e:370:7334]:80/", "ip 2001:db8::8a2e:370:7334"),
        ("::ffff:192.0.2.128", "ip ::ffff:192.0.2.128"),
    ],
)
def test_what_is_private_is_found_to_the_character(text: str, value: str) -> None:
    assert found(text) == [value]


@pytest.mark.parametrize(
    "value",
    ["anna@example.org", "+49 30 1234567", "4111-1111-1111-1111", JWT, "AKIAIOSFODNN7ABCDEFG", "10.1.2.3"],
)
@pytest.mark.parametrize("before", ["a\n", "a\t", "a\r\n", "\u4f60\u597d"])
def test_in_json_a_value_is_found_behind_an_escape(before: str, value: str) -> None:
    """As it stands in the arguments of a call, and in what most tools give back."""
    (seen,) = found(json.dumps({"said": f"{before}{value}"}))
    assert seen.partition(" ")[2] == value


@pytest.mark.parametrize("in_json", [False, True])
@pytest.mark.parametrize("number", ["\\u002B49 30 1234567", "\\u002b4915112345678", "030\\/1234567", "(030\\/1234567)"])
def test_a_number_is_found_whose_plus_or_slash_is_escaped(number: str, in_json: bool) -> None:
    """As serialisers of .NET and PHP write it."""
    text = f'{{"said": "call {number} now"}}'
    (seen,) = Rules().spans(text, in_json=in_json)
    assert (seen.kind, text[seen.start : seen.end]) == ("phone", number.strip("()"))
    masking = Masking(Rules())
    masked = masking.masked({"arguments" if in_json else "content": text})
    assert masking.values == {"[PHONE_1]": json.loads(f'"{number}"').strip("()")}
    assert [json.loads(said) for said in unmasked(masked, masking.values).values()] == [json.loads(text)]


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com:acme/app.git",
        "icon@2x.png",
        "y = W@x.mean()",
        "4111 1111 1111 1112",  # Luhn
        "5105105105105100123",  # no length of its issuer
        "DE88 3704 0044 0532 0130 00",  # mod 97
        "DE89 3704 0044 0532 0130",  # too short
        "ticket 415-555-2671",
        "order no. 0171 1234567",
        "01.02.2026 10:30",
        "v1.2.3.4, version 1.2.3.4, libfoo.so.1.2.3.4, pkg==1.2.3.4",
        "127.0.0.1 0.0.0.0 255.255.255.0 256.1.1.1 ::1",
        "12:30:45 face::add std::vec 00:1a:2b:3c:4d:5e",
        "sk-fading-circle-delay-12",
        "eyJhbGciOnoJSON.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4",
        "a line '-----BEGIN PRIVATE KEY-----' begins a key",
    ],
)
def test_look_alikes_are_left(text: str) -> None:
    assert found(text) == []


def test_the_seeded_set_is_found_as_the_benchmark_says() -> None:
    report = measure(cases(31, 600))
    assert report["recall"] >= 0.98 and report["precision"] >= 0.95, report


def test_private_reads_every_text_of_a_message_but_pictures() -> None:
    arguments = '{"to": "a@b.org"}'
    assert private({"role": "assistant", "tool_calls": [{"function": {"name": "mail", "arguments": arguments}}]})
    assert private({"content": [{"type": "text", "text": "a@b.org"}]})
    picture = {"type": "image_url", "image_url": {"url": "https://a.org/a@b.org"}}
    assert not private({"content": [picture, {"type": "text", "text": "what is this?"}], "n": 2, "x": None})


def piece_of(seed: int, kind: str) -> str:
    return getattr(Making(seed), kind)()


_KINDS = st.sampled_from(["email", "phone", "iban", "card", "secret", "ip", "look_alike"])
_PIECES = st.one_of(
    st.builds(piece_of, st.integers(0, 10**6), _KINDS),
    st.sampled_from(
        ["[EMAIL_1]", "[", "]", "@", ".", ":", "-", " ", "\n", "+", "(", "0", "4", "a", "sk-", "tel ", "\\n", "\\"]
    ),
    st.text(max_size=10),
)


@given(st.lists(st.lists(_PIECES, max_size=8).map("".join), max_size=4))
def test_masking_loses_nothing_and_leaves_nothing(texts: list[str]) -> None:
    for text in texts:
        seen = spans(text)
        assert all(0 <= span.start < span.end <= len(text) for span in seen)
        assert all(before.end <= after.start for before, after in pairwise(seen))
        assert private(text) == bool(seen)
    masking = Masking(Rules())
    masked = masking.masked(texts)
    assert unmasked(masked, masking.values) == texts
    assert not any(spans(text) for text in masked)
    assert len(set(masking.values.values())) == len(masking.values)


@pytest.mark.parametrize(
    "piece", ["a@", "1.", "::", "0 ", "(", "+1", "-----BEGIN PRIVATE KEY-----", "eyJ", "sk-a", "DE89 "]
)
def test_no_text_takes_long(piece: str) -> None:
    """100,000 characters of what begins something and never ends; quadratic work would take minutes."""
    spans(piece * (100_000 // len(piece)))


@pytest.mark.parametrize("piece", ["eyJ", "-eyJ", ":a"])
def test_a_long_text_of_beginnings_is_read_once(piece: str) -> None:
    """Nobody else is answered meanwhile."""
    began = time.thread_time()
    spans(piece * (1_000_000 // len(piece)))
    # it takes a small part of that, and took several times as long, some from each place on
    assert time.thread_time() - began < 5.0


def test_a_token_is_found_behind_the_beginning_of_another() -> None:
    assert found(f"eyJabcdefgh-{JWT}") == found(f"eyJabcdefgh.{JWT}") == [f"secret {JWT}"]
