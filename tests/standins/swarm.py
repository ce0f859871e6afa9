"""A scripted swarm server with its data plane, for tests: real sockets, no engine, the real stages and verdicts.

``answer`` decides what each sampling call gets; counters and events say what happened, so that no test sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarm.concurrency import ClientGoneError, until_gone
from swarm.evidence.pairs import Pair
from swarm.evidence.ratings import SideRating
from swarm.job import TrainJob
from swarm.protocol import FollowStagesRequest, RecordRatingRequest, StagesResponse
from swarm.server.episodes.evidence import Comparisons
from swarm.server.episodes.stages import Stages
from swarm.states import EngineState
from swarm.status import EngineStatus, ServerStatus
from tests.standins.vllm import chat_chunk, role_chunk, sse, usage_chunk

MODEL = "tiny"
Answer = Callable[[dict[str, Any], int], Response | Awaitable[Response]]


def completion(text: str | None, *, finish_reason: str = "stop", tokens: int = 3, **message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-upstream",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens},
        "prompt_logprobs": None,
    }


def said(text: str | None, **message: Any) -> Response:
    """As :func:`completion`."""
    return JSONResponse(completion(text, **message))


def error(status: int, message: str, **headers: str) -> Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    return JSONResponse(body, status, headers={key.replace("_", "-"): value for key, value in headers.items()})


def streamed(*texts: str) -> Response:
    """A stream with a token for each of ``texts``."""
    tokens = [chat_chunk({"delta": {"content": text}}) for text in texts]
    return sse([role_chunk(), *tokens, chat_chunk({"delta": {}, "finish_reason": "stop"}), usage_chunk(len(texts), 5)])


def by_number(body: dict[str, Any], number: int) -> Response:
    """The k-th call of the group (0-based) answers with k + 1 words, a call for a stream with two."""
    return streamed("two", " words") if body.get("stream") else said(" ".join(["word"] * (number + 1)))


async def hanging(body: dict[str, Any], number: int) -> Response:
    """No answer."""
    await asyncio.Event().wait()
    raise AssertionError


def once(go: asyncio.Event, answer: Answer) -> Answer:
    """``answer``, once ``go`` is set."""

    async def waiting(body: dict[str, Any], number: int) -> Response:
        await go.wait()
        return await made(answer(body, number))

    return waiting


async def made(reply: Response | Awaitable[Response]) -> Response:
    return reply if isinstance(reply, Response) else await reply


class Swarm:
    """State of the stand-in; ``changed`` is notified after everything that happens."""

    def __init__(self, num_repeat: int = 4) -> None:
        self.job: TrainJob | None = TrainJob(model=MODEL, num_repeat=num_repeat, batch_size=2)
        self.status_reads = 0
        #: what the last of these asked for
        self.status_query: dict[str, str] = {}
        self.state = EngineState.ROLLING
        self.step = 7
        self.answer: Answer = by_number
        self.end_status: list[int] = []
        self.silent = False
        #: whether a claimed group has an address of its own
        self.grouped = True
        self.groups: dict[str, list[str]] = {}
        #: how many answers each sampling call was for
        self.calls: list[int] = []
        self.claimed: dict[str, int] = {}
        self.claims: list[dict[str, Any]] = []
        #: the episodes of claims by their keys, and the keys that were withdrawn
        self.granted: dict[str, list[str]] = {}
        self.withdrawn: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        #: of sampling calls; empty where there was none
        self.traceparents: list[str] = []
        self.ends: list[dict[str, Any]] = []
        self.pairs: list[dict[str, Any]] = []
        #: the pairs of ``ends`` and ``pairs`` as they came
        self.compared: list[Pair] = []
        self.ratings: list[SideRating] = []
        self.stages = Stages(lambda _: None)
        self.comparisons = Comparisons(lambda _: None, on_evidence=self.stages.judged)
        self.aborted: set[str] = set()
        self.sampling = 0
        self.cancelled = 0
        self.changed = asyncio.Condition()
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/status", self._status),
                Route("/get_engine_status", self._engine_status),
                Route("/claim_group", self._claim_group, methods=["POST"]),
                Route("/withdraw_claim", self._withdraw_claim, methods=["POST"]),
                Route("/end_group", self._end_group, methods=["POST"]),
                Route("/follow_stages", self._follow_stages, methods=["POST"]),
                Route("/record_pair", self._record_pair, methods=["POST"]),
                Route("/record_rating", self._record_rating, methods=["POST"]),
                Route("/abort_episode", self._abort_episode, methods=["POST"]),
                Route("/episodes/{uuid}/v1/chat/completions", self._sample, methods=["POST"]),
                Route("/groups/{uuid}/v1/chat/completions", self._sample_group, methods=["POST"]),
            ]
        )

    async def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(condition)

    async def set_state(self, state: EngineState) -> None:
        self.state = state
        await self._notify()

    @property
    def open_episodes(self) -> set[str]:
        ended = {end["episode_uuid"] for group in self.ends for end in group["ends"]}
        return set(self.claimed) - self.aborted - ended

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _engine(self) -> EngineStatus:
        return EngineStatus(engine_status=self.state, global_step=self.step)

    async def _status(self, request: Request) -> Response:
        await self.until(lambda: not self.silent, seconds=30)
        self.status_reads += 1
        self.status_query = dict(request.query_params)
        await self._notify()
        model = self.job.model_name if self.job is not None else ""
        comparisons = self.comparisons.statuses()
        status = ServerStatus(engine=self._engine(), model=model, job=self.job, comparisons=comparisons)
        return JSONResponse(status.model_dump(mode="json"))

    async def _engine_status(self, request: Request) -> Response:
        return JSONResponse(self._engine().model_dump(mode="json"))

    async def _claim_group(self, request: Request) -> Response:
        body = await request.json()
        self.claims.append(body)
        await self._notify()
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: self.state is EngineState.ROLLING, body["wait_seconds"])
        if (key := body.get("idempotency_key", "")) in self.withdrawn:
            return error(409, "claim_withdrawn")
        answer: dict[str, Any] = {"success": False, "client_uuid": body["client_uuid"], "fail_cause": ""}
        if self.state is not EngineState.ROLLING:
            causes = {EngineState.WEIGHT_SYNCING: "Engine is syncing weights"}
            return JSONResponse({**answer, "fail_cause": causes.get(self.state, "Engine is not rolling.")})
        uuids = [f"e{len(self.claimed) + number}" for number in range(body["count"])]
        self.claimed |= {uuid: number for number, uuid in enumerate(uuids)}
        self.granted[key] = uuids
        answer |= {
            "success": True,
            "episodes": [{"episode_uuid": uuid} | self._opened("episodes", uuid) for uuid in uuids],
        }
        if self.grouped:
            self.groups[group := f"g{len(self.groups)}"] = uuids
            answer |= {"group_uuid": group} | self._opened("groups", group)
        return JSONResponse(answer)

    def _opened(self, kind: str, uuid: str) -> dict[str, str]:
        return {"openai_base_url": f"{self.url}/{kind}/{uuid}/v1", "openai_api_key": f"key-{uuid}"}

    async def _end_group(self, request: Request) -> Response:
        body = await request.json()
        if self.end_status:
            return error(self.end_status.pop(0), "scripted")
        self.ends.append(body)
        self._compare(body.get("pair"))
        await self._notify()
        return JSONResponse({"success": True, "error": None})

    async def _record_pair(self, request: Request) -> Response:
        self.pairs.append(body := await request.json())
        self._compare(body["pair"])
        await self._notify()
        return JSONResponse({"success": True, "error": None})

    def _compare(self, pair: dict[str, Any] | None) -> None:
        if pair is not None:
            self.compared.append(Pair.model_validate(pair))
            self.comparisons.add(self.compared[-1])

    async def _record_rating(self, request: Request) -> Response:
        self.ratings.append(RecordRatingRequest.model_validate(await request.json()).rating)
        await self._notify()
        return JSONResponse({"success": True, "error": None})

    async def _follow_stages(self, request: Request) -> Response:
        wanted = FollowStagesRequest.model_validate(await request.json())
        self.stages.follow(wanted.routes)
        self.stages.serves(self.step)
        await self._notify()
        changed = self.stages.changed.until(lambda: self.stages.changes != wanted.after_change, wanted.wait_seconds)
        try:
            await until_gone(request.receive, changed)
        except ClientGoneError:
            return Response(status_code=499)
        answer = StagesResponse(changes=self.stages.changes, stages=list(self.stages.pointers.values()))
        return JSONResponse(answer.model_dump(mode="json"))

    async def _abort_episode(self, request: Request) -> Response:
        self.aborted.add((await request.json())["episode_uuid"])
        await self._notify()
        return JSONResponse({"success": True, "error": None})

    async def _withdraw_claim(self, request: Request) -> Response:
        self.withdrawn.add(key := (await request.json())["idempotency_key"])
        self.aborted.update(self.granted.get(key, ()))
        await self._notify()
        return JSONResponse({"success": True, "error": None})

    async def _sample(self, request: Request) -> Response:
        return await self._answer_for([request.path_params["uuid"]], request, joined=lambda responses: responses[0])

    async def _sample_group(self, request: Request) -> Response:
        uuids = self.groups[request.path_params["uuid"]]
        if (places := request.headers.get("x-swarm-places")) is not None:
            uuids = [uuids[int(place)] for place in places.split(",")]
        return await self._answer_for(uuids, request, joined=as_one)

    async def _answer_for(
        self, uuids: list[str], request: Request, joined: Callable[[list[Response]], Response]
    ) -> Response:
        if request.headers["authorization"] != f"Bearer key-{request.path_params['uuid']}":
            return error(401, "wrong key")
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.traceparents.append(request.headers.get("traceparent", ""))
        self.calls.append(len(uuids))
        self.sampling += len(uuids)
        await self._notify()
        answering = asyncio.gather(*(made(self.answer(body, self.claimed[uuid])) for uuid in uuids))
        hangup = asyncio.ensure_future(request.receive())
        await asyncio.wait({answering, hangup}, return_when=asyncio.FIRST_COMPLETED)
        hangup.cancel()
        self.sampling -= len(uuids)
        if not answering.done():
            answering.cancel()
            self.cancelled += len(uuids)
            await self._notify()
            return error(499, "gone")
        await self._notify()
        response = joined(answering.result())
        response.headers["x-swarm-policy-version"] = str(self.step)
        return response


def as_one(responses: list[Response]) -> Response:
    """The answers as choices of one, or the first error among them."""
    for response in responses:
        if response.status_code != 200:
            return response
    answers = [json.loads(bytes(response.body)) for response in responses]
    tokens = [answer["usage"]["completion_tokens"] for answer in answers]
    whole = answers[0]
    whole["choices"] = [answer["choices"][0] | {"index": index} for index, answer in enumerate(answers)]
    whole["usage"] |= {"completion_tokens": sum(tokens), "total_tokens": whole["usage"]["prompt_tokens"] + sum(tokens)}
    return JSONResponse(whole, headers={"x-swarm-completion-tokens": ",".join(map(str, tokens))})
