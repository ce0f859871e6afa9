"""Take a request apart field by field, so that what nobody took is refused by name.

Invariant: after :meth:`Fields.done` every field of the object was either taken or refused; ``null`` is as good as
absent.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

from swarm.errors import RequestError

#: Levels of objects and lists; JSON may nest deeper than what copies it and writes it again can follow.
_DEEPEST = 100


class Fields:
    """One JSON object of a request.

    Args:
        data: the object.
        path: where it stands in the request, as errors name it; empty for the request itself.

    Raises:
        RequestError: ``data`` is no object. All methods raise it for a field of the wrong type; ``param`` is its path.
    """

    def __init__(self, data: object, path: str = "") -> None:
        if not isinstance(data, dict):
            refuse(path, "must be an object")
        #: the object as it came
        self.data = cast("dict[str, Any]", data)
        self._left = {key: value for key, value in self.data.items() if value is not None}
        self.path = path

    def at(self, name: str) -> str:
        """The path of field ``name``."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Whatever the field holds; ``None`` if it is absent."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            refuse(self.at(name), "must be a string")
        return value

    def needed(self, name: str) -> str:
        """A string that must be there."""
        value = self.text(name)
        if value is None:
            refuse(self.at(name), "is required")
        return value

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            refuse(self.at(name), "must be true or false")
        return value

    def integer(self, name: str) -> int | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            refuse(self.at(name), "must be an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            refuse(self.at(name), "must be a number")
        return value

    def inner(self, name: str) -> Fields | None:
        """The object in field ``name``."""
        value = self.take(name)
        return None if value is None else Fields(value, self.at(name))

    def objects(self, name: str) -> list[Fields] | None:
        """The objects of a list."""
        value = self.take(name)
        return None if value is None else objects(value, self.at(name))

    def whole(self, name: str) -> dict[str, Any] | None:
        """The object in field ``name`` as it is, for someone else to judge."""
        found = self.inner(name)
        return None if found is None else found.data

    def only(self, name: str, *harmless: Any) -> None:
        """Accept the field where its value changes nothing, and refuse any other value."""
        value = self.take(name)
        if value is not None and value not in harmless:
            refuse(self.at(name), f"{value!r:.60} cannot be carried to this model")

    def left(self) -> dict[str, Any]:
        """What nobody took."""
        return dict(self._left)

    def done(self) -> None:
        """Refuse what is left."""
        for name in self._left:
            refuse(self.at(name), "is not a field that can be carried to this model; leave it out")


def objects(value: object, path: str) -> list[Fields]:
    """The objects of the list at ``path``.

    Raises:
        RequestError: it is no list of objects.
    """
    if not isinstance(value, list):
        refuse(path, "must be a list")
    return [Fields(item, f"{path}.{index}") for index, item in enumerate(cast("list[object]", value))]


def refuse(path: str, problem: str) -> NoReturn:
    """Raise the :class:`RequestError` that names the field at ``path``."""
    raise RequestError(f"{path or 'the request'}: {problem}", param=path or None)


def check_depth(data: dict[str, Any]) -> None:
    """Refuse what nests more than 100 levels deep; without recursion.

    Raises:
        RequestError: it does.
    """
    level: list[Any] = [data]
    for _ in range(_DEEPEST):
        if not level:
            return
        children = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent)]
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        raise RequestError(f"the request body nests more than {_DEEPEST} levels deep", code="nested_too_deeply")
