"""A reward model behind HTTP: vLLM's ``/score`` or ``/pooling``, or any JSON endpoint, one number per answer.

Sources: vLLM's scoring API (one query, N documents, ``data[*].score``) for cross-encoders and sequence classifiers; its
pooling API with chat messages for reward models such as those of InstructGPT's kind (Ouyang et al. 2022,
arXiv:2203.02155), whose value for the last token is the answer's.

Failure mode: a reward model guesses what people like, and a policy finds where it guesses wrong ("Scaling Laws for
Reward Model Overoptimization", Gao et al. 2022, arXiv:2210.10760): compare its reward with a measure that it does not
see. Its numbers are passed on unchanged, on any scale; GRPO needs only the differences.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.judge import Judge, shown_answer, shown_task
from reward_hooks.judges.judge_client import Unparsable
from swarm.concurrency import all_of
from swarm.errors import ConfigError
from swarm.types import Task

_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(-?\d+|\*)\]")
_Step = str | int | None  # a member, an index, or all elements


class JsonPath:
    """Members by ``.name``, elements by ``[index]`` (negative from the end), all elements by ``[*]``.

    Raises:
        ConfigError: ``text`` is no such expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._steps: list[_Step] = []
        position = 0
        while match := _STEP.match(text, position):
            name, index = match.groups()
            self._steps.append(name if name is not None else None if index == "*" else int(index))
            position = match.end()
        if position < len(text) or not self._steps:
            raise ConfigError(
                f"{text!r} is no path expression (wrong at {text[position:] or 'its end'!r}); write it like "
                "data[*].score or result.scores[0]"
            )
        #: whether it can find more than one number
        self.many = None in self._steps

    def numbers(self, value: object) -> list[float]:
        """The numbers found, in the order of the JSON.

        Raises:
            ValueError: a step leads nowhere, or to something that is no finite number.
        """
        values: list[Any] = [value]
        for number, step in enumerate(self._steps, 1):
            values = [inner for outer in values for inner in self._step(outer, step, number)]
        for score in values:
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise ValueError(f"{self.text} leads to {str(score)[:60]!r}, which is no finite number")
        return [float(score) for score in values]

    def _step(self, value: Any, step: _Step, number: int) -> list[Any]:
        if step is None and isinstance(value, list):
            return cast("list[Any]", value)
        kind: Any = dict if isinstance(step, str) else list
        try:
            if isinstance(value, kind):
                return [value[step]]
        except LookupError:
            pass
        raise ValueError(f"{self.text} leads nowhere at its step {number}, in {str(value)[:120]!r}")


#: The bodies of vLLM's own calls.
_BODIES: dict[str, dict[str, Any]] = {
    "score": {"text_1": "{prompt}", "text_2": "{answers}"},
    "pooling": {"messages": "{messages}"},
}


class ScoreModel(Judge):
    """Returns the model's numbers; one call per group if the endpoint takes all answers, else one per answer.

    ``endpoint.base_url`` is the server without the path, e.g. ``http://127.0.0.1:8000``.
    """

    name = "score_model"
    api: Literal["score", "pooling", "json"] = "score"
    route: str = Field(default="", description="path of the call, with its query; default: /score or /pooling")
    body: dict[str, Any] = Field(
        default={},
        description="of api json: what is sent; strings may hold {prompt}, {answer}, and a string that is just "
        "{answers} or {messages} becomes the list; with {answers} one call scores the whole group",
    )
    path: str = Field(default="", description="of api json: where the numbers are in the answer, e.g. scores[*]")

    @model_validator(mode="after")
    def _json_says_both(self) -> Self:
        if (self.api == "json") != bool(self.body) or (self.api == "json") != bool(self.path):
            raise ValueError("api json needs body and path, the other apis have their own")
        if self.api == "json":
            many = JsonPath(self.path).many
            if many != _has(self.body, "{answers}"):
                raise ValueError("a body with {answers} goes with a path that has [*], one with {answer} does not")
            if not many and not _has(self.body, "{answer}") and not _has(self.body, "{messages}"):
                raise ValueError("body must hold {answer}, {answers} or {messages}: else every answer scores the same")
        return self

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """The model's numbers."""
        body = self.body or _BODIES[self.api]
        asked, texts = shown_task(task), [shown_answer(answer) for answer in answers]
        if _has(body, "{answers}"):
            values = await self._numbers(_filled(body, {"prompt": asked, "answers": texts}), len(texts))
        else:
            bodies = [
                _filled(body, {"prompt": asked, "answer": text, "messages": _messages(task, answer)})
                for text, answer in zip(texts, answers, strict=True)
            ]
            values = [number for [number] in await all_of([self._numbers(each, 1) for each in bodies])]
        return [Reward(value=value) for value in values]

    async def _numbers(self, body: dict[str, Any], count: int) -> list[float]:
        """The ``count`` numbers of the answer to one call."""

        def read(answer: Any) -> list[float]:
            match self.api:
                case "score":
                    by_index = {entry["index"]: entry for entry in answer["data"]}
                    numbers = JsonPath("[*].score").numbers([by_index[index] for index in range(len(by_index))])
                case "pooling":
                    # the one number, or a list of it per token, of which the last is the answer's
                    pooled = answer["data"][0]["data"]
                    numbers = JsonPath("[*]").numbers(pooled[-1] if isinstance(pooled[-1], list) else pooled)
                case "json":
                    numbers = JsonPath(self.path).numbers(answer)
            if len(numbers) != count:
                raise Unparsable(f"it has {len(numbers)} numbers for {count} answers")
            return numbers

        route = self.route or ("" if self.api == "json" else f"/{self.api}")
        url = self.endpoint.base_url.rstrip("/") + route
        return await self.client.post(url, body, read, kind=f"{self.api} {self.path}")


def _messages(task: Task, candidate: Candidate) -> list[dict[str, Any]]:
    """The conversation with the answer as its last message, as a chat template wants it."""
    return [*task.messages, {**candidate.message, "role": "assistant"}]


def _has(body: Mapping[str, Any], placeholder: str) -> bool:
    return placeholder in json.dumps(body, default=str)


def _filled(value: Any, parts: Mapping[str, Any]) -> Any:
    """``value`` with its placeholders filled in; one pass, so that an answer cannot bring placeholders of its own."""
    if isinstance(value, dict):
        return {key: _filled(inner, parts) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_filled(inner, parts) for inner in cast("list[Any]", value)]
    if not isinstance(value, str):
        return value
    if value.startswith("{") and value.endswith("}") and value[1:-1] in parts:
        return parts[value[1:-1]]
    texts = {name: part for name, part in parts.items() if isinstance(part, str)}
    return re.sub(r"\{(\w+)\}", lambda match: texts.get(match[1], match[0]), value)
