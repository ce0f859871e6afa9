"""Conversations: which request goes on from which answer, and what a session as a whole earns."""

from gateway.sessions.link import SessionLink
from gateway.sessions.sessions import Sessions
from gateway.sessions.turns import Closing, DeliveredTurn

__all__ = ["Closing", "DeliveredTurn", "SessionLink", "Sessions"]
