"""Who may use the control routes, and where the server may listen without asking."""

from swarm.server.auth.token import TokenMiddleware, check_exposure

__all__ = ["TokenMiddleware", "check_exposure"]
