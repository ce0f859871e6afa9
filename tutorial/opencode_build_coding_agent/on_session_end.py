"""A session is worth what ``mock_user_request.py`` said at its end: 1 if the tests pass, -1 if not."""

from __future__ import annotations

from reward_hooks.contract import HookContext, Session


def on_session_end(session: Session, context: HookContext) -> float | None:
    return session.feedback.rating if session.feedback else None
