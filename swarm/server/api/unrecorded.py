"""The engine without episodes: ``/v1/...`` as vLLM answers it, for callers with a token of the scope ``claim``; and
``/kept/VERSION/v1/...``, where a kept version answers in the place of the newest.

Invariant: nothing that is sampled here is recorded or trained, and it is sampled as the caller asks; no call waits for
an engine that sleeps. ``finish_reason: "abort"`` never reaches a caller.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from adapters.dialects import ChatDialect
from adapters.dialects.jsons import encode
from swarm.cards import model_list
from swarm.concurrency import until_gone
from swarm.errors import NotFoundError, UnavailableError
from swarm.http.asgi import read_json
from swarm.http.routes import ANY_ANSWER, ANY_BODY, OpenAIBody
from swarm.protocol import POLICY_VERSION
from swarm.server.auth import ControlRoute
from swarm.server.dataplane.calls import UnrecordedCall
from swarm.server.dataplane.replica_client import AbortedError, Body, Retries, TransientError
from swarm.server.dataplane.routes import DataPlane, EventStreamResponse


def _named(answer: Body, model: str) -> Body:
    return answer | {"model": model} if "model" in answer else answer


def _aborted(answer: Body) -> bool:
    choices: list[Body] = answer.get("choices") or []
    return any(choice.get("finish_reason") == "abort" for choice in choices)


#: vLLM's addresses that are passed on as they are
RELAYED_PATHS = ("/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")

_SAMPLES = {"5XX": "the engine failed the call, or none serves now"}
#: The addresses of a kept version (:mod:`swarm.kept_adapters`).
_KEPT = "/kept/{version}/v1"
_BESIDE = {**_SAMPLES, 503: "none serves now, or the version is not kept"}
_NO_JOB = {503: "there is no training job"}


@dataclass(frozen=True)
class UnrecordedRoutes:
    """``/v1/chat/completions``, ``/v1/models`` and :data:`RELAYED_PATHS`."""

    plane: DataPlane

    def routes(self) -> list[BaseRoute]:
        sampling = partial(ControlRoute, "POST", scope="claim", extra=ANY_BODY, media_types=ANY_ANSWER)
        return [
            sampling("/v1/chat/completions", self.chat, refusals=_SAMPLES),
            *(sampling(path, self.relay, refusals=_SAMPLES) for path in RELAYED_PATHS),
            sampling(f"{_KEPT}/chat/completions", self.kept_chat, refusals=_BESIDE),
            sampling(f"{_KEPT}/completions", self.kept_completions, refusals=_BESIDE),
            # vLLM loads the adapter for it
            ControlRoute("GET", f"{_KEPT}/models", self.kept_models, "claim", refusals=_NO_JOB),
            ControlRoute("POST", f"{_KEPT}/{{rest:path}}", self.kept_nothing, "claim"),
            ControlRoute("GET", f"{_KEPT}/{{rest:path}}", self.kept_nothing, "claim"),
            ControlRoute("GET", "/v1/models", self.models, "read", refusals=_NO_JOB),
            ControlRoute("GET", "/v1/models/{name:path}", self.model, "read", refusals=_NO_JOB),
        ]

    async def chat(self, request: Request) -> Response:
        """The engine without an episode: like vLLM's, never recorded and never trained."""
        return await self.plane.unrecorded_chat_completions(request)

    async def kept_chat(self, request: Request, version: str) -> Response:
        """The engine without an episode, sampled with a kept version.

        Its adapter answers beside the newest one; version 0 is the model below. Only jobs with `lora` have such.
        """
        return await self.chat(request)

    async def kept_completions(self, request: Request, version: str) -> Response:
        """The same for a raw prompt."""
        return await self.relay(request)

    async def kept_nothing(self, version: str, rest: str) -> OpenAIBody:
        """A kept version answers nothing else."""
        raise NotFoundError(f"there are no {rest[:200]} here, only chat/completions and completions")

    async def kept_models(self, request: Request, version: str) -> OpenAIBody:
        """The model that is served, if the version answers."""
        owner = self.plane.unrecorded(request)
        owner.check()
        # it samples nothing, and vLLM loads the adapter before anything else
        await self.plane.while_open(owner, lambda: self._answer(owner, "/tokenize", {"prompt": " "}))
        return await self.models()

    async def models(self) -> OpenAIBody:
        """The model that is served."""
        return OpenAIBody.model_validate(model_list([self._card()]))

    async def model(self, name: str) -> OpenAIBody:
        """The same by its name."""
        card = self._card()
        if name != card["id"]:
            text = f"The model `{name[:200]}` does not exist; `{card['id']}` is served"
            raise NotFoundError(text, code="model_not_found", param="model")
        return OpenAIBody.model_validate(card)

    def _card(self) -> dict[str, Any]:
        if not self.plane.controller.has_job:
            raise UnavailableError("there is no training job yet", code="engine_offline")
        return self.plane.card()

    async def relay(self, request: Request) -> Response:
        """Like vLLM's, except for the name of the model."""
        plane, asked = self.plane, await read_json(request)
        owner = plane.unrecorded(request)
        owner.check()
        path = request.url.path.removeprefix(f"/kept/{request.path_params.get('version')}")
        headers = {POLICY_VERSION: str(owner.version)}
        if asked.get("stream") is True:
            chunks = self._chunks(owner, path, asked)
            return EventStreamResponse(plane, owner, chunks, ChatDialect(), asked, lambda: headers)
        work = plane.while_open(owner, lambda: self._answer(owner, path, asked))
        answer = await until_gone(request.receive, work)
        return Response(encode(answer), media_type="application/json", headers=headers)

    async def _answer(self, owner: UnrecordedCall, path: str, asked: Body) -> Body:
        """vLLM's plain answer at ``path``, with our name of the model.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: no answer within the attempts.
            UnavailableError: no engine serves.
        """
        plane, retries = self.plane, Retries(self.plane.config.call_attempts)
        placement, body = plane.placement(owner, asked), asked | {"model": owner.engine_model}
        name = plane.controller.job.model_name
        while True:
            try:
                async with placement.lease(1) as base_url:
                    answer = await plane.upstream.post(base_url + path, body)
                    if _aborted(answer):
                        raise AbortedError
            except TransientError as exc:
                await retries.after(exc)
                continue
            return _named(answer, name)

    async def _chunks(self, owner: UnrecordedCall, path: str, asked: Body) -> AsyncGenerator[list[Body]]:
        """The chunks of a streamed answer, in lists of those that arrived together; raises as :meth:`_answer`."""
        plane, retries = self.plane, Retries(self.plane.config.call_attempts)
        placement, body = plane.placement(owner, asked), asked | {"model": owner.engine_model}
        name = plane.controller.job.model_name
        begun = False
        while True:
            try:
                async with (
                    placement.lease(1) as base_url,
                    aclosing(plane.upstream.events(base_url + path, body)) as events,
                ):
                    async for together in events:
                        whole = list(takewhile(lambda event: not _aborted(event), together))
                        if whole:
                            begun = True
                            yield [_named(event, name) for event in whole]
                        if len(whole) < len(together):
                            raise AbortedError
                return
            except TransientError as exc:
                if begun:
                    raise
                await retries.after(exc)
