"""What an operator may set, as it is then used."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from swarm.server.config import ServerConfig


def test_a_token_from_a_file_may_end_its_line() -> None:
    assert ServerConfig(token="swt_abc\n").token == "swt_abc"


def test_an_empty_line_is_no_token() -> None:
    with pytest.raises(ValidationError):
        ServerConfig(token="\n")


def test_an_engine_that_speaks_each_second_is_never_silent_for_too_long() -> None:
    with pytest.raises(ValidationError, match="heartbeat_timeout"):
        ServerConfig(heartbeat_timeout=1.0)
