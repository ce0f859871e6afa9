"""Placeholders in place of what is private, and the values in place of them again, however an answer is cut."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from typing import Any

from adapters.dialects.chat_answers import Assembly
from adapters.dialects.messages import MessageStream
from gateway.redaction.masking import Masking, Unmasking, unmasked
from gateway.redaction.rules import Rules, rules_of

EMAIL, PHONE = "anna.schmidt@example.org", "0171 1234567"


def test_one_value_has_one_placeholder_in_all_texts() -> None:
    masking = Masking(Rules())
    masked = masking.masked(["a@b.org and c@d.org", "again c@d.org from 10.1.2.3", "the literal [EMAIL_1]"])
    assert masked == ["[EMAIL_2] and [EMAIL_3]", "again [EMAIL_3] from [IP_1]", "the literal [EMAIL_1]"]
    text = unmasked("To [EMAIL_3], not [EMAIL_1] or [PHONE_1]", masking.values)
    assert text == "To c@d.org, not [EMAIL_1] or [PHONE_1]"


def test_a_value_is_masked_where_no_rule_could_tell() -> None:
    masking = Masking(Rules())
    first, second = masking.masked(["then 1234567890123 rings", "tel 1234567890123"])
    assert (first, second) == ("then [PHONE_1] rings", "tel [PHONE_1]")


def test_arguments_are_json_and_stay_so() -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "QUJD" * 20 + "\n-----END PRIVATE KEY-----"
    call = {"function": {"name": "keep", "arguments": json.dumps({"key": key})}}
    masking = Masking(Rules())
    messages: list[Any] = [{"content": f"my key: {key}"}, {"tool_calls": [call]}]
    masked = masking.masked(messages)
    assert masked[0]["content"] == "my key: [SECRET_1]"
    assert masked[1]["tool_calls"][0]["function"]["arguments"] == '{"key": "[SECRET_1]"}'
    assert masking.values == {"[SECRET_1]": key}
    assert unmasked(masked[1], masking.values) == {"tool_calls": [call]}


def test_arguments_stay_json_whatever_stands_before_a_value() -> None:
    """vLLM parses them, and refuses the whole conversation where it cannot."""
    said = {"to": f"Dear Anna,\n{EMAIL}", "card": 4111111111111111, "more": [f"m\u00fcller.{EMAIL}", -1, "[1]"]}
    for arguments in (json.dumps(said), json.dumps(said, ensure_ascii=False, indent=1)):
        masking = Masking(Rules())
        call = {"function": {"name": "mail", "arguments": arguments}}
        messages: list[Any] = [{"tool_calls": [call]}, f"I am {EMAIL}"]
        masked = masking.masked(messages)
        read = json.loads(masked[0]["tool_calls"][0]["function"]["arguments"])
        assert (read["to"], read["card"]) == ("Dear Anna,\n[EMAIL_1]", "[CARD_1]")
        assert read["more"][1:] == [-1, "[1]"] and masked[1] == "I am [EMAIL_1]"
        back = json.loads(unmasked(masked[0], masking.values)["tool_calls"][0]["function"]["arguments"])
        assert back == said | {"card": "4111111111111111"}


def test_many_values_take_no_long_time() -> None:
    """Nobody else is answered meanwhile."""
    began = time.thread_time()
    addresses = [f"anna{number}@example.org" for number in range(20_000)]
    # each begins with a letter of its own
    others = [f"{chr(0x4E00 + number)}@example.org" for number in range(6_000)]
    for texts in (addresses, ["\n".join(addresses)], others):
        masking = Masking(Rules())
        assert unmasked(masking.masked(texts), masking.values) == texts
        assert len(masking.values) == sum(text.count("@") for text in texts)
    in_a_row = "".join(f"+49151{number:07}" for number in range(4_000))
    masking = Masking(Rules())
    assert masking.masked(in_a_row) == "[PRIVATE_1]"
    assert unmasked("[PRIVATE_1]", masking.values) == in_a_row
    # it takes a small part of that, and took minutes
    assert time.thread_time() - began < 10.0


def test_a_picture_is_not_read() -> None:
    picture = {"type": "image_url", "image_url": {"url": f"https://a.org/{EMAIL}"}}
    assert Masking(Rules()).masked([EMAIL, picture]) == ["[EMAIL_1]", picture]


def chunk(index: int, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def cut(draw: random.Random, text: str) -> list[str]:
    places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(8))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def test_a_stream_says_the_same_however_it_is_cut() -> None:
    draw = random.Random(31)
    values = {"[EMAIL_1]": EMAIL, "[EMAIL_12]": 'a "quoted" one', "[PHONE_1]": PHONE}
    pieces = [*values, "[", "[EMAIL", "]", " text ", "[EMAIL_2]", "[PHONE_1"]
    for _ in range(300):
        answers: list[dict[str, Any]] = []
        chunks: list[list[dict[str, Any]]] = []
        for index in range(2):
            reasoning, content, words = ("".join(draw.choices(pieces, k=draw.randrange(5))) for _ in range(3))
            arguments = json.dumps({"to": words})
            of_call = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]
            parts = [chunk(index, role="assistant", content="")]
            parts += [chunk(index, reasoning=piece) for piece in cut(draw, reasoning)]
            parts += [chunk(index, content=piece) for piece in cut(draw, content)]
            parts.append(chunk(index, tool_calls=of_call))
            for piece in cut(draw, arguments):
                parts.append(chunk(index, tool_calls=[{"index": 0, "function": {"arguments": piece}}]))
            parts.append(chunk(index, "stop"))
            chunks.append(parts)
            message = {"reasoning": reasoning, "content": content, "arguments": arguments}
            answers.append(unmasked(message, values))
        unmasking = Unmasking(values)
        assemblies = [Assembly() for _ in answers]
        while any(chunks):
            index = draw.choice([place for place, parts in enumerate(chunks) if parts])
            for part in unmasking.take(chunks[index].pop(0)):
                (choice,) = part["choices"]
                assemblies[choice["index"]].take(part)
        assert list(unmasking.end()) == []
        for assembly, answer in zip(assemblies, answers, strict=True):
            message = assembly.answer().message
            assert (message.get("content") or "", message.get("reasoning") or "") == (
                answer["content"],
                answer["reasoning"],
            )
            (call,) = message["tool_calls"]
            assert call["function"]["arguments"] == answer["arguments"]
            json.loads(call["function"]["arguments"])


def test_what_is_held_goes_out_before_a_call_that_opens_without_arguments() -> None:
    """As vLLM opens them; a text in the middle of a call would break it in other dialects."""
    unmasking, stream = Unmasking({"[EMAIL_1]": EMAIL}), MessageStream()
    opening = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f"}}
    going_on = {"index": 0, "function": {"arguments": "{}"}}
    chunks = [chunk(0, content="see ["), chunk(0, tool_calls=[opening]), chunk(0, tool_calls=[going_on])]
    said = b"".join(stream.take(part) for each in [*chunks, chunk(0, "tool_calls")] for part in unmasking.take(each))
    assert said.index(b'"text":"["') < said.index(b'"type":"tool_use"') < said.index(b'"partial_json":"{}"')


def test_calls_of_one_index_stay_apart() -> None:
    """Some servers give all calls one index, or none, and some give none an id."""
    arguments = '{"to": "[EMAIL_1]"}'
    places: list[dict[str, Any]] = [{"index": 0}, {}, {"index": None}]
    for place, ids in itertools.product(places, (("call_0", "call_1"), ("", ""))):
        calls = [
            {**place, "id": name, "type": "function", "function": {"name": "f", "arguments": arguments}} for name in ids
        ]
        unmasking, assembly = Unmasking({"[EMAIL_1]": EMAIL}), Assembly()
        for part in (chunk(0, tool_calls=calls), chunk(0, "stop")):
            for out in unmasking.take(part):
                assembly.take(out)
        said = [call["function"]["arguments"] for call in assembly.answer().message["tool_calls"]]
        assert said == [f'{{"to": "{EMAIL}"}}'] * 2
        # what is held of one is not said by the next
        unmasking, assembly = Unmasking({"[EMAIL_1]": EMAIL}), Assembly()
        cuts = [
            {**call, "function": {"name": "f", "arguments": arguments[:end]}}
            for call, end in zip(calls, (11, 0), strict=True)
        ]
        rest = {**place, "function": {"arguments": arguments}}
        for part in (*(chunk(0, tool_calls=[cut]) for cut in cuts), chunk(0, tool_calls=[rest]), chunk(0, "stop")):
            for out in unmasking.take(part):
                assembly.take(out)
        said = [call["function"]["arguments"] for call in assembly.answer().message["tool_calls"]]
        assert said == [arguments[:11], f'{{"to": "{EMAIL}"}}']


def test_a_stop_text_that_was_masked_is_told_as_it_was_given() -> None:
    ending = chunk(0, "stop")
    ending["choices"][0]["stop_reason"] = "[EMAIL_1]"
    (out,) = Unmasking({"[EMAIL_1]": EMAIL}).take(ending)
    assert out["choices"][0]["stop_reason"] == EMAIL


def test_what_is_held_goes_out_at_the_end_of_a_stream_without_one() -> None:
    unmasking = Unmasking({"[EMAIL_1]": EMAIL})
    said = [*unmasking.take({"choices": [{"index": 0, "text": "to [EMA"}]}), *unmasking.end()]
    assert "".join(part["choices"][0]["text"] for part in said) == "to [EMA"


def test_an_empty_finish_reason_lets_nothing_go() -> None:
    """Some servers give one with each chunk."""
    unmasking = Unmasking({"[EMAIL_1]": EMAIL})
    parts = [chunk(0, "", content="to [EMA"), chunk(0, "", content="IL_1]"), chunk(0, "stop")]
    said = [out["choices"][0]["delta"].get("content", "") for part in parts for out in unmasking.take(part)]
    assert "".join(said) == f"to {EMAIL}"


def test_a_name_behind_a_backslash_that_is_no_escape_is_masked() -> None:
    arguments = json.dumps({"path": r"C:\Users\nadia\x", "by": "Yours,\nnadia"})
    texts: list[Any] = [r"see C:\Users\nadia\x", {"function": {"name": "read", "arguments": arguments}}]
    known, by_pattern = re.compile(r"(?<=I am )nadia"), re.compile(r"\bnadia\b")
    for pattern, first in ((known, "I am nadia"), (by_pattern, "hello")):
        masking = Masking(rules_of({"name": pattern}, []))
        masked: list[Any] = masking.masked([first, *texts])
        _, path, call = masked
        assert path == r"see C:\Users\[NAME_1]\x"
        read = json.loads(call["function"]["arguments"])
        assert read == {"path": r"C:\Users\[NAME_1]\x", "by": "Yours,\n[NAME_1]"}
        assert unmasked([path, call], masking.values) == texts


def test_a_pattern_with_a_backslash_is_masked() -> None:
    arguments = json.dumps({"account": r"CORP\robert"})
    masking = Masking(rules_of({"account": re.compile(r"CORP\\+\w+")}, []))
    call = {"function": {"name": "log_in", "arguments": arguments}}
    masked: list[Any] = masking.masked([r"as CORP\robert", call])
    assert masked[0] == "as [ACCOUNT_1]" and "robert" not in str(masked[1])


def test_an_address_with_an_escaped_letter_is_masked_whole() -> None:
    arguments = json.dumps({"to": "jos\u00e9@example.org"})
    masking = Masking(Rules())
    (call,) = masking.masked([{"function": {"name": "mail", "arguments": arguments}}])
    assert call["function"]["arguments"] == '{"to": "[EMAIL_1]"}'
    assert masking.values == {"[EMAIL_1]": "jos\u00e9@example.org"}
