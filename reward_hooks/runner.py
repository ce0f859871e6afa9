"""Run hooks with a deadline and an error boundary, sync hooks in threads that can be abandoned.

Invariant: whatever user code does (hang, raise, exit, return nonsense, change its arguments), the caller gets either a
valid result or a ``HookError`` with the reason, within the timeout. At most ``limit`` threads exist, abandoned ones
included, and none of them keeps the process alive.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import traceback
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar, cast

from reward_hooks.contract import (
    REWARD,
    SESSION_END,
    SUBMIT,
    Candidate,
    GroupScore,
    HookContext,
    Hooks,
    PassThrough,
    ResultError,
    Reward,
    Session,
    Submission,
    UserRequest,
    checked_outcome,
    checked_rewards,
    checked_submission,
    default_task,
    sendable,
)
from swarm.errors import HookError
from swarm.importer import is_installed
from swarm.types import Model, Task

T = TypeVar("T")

#: Seconds that a cancelled async hook gets to stop before it is left behind.
CANCEL_GRACE = 0.5


@dataclass(frozen=True)
class Done:
    """How a call ended: ``error`` is set, or ``value`` is what it returned."""

    value: Any = None
    error: BaseException | None = None


class _HookThread(Thread):
    """Makes the ``calls`` that it is given, and reports how each ended; ``None`` ends it."""

    def __init__(self) -> None:
        super().__init__(name="reward-hook", daemon=True)
        self.calls = SimpleQueue[tuple[Callable[[], Any], Callable[[Done], None]] | None]()

    def run(self) -> None:
        while (work := self.calls.get()) is not None:
            call, report = work
            try:
                done = Done(value=call())
            except BaseException as exc:  # SystemExit must not be printed
                done = Done(error=exc)
            report(done)
            # what it was called with is nobody's to keep; the traceback of an error leads to this frame
            del work, call, report, done


def _end(threads: list[_HookThread]) -> None:
    for thread in threads:
        thread.calls.put(None)


class HookThreads:
    """Daemon threads, each for one call at a time; those without a call wait for the next one.

    A Python thread cannot be killed: a call past its deadline is abandoned, and its thread is taken until the call
    returns. Once ``limit`` calls hang, further calls fail at once. (A ``ThreadPoolExecutor`` would join its hung
    threads when the interpreter ends.) Use it from one event loop at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free_threads = asyncio.Semaphore(limit)
        #: when the calls that run are to end, by the clock of event loops
        self._deadlines: dict[_HookThread, float] = {}
        #: threads without a call
        self._idle: list[_HookThread] = []
        weakref.finalize(self, _end, self._idle)

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Done:  # noqa: ASYNC109
        """Run ``function(*args)`` in a thread; whatever it raises is returned.

        Raises:
            TimeoutError: it is still running after ``timeout`` seconds, which include the wait for a place.
            HookError: it got no place by then (``hook_timeout``), every place is held by a call that hangs, or no
                thread can be started (``hook_busy``).
        """
        loop, context = asyncio.get_running_loop(), copy_context()
        now = loop.time()
        # also those whose caller left a little earlier, such as a blend at its own deadline
        if sum(end <= now for end in self._deadlines.values()) >= self._limit:
            raise HookError(
                f"all {self._limit} hook threads are held by calls that never returned; restart the gateway and put a "
                "timeout into the hook",
                code="hook_busy",
            )
        deadline = now + timeout
        outcome: asyncio.Future[Done] = loop.create_future()
        thread: _HookThread

        def report(done: Done) -> None:
            try:
                loop.call_soon_threadsafe(finish, done)
            except RuntimeError:  # the loop is closed, nobody waits
                thread.calls.put(None)

        def finish(done: Done) -> None:
            del self._deadlines[thread]
            self._idle.append(thread)
            self._free_threads.release()
            if not outcome.done():
                outcome.set_result(done)

        try:
            async with asyncio.timeout_at(deadline):
                await self._free_threads.acquire()
        except TimeoutError as exc:
            raise HookError(
                f"was not begun within {timeout:g} s: {self._limit} calls run at once, a thread for each, and all were "
                "taken",
                code="hook_timeout",
            ) from exc
        async with asyncio.timeout_at(deadline):
            try:
                thread = self._thread()
            except RuntimeError as exc:
                self._free_threads.release()
                raise HookError(f"cannot start a hook thread: {exc}", code="hook_busy") from exc
            self._deadlines[thread] = deadline
            thread.calls.put((partial(context.run, function, *args), report))
            return await outcome

    def _thread(self) -> _HookThread:
        """One without a call; a hook may have ended some by an exception that came late."""
        while self._idle:
            if (idle := self._idle.pop()).is_alive():
                return idle
        thread = _HookThread()
        thread.start()
        return thread


class HookRunner:
    """Calls one set of hooks; safe for concurrent use from one event loop.

    Sync hooks run in threads and cannot block the server; async hooks share the server's event loop and must not block
    it. At most ``max_threads`` sync calls run at once, hung ones included, and at most as many async calls that ignore
    their cancellation are left behind; beyond that, calls fail at once with ``hook_busy``.

    All methods raise :class:`HookError` if the hook fails. Its ``code`` is ``hook_timeout``, ``hook_raised``,
    ``hook_result``, ``hook_busy``, or ``hook_arguments`` (the arguments cannot be copied). If the hook raised a
    ``HookError``, the code is the one of that error, or ``hook_refused`` if it has none.

    Args:
        hooks: what :func:`reward_hooks.load_hooks` returned.
        timeout: seconds that each call may take; a smaller ``context.deadline_seconds`` wins.
        max_threads: see above.

    Attributes:
        source, code: where the hooks came from, and a digest of their files.
        ends_sessions: whether there is a hook for the end of a session.
    """

    def __init__(self, hooks: Hooks, timeout: float = 30.0, *, max_threads: int = 16) -> None:
        self.source, self.code, self.ends_sessions = hooks.source, hooks.code, hooks.session_end is not None
        self._hooks = hooks
        self._timeout = timeout
        self._threads = HookThreads(max_threads)
        self._max_stray = max_threads
        self._stray: set[asyncio.Task[Done]] = set()

    async def submit(self, request: UserRequest, context: HookContext) -> Submission | PassThrough:
        """Shape ``request`` into ``context.num_repeat`` request bodies of one task, unless it is to pass through.

        Without a hook these are N copies of the request, and the task is the request itself.
        """
        if self._hooks.submit is None:
            return Submission(
                task=default_task(request), requests=[dict(request.body) for _ in range(context.num_repeat)]
            )
        return await self._checked(
            SUBMIT, self._hooks.submit, context, lambda result: checked_submission(result, request, context), request
        )

    async def score(self, task: Task, candidates: Sequence[Candidate], context: HookContext) -> GroupScore:
        """Score ``candidates`` relative to each other; if this fails, the group must not be trained."""
        rewards = await self._checked(
            REWARD,
            self._hooks.reward,
            context,
            lambda result: checked_rewards(result, len(candidates), "candidates"),
            task,
            list(candidates),
        )
        return GroupScore(rewards=rewards)

    async def end_session(self, session: Session, context: HookContext) -> Reward | list[Reward] | None:
        """The outcome of ``session``, or what each of its turns earns, in order; ``None`` without such a hook, or where
        it does not know."""
        if self._hooks.session_end is None:
            return None
        return await self._checked(
            SESSION_END,
            self._hooks.session_end,
            context,
            lambda result: checked_outcome(result, len(session.turns)),
            session,
        )

    async def _checked(
        self, name: str, hook: Callable[..., Any], context: HookContext, check: Callable[[Any], T], *args: Any
    ) -> T:
        """Call ``hook`` with copies of ``args``, which it may change, and ``check`` what it returns."""
        try:
            copies = _copied(list(args), {})
        except Exception as exc:
            reason = f"cannot be given a copy of its arguments: {type(exc).__name__}: {exc}"
            public = f"cannot be given a copy of its arguments: {type(exc).__name__}"
            raise self._error(name, reason, "hook_arguments", public) from exc
        result = await self._call(name, hook, context, *copies)
        try:
            return check(result)
        except Exception as exc:  # objects of user code may raise whenever they are touched
            public = str(exc) if isinstance(exc, ResultError) else f"returned what is no result: {type(exc).__name__}"
            raise self._error(name, str(exc), "hook_result", public) from exc

    async def _call(self, name: str, hook: Callable[..., Any], context: HookContext, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        seconds = min(self._timeout, context.deadline_seconds)
        deadline = loop.time() + seconds
        try:
            if len(self._stray) >= self._max_stray:
                raise HookError(f"has left {len(self._stray)} calls that ignore their cancellation", code="hook_busy")
            if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__):
                done = Done(value=hook(*args, context))
            else:
                done = await self._threads.call(hook, *args, context, timeout=seconds)
            if inspect.isawaitable(done.value):
                done = await self._settle(done.value, deadline - loop.time())
        except TimeoutError:
            raise self._error(name, f"took longer than {seconds:g} s", "hook_timeout") from None
        except HookError as exc:
            raise self._error(name, exc.message, exc.code or "hook_busy") from exc
        error = done.error
        while isinstance(error, BaseExceptionGroup):
            # a TaskGroup raises a group of its failures: the error names the first of them
            error = error.exceptions[0]
        if error is None:
            return done.value
        location = _location(error, hook)
        if isinstance(error, HookError):
            code = error.code if error.code != HookError.default_code else "hook_refused"
            public = "gives no result" + (f": {error.public_message}" if error.public_message else location)
            message = f"gives no result: {error.message}"
            raise self._error(name, message, code or "hook_refused", public) from error
        # SystemExit and KeyboardInterrupt must not travel on, not even as a cause
        cause = error if isinstance(error, Exception) else None
        public = f"raised {type(error).__name__}{location}"
        raise self._error(name, f"raised {_description(error)}{location}", "hook_raised", public) from cause

    async def _settle(self, awaitable: Awaitable[Any], seconds: float) -> Done:
        """Await user code in its own task, so that code which swallows its cancellation can be left behind."""

        async def guarded() -> Done:
            try:
                return Done(value=await awaitable)
            except BaseException as exc:  # SystemExit in a task would stop the event loop
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

    def _error(self, name: str, reason: str, code: str, public: str = "") -> HookError:
        # the text of an exception may hold a lone surrogate
        error = HookError(f"{self.source}: {name} {sendable(reason)}", code=code)
        error.public_message = f"{name} {sendable(public or reason)}"
        return error


_PLAIN = frozenset({str, int, float, bool, type(None)})


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A deep copy, several times as fast as :mod:`copy` for JSON and for our models; ``copies`` maps ids to copies."""
    kind = type(value)
    if (copied := copies.get(id(value))) is not None:
        return copied
    if kind is dict:
        made: Any = {key: inner if type(inner) in _PLAIN else _copied(inner, copies) for key, inner in value.items()}
    elif kind is list:
        made = [inner if type(inner) in _PLAIN else _copied(inner, copies) for inner in value]
    elif isinstance(value, Model):
        made = copy.copy(value)
        changing = [(name, inner) for name, inner in value.__dict__.items() if type(inner) not in _PLAIN]
        made.__dict__.update({name: _copied(inner, copies) for name, inner in changing})
    else:
        made = copy.deepcopy(value)
    copies[id(value)] = made
    return made


def _description(error: BaseException) -> str:
    """Type and message, with the notes; of a syntax error without the line that it quotes."""
    lines = traceback.format_exception_only(error)
    return "".join(lines[-1:] if isinstance(error, SyntaxError) else lines).strip()


def _location(error: BaseException, hook: Callable[..., Any]) -> str:
    """The last line that is in the hook's file or beside it, in brackets."""
    function: Any = inspect.unwrap(hook)
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and _is_beside(frame.filename, code.co_filename)] or frames
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _is_beside(file: str, other: str) -> bool:
    """Whether ``file`` is ``other``, or one of the user's own in its folder or below."""
    return file == other or (Path(file).is_relative_to(Path(other).parent) and not is_installed(file))
