"""Read a request field by field, and note what is left out.

Invariant: after :meth:`Fields.done` every field of the object was either taken or noted; ``null`` counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter

from swarm.errors import RequestError

T = TypeVar("T")
#: Levels of objects and lists: JSON may nest deeper than copying and encoding can follow.
_DEEPEST = 100
#: An index in the path of a field, also at the start of a note.
INDEX = re.compile(r"\.\d+(?=[.:]|$)")
_UNPRINTABLE = re.compile(r"[^ -~]|;")
_NOTE_LENGTH, _MOST_NOTES = 120, 20


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


class LeftOutNotes:
    """What is left out of one request."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, str], set[str]] = {}

    def add(self, path: str, reason: str) -> None:
        """Note that the field at ``path`` is left out."""
        self._paths.setdefault((INDEX.sub(".*", path), reason), set()).add(path)

    def lines(self) -> tuple[str, ...]:
        """One short line of ASCII without ``;`` per kind: ``tools.8: web_search is not run here``; at most 21. A kind
        that occurs at several places of a list has ``*`` for the index."""
        lines = [
            _UNPRINTABLE.sub("?", f"{kind if len(paths) > 1 else next(iter(paths))}: {reason}")[:_NOTE_LENGTH]
            for (kind, reason), paths in self._paths.items()
        ]
        more = len(lines) - _MOST_NOTES
        return (*lines[:_MOST_NOTES], f"and {more} more") if more > 0 else tuple(lines)


class Fields:
    """One JSON object of a request.

    Args:
        data: the object.
        path: where it stands in the request, as errors name it; empty for the request itself.
        notes: those of the request; default: new ones.

    Raises:
        RequestError: ``data`` is no object. All methods raise it for a field of the wrong type; ``param`` is its path.
    """

    def __init__(self, data: object, path: str = "", notes: LeftOutNotes | None = None) -> None:
        if not isinstance(data, dict):
            refuse(path, "must be an object")
        #: the object as it came
        self.data = cast("dict[str, Any]", data)
        #: fields that were read as another type than they came in
        self.read: dict[str, Any] = {}
        self._left = {key: value for key, value in self.data.items() if value is not None}
        self.path = path
        self.notes = notes or LeftOutNotes()

    def at(self, name: str) -> str:
        """The path of field ``name``."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Whatever the field holds; ``None`` if it is absent."""
        return self._left.pop(name, None)

    def needed(self, name: str, value: T | None) -> T:
        """``value``, which was taken from field ``name`` and must be there."""
        if value is None:
            refuse(self.at(name), "is required")
        return value

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def required(self, name: str) -> str:
        """A string that must be there."""
        return self.needed(name, self.text(name))

    def flag(self, name: str) -> bool | None:
        return self._typed(name, bool, "true or false")

    def integer(self, name: str) -> int | None:
        return self._typed(name, int, "an integer")

    def number(self, name: str) -> float | None:
        return self._typed(name, int | float, "a number")

    def _typed(self, name: str, kind: Any, what: str) -> Any:
        """A field of this ``kind``; numbers as text, and flags as text or number, are read as vLLM reads them."""
        value = self.take(name)
        if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        # pydantic takes true for 1
        if not isinstance(value, bool):
            with suppress(ValueError):
                self.read[name] = _reader(kind).validate_python(value)
                return self.read[name]
        refuse(self.at(name), f"must be {what}")

    def inner(self, name: str) -> Fields | None:
        """The object in field ``name``."""
        value = self.take(name)
        return None if value is None else Fields(value, self.at(name), self.notes)

    def objects(self, name: str) -> list[Fields] | None:
        """The objects of a list."""
        value = self.take(name)
        return None if value is None else self.listed(value, name)

    def listed(self, value: object, name: str) -> list[Fields]:
        """The objects of the list ``value``, which was taken from field ``name``."""
        if not isinstance(value, list):
            refuse(self.at(name), "must be a list")
        items = enumerate(cast("list[object]", value))
        return [Fields(item, f"{self.at(name)}.{index}", self.notes) for index, item in items]

    def schema(self, name: str) -> dict[str, Any]:
        """An object that must be there, as it is."""
        return self.needed(name, self.whole(name))

    def whole(self, name: str) -> dict[str, Any] | None:
        """The object in field ``name`` as it is."""
        inner = self.inner(name)
        return None if inner is None else inner.data

    def only(self, name: str, *harmless: Any) -> None:
        """Take the field if its value is one of ``harmless``, and refuse other values."""
        value = self.take(name)
        if value is not None and value not in harmless:
            refuse(self.at(name), f"{value!r:.60} cannot be carried to this model")

    def drop(self, *names: str) -> None:
        """Take fields that do not affect the answer."""
        for name in names:
            self.take(name)

    def leave(self, name: str, reason: str, *harmless: Any) -> None:
        """Leave a field out; note it unless its value is one of ``harmless``."""
        value = self.take(name)
        if value is not None and value not in harmless:
            self.note(reason, name)

    def note(self, reason: str, name: str = "") -> None:
        """Note that field ``name``, or the whole object, is left out; ``reason`` is a few words."""
        self.notes.add(self.at(name) if name else self.path, reason)

    def left(self) -> dict[str, Any]:
        """The fields that nobody took."""
        return dict(self._left)

    def done(self) -> None:
        """Note the fields that nobody took."""
        for name in self._left:
            self.note("unknown field", name)


def present(**values: Any) -> dict[str, Any]:
    """The values that are not ``None``."""
    return {name: value for name, value in values.items() if value is not None}


def session_in(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of a request's ``metadata`` names its session."""
    name = (metadata or {}).get("session_id")
    return {"session_id": name} if isinstance(name, str) else None


def refuse(path: str, problem: str) -> NoReturn:
    """Raise the :class:`RequestError` that names the field at ``path``."""
    raise RequestError(f"{path or 'the request'}: {problem}", param=path or None)


def check_depth(data: dict[str, Any]) -> None:
    """Without recursion.

    Raises:
        RequestError: it nests more than 100 levels deep.
    """
    level: list[Any] = [data]
    for _ in range(_DEEPEST):
        if not level:
            return
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
    if level:
        raise RequestError(f"the request body nests more than {_DEEPEST} levels deep", code="nested_too_deeply")
