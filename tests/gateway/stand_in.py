"""Moved to :mod:`tests.standins.swarm` and :mod:`tests.standins.vllm`; goes with its last importer."""

from tests.standins.swarm import MODEL, Answer, Swarm, by_number, completion, error
from tests.standins.vllm import listening

__all__ = ["MODEL", "Answer", "Swarm", "by_number", "completion", "error", "listening"]
