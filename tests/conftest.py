"""Fixtures every test may use."""

import signal

import pytest
from hypothesis import HealthCheck, settings

# a shell that runs the tests in the background has SIGINT ignored for them, and so for every process they start
signal.signal(signal.SIGINT, signal.default_int_handler)

# how long an example takes to make or to run says more of the machine than of the code
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
