"""From a request to its outcome: the stages, in order.

Invariant: an error means that nothing of the request was trained; a request holds its routes and its place until its
outcome is closed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from adapters.dialects import LLMRequest
from adapters.dialects.chat import without_lines
from adapters.dialects.jsons import object_in
from gateway.config.route import RouteSettings
from gateway.data.consent import Consent, consents, header_consent
from gateway.keys.ring import KeyRing
from gateway.limits import Admission, RetryDedup
from gateway.observability.request import note, phase
from gateway.rollout.answering import PassedThroughError, Untrained, answering_within, best
from gateway.rollout.first import first, single
from gateway.rollout.group import GroupRun
from gateway.rollout.return_policy import ReturnPolicy, passes
from gateway.rollout.server import Training
from gateway.routing.table import LiveRoutes, Route, RouteTable
from gateway.routing.upstream import Upstream
from gateway.sessions.conversation import names_of, whose
from gateway.sessions.sessions import SessionLink, Sessions
from gateway.stats import Choice, DropReason, Stats
from gateway.takeover.delivered import DeliveredAnswers
from gateway.takeover.incumbent import CHALLENGER, INCUMBENT, POSITION, SOURCE
from gateway.takeover.shadow import Shadow, giving_way
from gateway.takeover.sides import LONGEST_WAIT, Draw
from gateway.types import AnyRequest, Caller, Decided, Incoming, LeftOut, Live, Outcome, Relayed
from swarm.client.calls import NO_EPISODE_NEEDED
from swarm.errors import (
    FatalRequestError,
    NotFoundError,
    RequestError,
    SwarmGatewayError,
    UnavailableError,
    UpstreamError,
)
from swarm.evidence.pairs import Side
from swarm.packs import added
from swarm.protocol import POLICY_VERSION
from swarm.subjects import user_digest

#: Why a request was not to be trained that ``train_fraction`` left out, or that said so itself; and one whose key said
#: so, or on whose route nobody said that it may be.
NOT_CHOSEN, NO_CONSENT = "not_chosen", "no_consent"
_UNPRINTABLE, _LONGEST_NAME = re.compile(r"[^ -~]|;"), 60

#: Of the pack that redacts; where it is not installed, no route can ask for them.
_masked: Callable[[Incoming], Incoming] = cast("Any", added("masked"))
_filled: Callable[[Outcome, Incoming], Outcome] = cast("Any", added("filled"))

OutcomeT = TypeVar("OutcomeT", Decided, Live, Relayed, Outcome)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request on its route, the swarm server that is to answer it, and within how many seconds an answer is to be
    there, or the beginning of a streamed one (``None``: as the settings say)."""

    incoming: Incoming
    route: Route
    training: Training
    within: float | None = None


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Answers requests by the current routes; one per gateway, safe for concurrent requests."""

    routes: LiveRoutes
    keys: KeyRing
    admission: Admission
    retries: RetryDedup
    sessions: Sessions
    delivered: DeliveredAnswers

    async def answer(self, incoming: Incoming) -> Outcome:
        """The outcome of one request; its ``close`` must be called once it is delivered or given up.

        Raises:
            RequestError: the request itself is at fault: its model, its headers, its fields.
            OverloadedError: too many requests at once.
            UnavailableError, UpstreamError: neither swarm nor upstream could answer.
        """
        async with AsyncExitStack() as held:
            table = held.enter_context(self.routes.table.held())
            refuses = await self.hear(incoming.headers, incoming.call.body, incoming.caller)
            route = await table.find(incoming.call.model, incoming.caller)
            note(route=route.name)
            held.enter_context(_counted(route.stats))
            incoming.consent.granted = _consents(route, incoming, refuses=refuses)
            incoming.consent.rules = route.settings.data.rules
            masks = route.settings.data.redact == "before_sampling"
            if masks or not route.plain:
                incoming.left_out.add(incoming.call.left_out)
                # a plain upstream may have sealed and signed it itself; others refuse what was sealed or signed here
                if (foreign := incoming.left_out.dialect.foreign(incoming.raw)) is not incoming.raw:
                    incoming = replace(incoming, raw=foreign)
            if masks:
                incoming = _masked(incoming)
            outcome = await self.retries.run(
                incoming,
                route.name,
                lambda: self._admitted(incoming, route, table),
                lambda request_id: self.delivered.share(incoming, request_id),
            )
            return _holding(_filled(outcome, incoming) if incoming.values else outcome, held)

    @asynccontextmanager
    async def placed(self, incoming: Incoming) -> AsyncGenerator[Incoming]:
        """``incoming`` with a place for all of its parts: parts that wait for the places of others would wait for
        themselves. Errors as of :meth:`answer`."""
        with self.routes.table.held() as table:
            refuses = await self.hear(incoming.headers, incoming.call.body, incoming.caller)
            route = await table.find(incoming.call.model, incoming.caller)
            note(route=route.name)
            _consents(route, incoming, refuses=refuses)
            with phase("queue"):
                release = await self.admission.enter(route.name, route.settings, incoming.caller)
            try:
                yield replace(incoming, placed=True)
            finally:
                release()

    async def forward(self, request: AnyRequest) -> Relayed:
        """The answer of the route's upstream to the request as it came; its ``close`` must be called.

        Raises:
            NotFoundError: no route with an upstream takes the request.
            OverloadedError: too many requests at once.
            UnavailableError, UpstreamError: the upstream cannot answer.
        """
        async with AsyncExitStack() as held:
            table = held.enter_context(self.routes.table.held())
            refuses = await self.hear(request.headers, object_in(request.body) or {}, request.caller)
            route, upstream = await _forwarding(table, request)
            note(route=route.name, policy="upstream")
            _consents(route, request, refuses=refuses)
            with phase("queue"):
                held.callback(await self.admission.enter(route.name, route.settings, request.caller))
            with phase("upstream"):
                relayed = await upstream.forward(request)
            return _holding(relayed, held)

    async def hear(self, headers: Mapping[str, str], body: Mapping[str, Any], caller: Caller) -> bool:
        """Note whose request it is, by its headers and its body in any dialect. Whether its key or its session says no,
        now or before: then its texts are written nowhere, whatever becomes of it."""
        user, session, own = whose(headers, body)
        note(key=caller.key_id, user=user_digest(user), session=session)
        refuses = await self.keys.refusals.hear(caller.key_id, session, headers, own)
        if refuses:
            note(texts=False)
        return refuses

    async def is_plain(self, model: str | None, caller: Caller, *, alone: bool = False) -> bool:
        """Whether an upstream answers the requests for ``model``, as they came: none are masked; with ``alone`` no
        challenger ever does."""
        try:
            with self.routes.table.held() as table:
                route = await table.find(model, caller)
        except SwarmGatewayError:
            return False
        plain = route.training is None if alone else route.plain
        return plain and route.settings.data.redact != "before_sampling"

    async def _admitted(self, incoming: Incoming, route: Route, table: RouteTable) -> Outcome:
        async with AsyncExitStack() as held:
            # the caller may leave before work that a retry shares: the work holds its routes and its place itself
            held.enter_context(table.held())
            if not incoming.placed:
                with phase("queue"):
                    held.callback(await self.admission.enter(route.name, route.settings, incoming.caller))
            return _holding(await self._produce(incoming, route), held)

    async def _produce(self, incoming: Incoming, route: Route) -> Outcome:
        training = route.training_of(incoming.caller)
        if training is None:
            assert route.upstream is not None
            return await _relayed(route, route.upstream, incoming, "")
        if route.shadow is None:
            return await self._trained(_Asked(incoming, route, training))
        draw = route.shadow.sides.draw(incoming)
        outcome = await self._of_side(_Asked(incoming, route, training), route.shadow, draw)
        self.delivered.note(incoming, training, route.shadow, draw, outcome)
        return outcome

    async def _of_side(self, asked: _Asked, shadow: Shadow, draw: Draw) -> Outcome:
        """The answer of the side that is drawn, or of what stands in for it; the other side answers behind it."""
        incoming, route, training = asked.incoming, asked.route, asked.training
        upstream, settings = route.upstream, route.settings
        assert upstream is not None and settings.serve is not None, "an incumbent is one"
        if draw.side == "challenger":
            left_out = LeftOut(incoming.left_out.dialect, {}, incoming.left_out.note)
            left_out.add(incoming.call.left_out)
            behind_it = shadow.asks(training, incoming, draw, lambda incoming: upstream.relay(incoming, ""))
            within = settings.serve.challenger_seconds
            asked = _Asked(replace(incoming, left_out=left_out), route, giving_way(training, LONGEST_WAIT), within)
            try:
                outcome = await self._trained(asked, behind_it)
            except RequestError as exc:
                # the incumbent may take what the challenger cannot
                reason = exc.code or exc.type
                return _from_side(await _relayed(route, upstream, incoming, reason), INCUMBENT, draw)
            incoming.left_out.headers |= left_out.headers
            return _from_side(outcome, CHALLENGER, draw)
        behind = _without_lines(replace(incoming, left_out=LeftOut()), route.settings)
        overheard = shadow.overhears(training, behind, draw)
        return _from_side(overheard.outcome(await _relayed(route, upstream, incoming, "")), INCUMBENT, draw)

    async def _trained(self, asked: _Asked, behind: Callable[[GroupRun], None] | None = None) -> Outcome:
        """The answer of the swarm's policy, or of what stands in for it; ``behind``: as of :func:`best`, for a request
        that trains."""
        route, training, within = asked.route, asked.training, asked.within
        upstream, settings = route.upstream, route.settings
        incoming = _without_lines(asked.incoming, settings)
        asked = replace(asked, incoming=incoming)
        policy = ReturnPolicy.of(settings, incoming.headers)
        # refuses a session's name that is too long, also where nothing is trained
        names_of(incoming, route.name)
        passed = passes(settings, incoming) if policy.train is None else None
        silent = not incoming.consent.granted and policy.train is not False
        if withheld := incoming.consent.granted and incoming.consent.withholds(incoming.call.body):
            incoming.consent.granted = False
            route.stats.withheld["prompt"] += 1
        consent = incoming.consent.granted
        trains = consent and policy.trains(settings, route.name, incoming.request_id)
        if (
            upstream is not None
            and upstream.available
            and (gone := training.swarm.gone_for(settings.offline_wait_seconds))
        ):
            # earlier requests have waited in vain for as long as this one would
            return await self._fallback(asked, gone)
        session: SessionLink | None = None
        stand_in: Coroutine[Any, Any, Outcome]
        try:
            if passed is not None:
                raise PassedThroughError(passed)
            # who says nothing, or too much, gets the best of N all the same
            reason = DropReason.PRIVATE if withheld else NO_CONSENT if silent else NOT_CHOSEN
            fans_out = policy.fans_out and settings.num_repeat != 1
            if not trains and not (fans_out and (policy.asked_for or silent or withheld)):
                return await self._single(asked, reason, tells=silent or withheld)
            if consent:
                session = self.sessions.link(incoming, route.name, settings, training.hooks)
            else:
                self.sessions.count_untrained(incoming, route.name, reason)
            note(route=route.name, policy=policy.kind)
            if policy.kind == "first":
                outcome = await first(training, incoming, session, behind, within)
                route.stats.answers[Choice.FIRST] += 1
                return outcome
            untrained = None if trains else Untrained(reason)
            return await best(training, incoming, session, policy, untrained, behind if trains else None, within)
        except PassedThroughError as exc:
            route.stats.passed_through[exc.rule] += 1
            stand_in = self._single_or_fallback(asked, f"pass_through:{exc.rule}")
        except (UnavailableError, UpstreamError) as exc:

            async def from_engine(reason: str) -> Outcome:
                """Nothing is sampled yet, and the engine may serve although it gave no episodes."""
                if policy.fans_out and training.swarm.report.num_repeat is not None:
                    with suppress(PassedThroughError):
                        again = Untrained(reason, patient=False)
                        return await best(training, incoming, session, policy, again, within=within)
                return await self._single(asked, reason, patient=False)

            if exc.code in NO_EPISODE_NEEDED or exc.code == DropReason.PRIVATE:
                stand_in = self._single_or_fallback(asked, exc.code)
            else:
                sampled = not (trains and isinstance(exc, UnavailableError))
                stand_in = self._fallback(asked, exc, None if sampled else from_engine)
        async with AsyncExitStack() as held:
            if session is not None:
                held.enter_context(self.sessions.held(session))
            return _holding(await stand_in, held)

    async def _single_or_fallback(self, asked: _Asked, reason: str) -> Outcome:
        """One answer of the engine's, which no hook judges; it says why it is not trained."""
        try:
            return await self._single(asked, reason)
        except (UnavailableError, UpstreamError) as exc:
            return await self._fallback(asked, exc)

    async def _single(self, asked: _Asked, reason: str, *, patient: bool = True, tells: bool = True) -> Outcome:
        """One answer of the engine's; ``reason``: why nothing is trained, and ``tells``: the answer says so."""
        route = asked.route
        note(route=route.name, policy="single")
        # a stream that has begun by then goes on
        with phase("sample"):
            async with answering_within(asked.within):
                outcome = await single(asked.training, asked.incoming, reason if tells else None, patient=patient)
        route.stats.answers[Choice.SINGLE] += 1
        self.sessions.count_untrained(asked.incoming, route.name, reason)
        return outcome

    async def _fallback(
        self,
        asked: _Asked,
        error: UnavailableError | UpstreamError,
        from_engine: Callable[[str], Awaitable[Outcome]] | None = None,
    ) -> Outcome:
        """The answer where the swarm gave no episodes: from the upstream, else ``from_engine`` if it serves now, which
        is told why nothing is trained."""
        incoming, route, reason = asked.incoming, asked.route, error.code or DropReason.UNAVAILABLE
        if route.upstream is not None:
            try:
                outcome = await _relayed(route, route.upstream, incoming, reason)
            except UnavailableError as exc:
                # its breaker is open, or it is out of reach
                error = exc
            else:
                if not route.upstream.lacks(incoming.path, outcome):
                    route.stats.fallbacks[reason] += 1
                    self.sessions.count_untrained(incoming, route.name, reason)
                    return outcome
                if isinstance(error, UnavailableError):
                    why = f"{error.message}; the upstream has no {incoming.path}"
                    error = UnavailableError(why, code=error.code, retry_after=error.retry_after or 5.0)
        if from_engine is None:
            raise error
        try:
            outcome = await from_engine(reason)
        except FatalRequestError:
            raise
        except (UnavailableError, UpstreamError):
            raise error from None
        route.stats.fallbacks[reason] += 1
        return outcome


def with_placeholders(route: Route, body: dict[str, Any]) -> dict[str, Any]:
    """A ``body`` of any dialect, which nobody samples, as its route masks those that are sampled."""
    data = route.settings.data
    if data.redact != "before_sampling":
        return body
    call = LLMRequest(None, body.get("messages") or [], 1, stream=False, include_usage=False, body=body)
    return _masked(Incoming(call, {}, Caller(), "", b"", "", consent=Consent(rules=data.rules))).call.body


def _consents(route: Route, request: Incoming | AnyRequest, *, refuses: bool) -> bool:
    """Whether the request's texts may be kept, which is noted for whoever would write them; ``refuses``: its session
    says no."""
    data = route.settings.data
    try:
        header = header_consent(request.headers)
    except RequestError:
        if route.shadow is None:
            raise
        # behind an incumbent the user is answered all the same, and what may have been a no counts as one
        header = False
    granted = not refuses and consents(data.consent, request.caller.train, header)
    # a streamed answer is written in parts, each of which may look harmless
    note(texts=granted and data.redact == "none")
    return granted


def _without_lines(incoming: Incoming, settings: RouteSettings) -> Incoming:
    """The request without the lines that its route drops; its answer says so."""
    body, lines = without_lines(incoming.call.body, settings.drop_lines)
    if not lines:
        return incoming
    names = [_UNPRINTABLE.sub("?", line.partition(":")[0])[:_LONGEST_NAME] for line in lines]
    incoming.left_out.add(f"system: the line {name}, which would defeat the prefix cache" for name in names)
    return replace(incoming, call=replace(incoming.call, body=body, messages=body["messages"]))


def _holding(outcome: OutcomeT, held: AsyncExitStack) -> OutcomeT:
    """``outcome``, whose ``close`` also closes what was ``held`` for it."""
    if outcome.close is not None:
        held.push_async_callback(outcome.close)
    return replace(outcome, close=held.pop_all().aclose)


@contextmanager
def _counted(stats: Stats) -> Generator[None]:
    """Count a request, which is in flight inside the block, and an error that leaves it."""
    stats.requests += 1
    stats.in_flight += 1
    try:
        yield
    except SwarmGatewayError as exc:
        stats.errors[exc.code or exc.type] += 1
        raise
    finally:
        stats.in_flight -= 1


async def _relayed(route: Route, upstream: Upstream, incoming: Incoming, reason: str) -> Outcome:
    note(route=route.name, policy="upstream")
    with phase("upstream"):
        outcome = await upstream.relay(incoming, reason)
    route.stats.answers[Choice.UPSTREAM] += 1
    if (serve := route.settings.serve) is None:
        return outcome
    version = {POLICY_VERSION: str(serve.incumbent.version)} if serve.incumbent.version else {}
    return replace(outcome, headers={**outcome.headers, SOURCE: INCUMBENT, **version})


def _from_side(outcome: Outcome, side: Side, draw: Draw) -> Outcome:
    """``outcome`` with headers that say which side answered (unless they are there) and where the conversation was
    drawn."""
    position = {} if draw.position is None else {POSITION: f"{draw.position:.6f}"}
    return replace(outcome, headers={SOURCE: side, **position, **outcome.headers})


async def _forwarding(table: RouteTable, request: AnyRequest) -> tuple[Route, Upstream]:
    """The model's route and its upstream; for a model of no route, such as for embeddings, the only route with one."""
    try:
        route = await table.find(request.model, request.caller)
    except NotFoundError:
        able = [route for route in table.routes if route.upstream is not None and request.caller.opens(route.name)]
        if len(able) > 1:
            raise
        route = able[0] if able else None
    if route is None or route.upstream is None:
        where = "this gateway" if route is None else f"the route {route.name!r}"
        raise NotFoundError(
            f"{request.method} {request.path}: {where} does not answer this itself and has no upstream to pass it on "
            "to (`upstream` in its configuration)",
            code="route_not_found",
        )
    return route, route.upstream
