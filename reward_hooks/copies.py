"""Copies of what hooks get, at a fraction of the time of :func:`copy.deepcopy`.

Invariant: the copy is what ``deepcopy`` would have made: nothing that can be changed is shared with the original, and
what is one object in several places there is one here.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar, cast

from pydantic import BaseModel

T = TypeVar("T")

#: What JSON is made of and cannot be changed.
_FIXED = frozenset({str, int, float, bool, type(None), bytes})


def copied(value: T) -> T:
    """A copy of ``value``: JSON, our models, and whatever else can be copied.

    Raises:
        Exception: something in it cannot be copied; whatever that raises.
    """
    return _copied(value, {})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind: type[Any] = type(value)
    if kind in _FIXED:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if kind is dict:
        made: Any = {}
        memo[id(value)] = made
        _fill(made, value, memo)
        return made
    if kind is list:
        made = []
        memo[id(value)] = made
        for entry in value:
            made.append(entry if type(entry) in _FIXED else _copied(entry, memo))
        return made
    if issubclass(kind, BaseModel) and _is_plain(value):
        made = kind.__new__(kind)
        memo[id(value)] = made
        fields: dict[str, Any] = {}
        _fill(fields, value.__dict__, memo)
        # as pydantic's own copies are made: a frozen model refuses to be assigned to
        object.__setattr__(made, "__dict__", fields)
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_fields_set__", value.__pydantic_fields_set__.copy())
        object.__setattr__(made, "__pydantic_private__", None)
        return made
    return copy.deepcopy(value, memo)


def _fill(made: dict[Any, Any], original: dict[Any, Any], memo: dict[int, Any]) -> None:
    for key, entry in original.items():
        made[key if type(key) is str else _copied(key, memo)] = entry if type(entry) in _FIXED else _copied(entry, memo)


def _is_plain(model: BaseModel) -> bool:
    """Whether its fields are all there is to it."""
    return (
        type(model).__deepcopy__ is BaseModel.__deepcopy__
        and model.__pydantic_extra__ is None
        and cast("Any", model).__pydantic_private__ is None
    )
