"""The documented bodies of other dialects are the ones that the dialects read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from adapters.dialects import MessagesDialect, ResponsesDialect
from swarm.errors import RequestError
from swarm.server.api.dialects import MessagesRequest, ResponsesRequest

CASES: list[Any] = [
    (MessagesDialect(), MessagesRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    (ResponsesDialect(), ResponsesRequest, {"input": "hi"}),
]


class _Nothing:
    """A value of no JSON type: whoever looks at it refuses it."""


@pytest.mark.parametrize(("dialect", "model", "least"), CASES)
def test_each_documented_field_is_known_to_its_dialect(dialect: Any, model: type[BaseModel], least: Any) -> None:
    for name in model.model_fields:
        try:
            told = dialect.parse({**least, name: _Nothing()}).left_out
        except RequestError:
            continue
        assert f"{name}: not known here" not in told
    assert dialect.parse({**least, "other": 1}).left_out == ("other: not known here",)
    model.model_validate(least)
    dialect.parse(least)
