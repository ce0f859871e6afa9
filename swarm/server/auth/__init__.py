"""Who may use the control routes, and where the server may listen without asking."""

from swarm.server.auth.middleware import Admission, AuthMiddleware, Credentials, check_exposure
from swarm.server.auth.names import ClientNames
from swarm.server.auth.ring import TokenRing
from swarm.server.auth.scopes import Caller

__all__ = [
    "Admission",
    "AuthMiddleware",
    "Caller",
    "ClientNames",
    "Credentials",
    "TokenRing",
    "check_exposure",
]
