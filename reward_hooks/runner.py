"""Run hooks inside a deadline and an error boundary.

Invariant: whatever user code does (hang, raise, exit, return nonsense, change its arguments), the caller gets either a
valid result or a ``HookError`` that says why, within the timeout.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, cast

from reward_hooks.contract import (
    REWARD,
    SESSION_END,
    SUBMIT,
    Candidate,
    GroupScore,
    HookContext,
    Hooks,
    Reward,
    Session,
    Submission,
    UserRequest,
)
from reward_hooks.threads import Done, HookThreads
from swarm.errors import HookError
from swarm.text import sendable
from swarm.types import Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that an async hook gets to honour its cancellation before it is left behind.
CANCEL_GRACE = 0.5


class HookRunner:
    """Calls one set of hooks; safe for concurrent use from one event loop.

    Sync hooks run in threads and cannot hold the server up; async hooks share the server's event loop and must not
    block it. At most ``max_threads`` sync calls run at once, hung ones included (see :class:`HookThreads`), and as many
    async calls that ignore their cancellation are left behind; then hooks fail at once with ``hook_busy``.

    Args:
        hooks: what :func:`reward_hooks.load_hooks` returned.
        timeout: seconds that each call may take; a smaller ``context.deadline_seconds`` wins.
        max_threads: bound on threads of sync hooks and on async calls left behind.
    """

    def __init__(self, hooks: Hooks, timeout: float = 30.0, *, max_threads: int = 16) -> None:
        self._hooks = hooks
        self._timeout = timeout
        self._threads = HookThreads(max_threads)
        self._max_stray = max_threads
        self._stray: set[asyncio.Task[Done]] = set()

    @property
    def source(self) -> str:
        """Where the hooks came from."""
        return self._hooks.source

    @property
    def ends_sessions(self) -> bool:
        """Whether there is a hook for the end of a session."""
        return self._hooks.session_end is not None

    async def submit(self, request: UserRequest, context: HookContext) -> Submission:
        """Shape ``request`` into ``context.num_repeat`` request bodies of one task.

        Without a hook these are N copies of the request, and the task is the request itself.

        Raises:
            HookError: the hook failed; ``code`` is ``hook_timeout``, ``hook_raised``, ``hook_result`` or ``hook_busy``;
                or what it is to get cannot be copied (``hook_arguments``); or it raised a ``HookError`` itself: then
                the code is that one's, ``hook_refused`` if it has none of its own.
        """
        if self._hooks.submit is None:
            return Submission(
                task=default_task(request), requests=[dict(request.body) for _ in range(context.num_repeat)]
            )
        result = await self._call(SUBMIT, self._hooks.submit, context, self._copied(SUBMIT, request))
        try:
            return _checked_submission(result, request, context)
        except Exception as exc:  # what user code returns may raise at any touch
            raise self._error(SUBMIT, str(exc), "hook_result") from exc

    async def score(self, task: Task, candidates: Sequence[Candidate], context: HookContext) -> GroupScore:
        """Score ``candidates`` relative to each other.

        Raises:
            HookError: the hook failed; see :meth:`submit`. The group must not be trained.
        """
        copies = self._copied(REWARD, task), self._copied(REWARD, list(candidates))
        result = await self._call(REWARD, self._hooks.reward, context, *copies)
        try:
            return GroupScore(rewards=_checked_rewards(result, len(candidates), "candidates"))
        except Exception as exc:  # what user code returns may raise at any touch
            raise self._error(REWARD, str(exc), "hook_result") from exc

    async def end_session(self, session: Session, context: HookContext) -> list[Reward] | None:
        """What each turn of ``session`` earns for the whole of it, in their order; ``None`` without such a hook.

        Raises:
            HookError: the hook failed; see :meth:`submit`. No turn earns anything.
        """
        if self._hooks.session_end is None:
            return None
        copied = self._copied(SESSION_END, session)
        result = await self._call(SESSION_END, self._hooks.session_end, context, copied)
        try:
            return _checked_rewards(result, len(session.turns), "turns")
        except Exception as exc:  # what user code returns may raise at any touch
            raise self._error(SESSION_END, str(exc), "hook_result") from exc

    def _copied(self, name: str, argument: T) -> T:
        """What a hook may change as it likes; the task of a submit hook can hold anything, deep nesting included."""
        try:
            return copy.deepcopy(argument)
        except Exception as exc:
            reason = f"cannot be given a copy of its arguments: {type(exc).__name__}: {exc}"
            raise self._error(name, reason, "hook_arguments") from exc

    async def _call(self, name: str, hook: Callable[..., Any], context: HookContext, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        seconds = min(self._timeout, context.deadline_seconds)
        deadline = loop.time() + seconds
        try:
            if len(self._stray) >= self._max_stray:
                raise HookError(f"has left {len(self._stray)} calls that ignore their cancellation", code="hook_busy")
            if inspect.iscoroutinefunction(hook):
                done = Done(value=hook(*args, context))
            else:
                done = await self._threads.call(hook, *args, context, timeout=seconds)
            if inspect.isawaitable(done.value):
                done = await self._settle(done.value, deadline - loop.time())
        except TimeoutError:
            raise self._error(name, f"took longer than {seconds:g} s", "hook_timeout") from None
        except HookError as exc:
            raise self._error(name, exc.message, exc.code or "hook_busy") from exc
        if done.error is None:
            return done.value
        if isinstance(done.error, HookError):  # the hook's own word that it cannot tell
            code = done.error.code if done.error.code != HookError.default_code else "hook_refused"
            raise self._error(name, f"gives no result: {done.error.message}", code or "hook_refused") from done.error
        # an Exception keeps its trace; an exit of the interpreter must not travel on, not even as a cause
        cause = done.error if isinstance(done.error, Exception) else None
        raise self._error(name, f"raised {_describe(done.error, hook)}", "hook_raised") from cause

    async def _settle(self, awaitable: Awaitable[Any], seconds: float) -> Done:
        """Await user code in a task of its own, so that code which swallows its cancellation can be left behind."""

        async def guarded() -> Done:
            try:
                return Done(value=await awaitable)
            except BaseException as exc:  # SystemExit out of a task would stop the event loop
                return Done(error=exc)

        task = asyncio.get_running_loop().create_task(guarded())
        try:
            await asyncio.wait({task}, timeout=max(0.0, seconds))
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE)
        finally:
            if not task.done():
                task.cancel()
                # the loop holds tasks weakly
                self._stray.add(task)
                task.add_done_callback(self._stray.discard)
        raise TimeoutError

    def _error(self, name: str, reason: str, code: str) -> HookError:
        # an exception's words can be half a surrogate pair
        error = HookError(f"{self._hooks.source}: {name} {sendable(reason)}", code=code)
        logger.warning("%s fails: %s", name, error)
        return error


def default_task(request: UserRequest) -> Task:
    """The task of a request that no hook has shaped: one of its own, named by the request id."""
    listed: Any = request.body.get("messages")
    listed = cast("list[Any]", listed) if isinstance(listed, list) else []
    messages = [cast("dict[str, Any]", entry) for entry in listed if isinstance(entry, dict)]
    prompt: Any = request.body.get("prompt")
    if not messages and isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]  # a raw prompt
    asked = [_text(entry.get("content")) for entry in messages if entry.get("role") == "user"]
    return Task(task_id=request.request_id, main_query=asked[-1] if asked else "", init_messages=messages)


def _text(content: object) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [cast("dict[str, Any]", part).get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _checked_submission(result: object, request: UserRequest, context: HookContext) -> Submission:
    if isinstance(result, Submission):
        task, listed = result.task, cast("list[Any]", result.requests)
    elif isinstance(result, list | tuple):
        task, listed = default_task(request), list(cast("Sequence[Any]", result))
    else:
        raise ValueError(f"returned a {type(result).__name__}; return a list of request bodies or a Submission")
    if len(listed) != context.num_repeat:
        raise ValueError(f"returned {len(listed)} requests; return {context.num_repeat} (context.num_repeat)")
    checked: set[int] = set()
    for index, body in enumerate(listed):
        if not isinstance(body, dict):
            raise ValueError(f"returned a {type(body).__name__} as request {index}; return JSON objects")
        if id(cast(object, body)) not in checked:  # N times the same body is the usual case
            try:
                json.dumps(body, allow_nan=False)
            except (TypeError, ValueError) as exc:
                raise ValueError(f"returned request {index} that is not JSON: {exc}") from exc
            checked.add(id(cast(object, body)))
    return Submission(task=task, requests=listed)


def _checked_rewards(result: object, count: int, of: str) -> list[Reward]:
    if not isinstance(result, list | tuple):
        raise ValueError(f"returned a {type(result).__name__}; return a list with one reward per {of[:-1]}")
    values = list(cast("Sequence[object]", result))
    if len(values) != count:
        raise ValueError(f"returned {len(values)} rewards for {count} {of}")
    if not values:
        raise ValueError(f"was given no {of}")
    return [_checked_reward(value, index) for index, value in enumerate(values)]


def _checked_reward(value: object, index: int) -> Reward:
    reward = value if isinstance(value, Reward) else None
    number = reward.value if reward is not None else value
    if not isinstance(number, Real):
        raise ValueError(f"returned a {type(number).__name__} as reward {index}; return a number or a Reward")
    if not math.isfinite(number):
        raise ValueError(f"returned {number} as reward {index}; rewards must be finite")
    if reward is None:
        return Reward(value=float(number))
    # validated again: model_construct and subclasses can carry anything
    return Reward.model_validate(reward.model_dump())


def _describe(error: BaseException, hook: Callable[..., Any]) -> str:
    """Type, message and the line of user code that raised."""
    said = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(hook), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames
    return f"{said} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else said
