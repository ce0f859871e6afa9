"""Placeholders such as ``[EMAIL_1]`` in place of what is private, and the values in place of them again.

Invariant: a masked text has nothing private by the rules, and no value that another text of the same request shows to
be private; JSON stays JSON; unmasking gives back what was masked, a number of JSON as a text. The same value has the
same placeholder in the whole request, and in the next one of its conversation, since values are numbered in their
order. However a stream is cut into chunks, what it says together is the whole answer, unmasked.
"""

from __future__ import annotations

import json
import re
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Set
from operator import neg
from typing import Any, TypeVar, cast

from adapters.dialects.chat_answers import begins_another
from gateway.redaction.rules import PLACEHOLDER, Rules, media_in

Chunk = dict[str, Any]
T = TypeVar("T")

#: The texts of a message or a delta.
_TEXTS = ("reasoning", "reasoning_content", "content", "refusal")
#: The only field of a message whose text is JSON itself: of a call.
_ARGUMENTS = "arguments"
CALLS = frozenset({_ARGUMENTS})
#: The same where the whole answer has to be JSON.
ALL_JSON = CALLS | {"content", "text"}
#: A string of JSON, or a placeholder that stands for a number.
_IN_JSON = re.compile(rf'"(?:[^"\\]|\\.)*"|-?{PLACEHOLDER.pattern}', re.DOTALL)
#: Where a value may begin that is known: no part of a word, but for the escape before it in JSON. A letter behind one
#: backslash is part of an escape, unless it stands in no JSON.
_BEGIN = r"(?:(?<!\w)(?!(?<=\\)[nrtu])|(?<=(?<!\\)\\\\)|(?<=\\[nrt])|(?<=\\u[0-9a-fA-F]{4})|(?P<no_json>(?<!\w)))"
_WORD = re.compile(r"\w")
#: The first letter beyond ASCII.
_OTHER = "\x80"
#: Beyond these a text, which is read once in each, is private as a whole: a row of numbers without blanks would take
#: minutes.
_MOST_ROUNDS = 30
#: Fields of the first chunk that a further one has, too.
_HEAD = ("id", "object", "created", "model")


class Masking:
    """Of one request.

    Attributes:
        values: what each placeholder stands for.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.values: dict[str, str] = {}
        self._taken: set[str] = set()
        #: by value, and by value as it stands in JSON
        self._placeholders: dict[str, str] = {}
        #: by their first letter, the longest first; those beyond ASCII are one, or there would be a pattern for each
        self._lengths: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}

    def masked(self, value: T) -> T:
        """``value`` (JSON) with placeholders that none of its texts holds already; pictures and sounds stay."""
        texts: list[tuple[str, bool]] = []
        _mapped(value, lambda text, in_json: texts.append((text, in_json)) or text)
        self._taken.update(name for text, _ in texts for name in PLACEHOLDER.findall(text))
        for text, in_json in texts:
            self._masked(text, in_json)
        # once more: what one text shows to be private may stand in an earlier one, where no rule can tell
        return _mapped(value, self._masked) if self.values else value

    def _masked(self, text: str, in_json: bool) -> str:
        whole, rounds = text, 0
        if self._lengths:
            text = self._without_known(text, in_json)
        # where a part is gone, its neighbour may stand free and become one
        while private := self._rules.spans(text, in_json=in_json):
            rounds += 1
            if rounds > _MOST_ROUNDS:
                text = self._placeholder("private", whole, in_json)
                break
            parts, end = [], 0
            for span in private:
                placeholder = self._placeholder(span.kind, text[span.start : span.end], in_json)
                parts += [text[end : span.start], placeholder]
                end = span.end
            text = "".join([*parts, text[end:]])
        # of what is private in JSON a number can be the whole
        return (
            _IN_JSON.sub(lambda match: match[0] if match[0][0] == '"' else f'"{match[0]}"', text) if in_json else text
        )

    def _without_known(self, text: str, in_json: bool) -> str:
        """``text`` with placeholders for the values that are known; at each place they are looked up by their lengths,
        since a pattern of thousands of them takes minutes."""
        parts, end = [], 0
        letters = re.escape("".join(self._lengths)).replace(_OTHER, rf"{_OTHER}-\U0010ffff")
        for begin in re.finditer(rf"(?=[{letters}]){_BEGIN}", text):
            if (at := begin.start()) < end:
                continue
            for length in self._lengths[min(text[at], _OTHER)]:
                value = text[at : at + length]
                if value in self._placeholders and not _WORD.match(text, at + length):
                    is_known = not in_json or begin["no_json"] is None
                    parts += [text[end:at], self._placeholders[value] if is_known else value]
                    end = at + length
                    break
        return "".join([*parts, text[end:]])

    def _placeholder(self, kind: str, value: str, in_json: bool) -> str:
        if value not in self._placeholders:
            # a phone has a backslash only where the text quotes JSON
            plain = _unescaped(value) if in_json or kind == "phone" else value
            self._know(value, self._placeholders.get(plain) or self._new(kind, plain))
        return self._placeholders[value]

    def _new(self, kind: str, value: str) -> str:
        while True:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            name = f"[{kind.upper()}_{self._counts[kind]}]"
            if name not in self._taken:
                break
        # a value that was found later may hold an earlier placeholder
        self.values[name] = unmasked(value, self.values)
        self._know(value, name)
        self._know(_escaped(value), name)
        return name

    def _know(self, value: str, name: str) -> None:
        self._placeholders[value] = name
        lengths = self._lengths.setdefault(min(value[0], _OTHER), [])
        if len(value) not in lengths:
            insort(lengths, len(value), key=neg)


def unmasked(value: T, values: Mapping[str, str], json_fields: Set[str] = CALLS) -> T:
    """``value`` (JSON) with ``values`` in place of their placeholders; the texts of ``json_fields`` are JSON."""
    return _mapped(value, lambda text, in_json: _filled(text, values, in_json), json_fields) if values else value


class Unmasking:
    """Puts ``values`` back in the chunks of one stream, of chats or of raw completions; ``json_fields`` as of
    :func:`unmasked`."""

    def __init__(self, values: Mapping[str, str], json_fields: Set[str] = CALLS) -> None:
        self._values = values
        self._json_fields = json_fields
        #: the beginning of a placeholder, by choice and text, until more of it has come
        self._held: dict[tuple[int, str | int], str] = {}
        #: of the latest call, by choice and index
        self._ids: dict[tuple[int, int], str] = {}
        self._head: Chunk = {}

    def take(self, chunk: Chunk) -> Iterator[Chunk]:
        """What goes out for ``chunk``: itself, and before it what was held back for another text."""
        self._head = {name: chunk[name] for name in _HEAD if name in chunk}
        choices = [_copied(choice) for choice in cast("list[Chunk]", chunk.get("choices") or [])]
        for choice in choices:
            index: int = choice.get("index", 0)
            # some servers give an empty one with each chunk
            over = bool(choice.get("finish_reason"))
            if isinstance(stop := choice.get("stop_reason"), str):
                choice["stop_reason"] = _filled(stop, self._values, in_json=False)
            calls: list[Chunk] = (choice.get("delta") or {}).get("tool_calls") or []
            texts = list(_texts_in(choice))
            names = [name for name, _, _ in texts]
            for call in calls:
                of_call = index, _index_of(call)
                if begins_another(call, self._ids.get(of_call)):
                    yield from self._let_go([at for at in self._held if at == of_call])
                self._ids[of_call] = call.get("id") or self._ids.get(of_call, "")
            # a call may open without a text
            if texts or over or calls:
                yield from self._let_go([(at, name) for at, name in self._held if at == index and name not in names])
            for number, (name, fields, key) in enumerate(texts, 1):
                text = self._held.pop((index, name), "") + fields[key]
                cut = len(text) if over or name in names[number:] else self._cut(text)
                if cut < len(text):
                    self._held[index, name] = text[cut:]
                fields[key] = _filled(text[:cut], self._values, key in self._json_fields)
        yield {**chunk, "choices": choices} if choices else chunk

    def end(self) -> Iterator[Chunk]:
        """What is left of a stream that ended without saying why."""
        yield from self._let_go(list(self._held))

    def _cut(self, text: str) -> int:
        """Where the beginning of a placeholder stands at the end of ``text``."""
        begin = text.rfind("[")
        cut = begin >= 0 and "]" not in text[begin:] and any(name.startswith(text[begin:]) for name in self._values)
        return begin if cut else len(text)

    def _let_go(self, fields: list[tuple[int, str | int]]) -> Iterator[Chunk]:
        for index, name in fields:
            text = self._held.pop((index, name))
            choice: Chunk = {"index": index, "finish_reason": None, "logprobs": None}
            if isinstance(name, int):
                choice["delta"] = {"tool_calls": [{"index": name, "function": {_ARGUMENTS: text}}]}
            elif name == "text":
                choice["text"] = text
            else:
                choice["delta"] = {name: text}
            yield {**self._head, "choices": [choice]}


def _copied(choice: Chunk) -> Chunk:
    if not isinstance(delta := choice.get("delta"), dict):
        return dict(choice)
    delta = dict(cast("Chunk", delta))
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{**call, "function": {**(call.get("function") or {})}} for call in calls]
    return {**choice, "delta": delta}


def _texts_in(choice: Chunk) -> Iterator[tuple[str | int, Chunk, str]]:
    """The texts of a chunk's choice: their name (of a call's arguments its index), and where they stand."""
    if isinstance(choice.get("text"), str):
        yield "text", choice, "text"
    delta: Chunk = choice.get("delta") or {}
    for name in _TEXTS:
        if isinstance(delta.get(name), str) and delta[name]:
            yield name, delta, name
    for call in cast("list[Chunk]", delta.get("tool_calls") or []):
        if isinstance(call["function"].get(_ARGUMENTS), str):
            yield _index_of(call), call["function"], _ARGUMENTS


def _index_of(call: Chunk) -> int:
    return call.get("index") or 0


def _filled(text: str, values: Mapping[str, str], in_json: bool) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[0]
        if name not in values:
            return name
        return _escaped(values[name]) if in_json else values[name]

    return PLACEHOLDER.sub(value, text) if "[" in text else text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unescaped(text: str) -> str:
    try:
        return json.loads(f'"{text}"')
    except ValueError:
        return text


def _mapped(value: T, change: Callable[[str, bool], str], json_fields: Set[str] = CALLS, *, in_json: bool = False) -> T:
    mapped: Any = value
    match value:
        case str():
            mapped = change(value, in_json)
        case dict():
            fields = cast("dict[str, Any]", value)
            media = media_in(fields)
            mapped = {
                change(name, False): field
                if name in media
                else _mapped(field, change, json_fields, in_json=name in json_fields)
                for name, field in fields.items()
            }
        case list():
            mapped = [_mapped(item, change, json_fields) for item in cast("list[Any]", value)]
        case _:
            pass
    return mapped
