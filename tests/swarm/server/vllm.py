"""Moved to :mod:`tests.standins.vllm`; goes with its last importer."""

from tests.standins.vllm import *  # noqa: F403
from tests.standins.vllm import listening as serving  # noqa: F401
