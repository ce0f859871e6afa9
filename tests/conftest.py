"""Fixtures every test may use."""

import signal

import pytest

# a shell that runs the tests in the background has SIGINT ignored for them, and so for every process they start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
