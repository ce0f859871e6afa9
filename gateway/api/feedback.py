"""``POST /v1/feedback``, ``POST /v1/sessions/{id}/end`` and ``GET /v1/sessions/{id}``: the user's feedback, the end of
a conversation, and what became of it.

Invariant: a key speaks only of its own answers and sessions; those of others do not exist to it. Each way to rate is a
number from -1 (bad) to 1 (good), a request rates once, and later feedback replaces earlier.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request

from gateway.api.endpoint import caller_of
from gateway.runtime import Gateway
from gateway.sessions.conversation import SessionReport, heard
from reward_hooks import Feedback
from swarm.errors import NotFoundError, RequestError
from swarm.types import Model

#: Labels that rate, as scores.
RATINGS = {"good": 1.0, "neutral": 0.0, "bad": -1.0}
#: Labels for what the user did with an answer, which only the application can see.
SIGNALS = ("accepted", "copied", "edited", "regenerated", "repeated", "continued", "abandoned")

Signal = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Rating(Model):
    """A rating (``score``, or ``label`` good, neutral, bad), a comment, a better answer, and what the user did
    (``signals``, each in [0, 1]; or one of their names as ``label``)."""

    score: float | None = Field(default=None, ge=-1, le=1, allow_inf_nan=False)
    label: str | None = None
    comment: str = Field(default="", max_length=10_000)
    better: str = Field(default="", max_length=10_000, description="what the user would have wanted to read")
    signals: dict[Annotated[str, Field(min_length=1, max_length=64)], Signal] = Field(default={}, max_length=32)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.label is not None and self.label not in (*RATINGS, *SIGNALS):
            raise ValueError(f"label is {self.label!r}; use one of {', '.join((*RATINGS, *SIGNALS))}")
        if self.score is not None and self.label in RATINGS:
            raise ValueError(f"score and label {self.label!r} both rate the answer; send one of them")
        return self

    def feedback(self) -> Feedback:
        """For hooks."""
        observed = {signal: 1.0 for signal in SIGNALS if signal == self.label}
        rating = RATINGS.get(self.label or "", self.score)
        signals = {**observed, **self.signals}
        return Feedback(rating=rating, comment=self.comment, better=self.better, signals=signals)


class GivenFeedback(Rating):
    """Feedback to one answer: ``completion_id`` is its id in whatever dialect, ``choice`` its index where the request
    asked for several; ``request_id`` is the ``x-request-id`` of the response, which also names answers that nobody
    judged."""

    completion_id: str = Field(default="", max_length=256)
    request_id: str = Field(default="", max_length=256)
    choice: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not (self.completion_id or self.request_id):
            raise ValueError("send completion_id, request_id, or both")
        if self.label is None and self.score is None and not (self.comment or self.better or self.signals):
            raise ValueError("send a score, a label, a comment, a better answer, or signals")
        return self


class SessionFeedback(Rating):
    """Feedback to a whole session; may be empty. Sessions that name one ``task`` are compared with each other."""

    task: str = Field(default="", max_length=256)


class FeedbackTaken(BaseModel):
    """What became of the feedback."""

    completion_id: str
    trains: bool = Field(description="whether the group is still open for it")
    replaced: bool
    compares: bool = Field(
        default=False, description="whether the rating counts in the comparison of incumbent and challenger"
    )


class SessionEnded(BaseModel):
    """The session is over."""

    session_id: str
    ended: bool


class SessionReports(BaseModel):
    """A session, for each route that it was on."""

    session_id: str
    on: list[SessionReport]


async def give_feedback(request: Request, body: GivenFeedback) -> FeedbackTaken:
    """The user's feedback to an answer."""
    gateway: Gateway = request.state.gateway
    sessions, key_id, feedback = gateway.sessions, caller_of(request.scope).key_id, body.feedback()
    completion_id, choice = sessions.part(key_id, body.completion_id, body.choice)
    request_id, _ = sessions.part(key_id, body.request_id, body.choice)
    turn = sessions.turn(completion_id, key_id) if completion_id else None
    if turn is not None and choice >= turn.choices:
        raise RequestError(f"the completion has no choice {body.choice}: they are numbered from 0", param="choice")
    comparable = bool(request_id) and gateway.delivered.rate(key_id, request_id, feedback.rating)
    compares = comparable and feedback.rating is not None
    if turn is None and comparable:
        return FeedbackTaken(completion_id=body.completion_id, trains=False, replaced=False, compares=compares)
    if turn is None:
        what, param = ("completion", "completion_id") if body.completion_id else ("request", "request_id")
        raise NotFoundError(
            f"{what} {getattr(body, param)!r} is not known: its answer was not delivered to this key, nobody judged or "
            "compared it (passed straight through, or answered by an upstream), or its session is over",
            code="completion_not_found",
            param=param,
        )
    replaced = choice in turn.choice_feedback
    turn.choice_feedback[choice] = heard(feedback, turn.rules)
    sessions.counts.feedback["counts" if turn.open else "late"] += 1
    return FeedbackTaken(completion_id=body.completion_id, trains=turn.open, replaced=replaced, compares=compares)


async def end_session(request: Request, id: str, body: SessionFeedback) -> SessionEnded:
    """End a conversation.

    It ends on all routes; its hook runs after the response. The body is optional feedback.
    """
    gateway: Gateway = request.state.gateway
    caller = caller_of(request.scope)
    await gateway.pipeline.hear({}, {"metadata": {"session_id": id}}, caller)
    feedback = body.feedback() if body.model_fields_set - {"task"} else None
    if not gateway.sessions.end(id, caller.key_id, feedback, body.task):
        raise NotFoundError(f"session {id!r} is not known, or is over", code="session_not_found")
    return SessionEnded(session_id=id, ended=True)


async def tell_session(request: Request, id: str) -> SessionReports:
    """What became of the tokens of a session.

    Of each agent, those that were sampled are trained, dropped for a reason, or of groups that are under way. The last
    10,000 sessions (`max_sessions`) are remembered, also when they are over.
    """
    gateway: Gateway = request.state.gateway
    reports = gateway.sessions.reports(id, caller_of(request.scope).key_id)
    if not reports:
        raise NotFoundError(f"session {id!r} is not known", code="session_not_found")
    return SessionReports(session_id=id, on=reports)
