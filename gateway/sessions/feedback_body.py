"""What a caller may say of an answer: the body of ``POST /v1/feedback``.

Invariant: each way to rate says the same kind of number, from -1 (bad) to 1 (good), and a request rates once.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from reward_hooks import Feedback
from swarm.types import Model

#: What thumbs mean.
RATINGS = {"good": 1.0, "neutral": 0.0, "bad": -1.0}
#: What the user did with an answer, which only the application can see.
SIGNALS = ("accepted", "copied", "edited", "regenerated", "repeated", "continued", "abandoned")

Signal = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Said(Model):
    """A rating (``score``, or ``label`` good, neutral, bad), a comment, and what the user did (``signals``, each in
    [0, 1]; or one of their names as ``label``)."""

    score: float | None = Field(default=None, ge=-1, le=1, allow_inf_nan=False)
    label: str | None = None
    comment: str = Field(default="", max_length=10_000)
    signals: dict[Annotated[str, Field(min_length=1, max_length=64)], Signal] = Field(default={}, max_length=32)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.label is not None and self.label not in (*RATINGS, *SIGNALS):
            raise ValueError(f"label is {self.label!r}; use one of {', '.join((*RATINGS, *SIGNALS))}")
        if self.score is not None and self.label in RATINGS:
            raise ValueError(f"score and label {self.label!r} both rate the answer; send one of them")
        self.check_says_something()
        return self

    def check_says_something(self) -> None:
        """Raise :class:`ValueError` where nothing is said."""
        if self.label is None and self.score is None and not self.comment and not self.signals:
            raise ValueError("send a score, a label, a comment, or signals")

    def feedback(self) -> Feedback:
        """The same for hooks."""
        seen = {signal: 1.0 for signal in SIGNALS if signal == self.label}
        rating = RATINGS.get(self.label or "", self.score)
        return Feedback(rating=rating, comment=self.comment, signals={**seen, **self.signals})


class GivenFeedback(Said):
    """Feedback to one answer: ``completion_id`` is its id in whatever dialect, ``choice`` its index where the request
    asked for several."""

    completion_id: str = Field(min_length=1, max_length=256)
    choice: int = Field(default=0, ge=0)


class SessionFeedback(Said):
    """Feedback to a whole session, which may say nothing."""

    def check_says_something(self) -> None:
        """There is nothing that must be said."""
