"""The error tree, named by the boundary crossed; each error knows its OpenAI-shaped body and whether a retry helps."""

from __future__ import annotations

from typing import Any


class SwarmGatewayError(Exception):
    """Root of every error this project raises on purpose.

    Args:
        message: what happened and what to do about it, in one sentence.
        code: machine-readable word, e.g. ``"episode_not_found"``.
        param: the request field at fault, when there is one.
        retry_after: seconds after which a retry may succeed; ``None`` where no retry helps.
        status: over HTTP; default that of the class.
    """

    status = 500
    type = "server_error"
    default_code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status or type(self).status
        self.code = code or self.default_code
        self.param = param
        self.retry_after = retry_after

    @property
    def should_retry(self) -> bool:
        """Whether repeating the same request unchanged can succeed and is safe."""
        return self.retry_after is not None

    def body(self) -> dict[str, Any]:
        """The OpenAI-shaped JSON body: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ConfigError(SwarmGatewayError):
    """An operator's configuration is wrong: a misspelt key, a missing file, a port in use. A command ends with one line
    and exit code 2."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_config"


class RequestError(SwarmGatewayError):
    """A caller's request is wrong; repeating it unchanged fails again."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class AuthenticationError(RequestError):
    """No key, a wrong key, or a key whose episode has ended."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class ForbiddenError(RequestError):
    """Known, but not allowed to do this."""

    status = 403
    type = "permission_error"
    default_code = "forbidden"


class NotFoundError(RequestError):
    """The named model, episode or route does not exist."""

    status = 404
    default_code = "not_found"


class MethodError(RequestError):
    """The address takes other methods: those in ``allow``, as its header has them."""

    status = 405
    default_code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class ConflictError(RequestError):
    """The request is well formed but the state of the thing it names forbids it."""

    status = 409
    default_code = "conflict"


class PayloadTooLargeError(RequestError):
    """The body is larger than the configured limit."""

    status = 413
    default_code = "payload_too_large"


class UnsupportedEncodingError(RequestError):
    """The body is compressed."""

    status = 415
    default_code = "unsupported_content_encoding"


#: the code of a request that is too long for the model, of ours as of OpenAI's
CONTEXT_LENGTH = "context_length_exceeded"


class ContextLengthError(RequestError):
    """The prompt, or it and the answer that is asked for, has more tokens than the model takes; in OpenAI's words.

    The numbers are in the body as well (``prompt_tokens``, ``max_tokens``, ``max_model_len``), for who says it in other
    words.

    Args:
        limit: tokens that the model takes, prompt and answer together.
        prompt_tokens: of the request.
        answer_tokens: asked for, where the prompt alone would fit; 0: it would not.
        at_least: whether the prompt may be longer than that.
        param: where the prompt stands: ``messages``, ``prompt`` or ``input``.
        hint: a sentence on what else can be done.
    """

    default_code = CONTEXT_LENGTH

    def __init__(
        self,
        *,
        limit: int,
        prompt_tokens: int,
        answer_tokens: int = 0,
        at_least: bool = False,
        param: str = "messages",
        hint: str = "",
    ) -> None:
        more = "at least " if at_least else ""
        if answer_tokens:
            usage = (
                f"you requested {more}{prompt_tokens + answer_tokens} tokens ({more}{prompt_tokens} in the {param}, "
                f"{answer_tokens} in the completion). Please reduce the length of the {param} or completion."
            )
        else:
            usage = f"your {param} resulted in {more}{prompt_tokens} tokens. Please reduce the length of the {param}."
        words = f"This model's maximum context length is {limit} tokens. However, {usage} {hint}"
        super().__init__(words.rstrip(), param=param)
        self._numbers = {"prompt_tokens": prompt_tokens, "max_tokens": answer_tokens, "max_model_len": limit}

    def body(self) -> dict[str, Any]:
        return {"error": {**super().body()["error"], **self._numbers}}


class RelayedError(RequestError):
    """An upstream found fault with the caller's request; the caller gets its words and its status.

    Args:
        status: the upstream's HTTP status, 400 to 499.
        error: the ``error`` object of the upstream's body.
    """

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        code = CONTEXT_LENGTH if error.get("code") == CONTEXT_LENGTH else None
        super().__init__(str(error.get("message") or f"the upstream answered {status}"), code=code, status=status)
        self._error = error

    def body(self) -> dict[str, Any]:
        return {"error": {**super().body()["error"], **self._error}}


class UnavailableError(SwarmGatewayError):
    """Nothing can serve this now; ``retry_after`` says when to come back."""

    status = 503
    type = "service_unavailable_error"
    default_code = "unavailable"

    def __init__(self, message: str, *, code: str | None = None, retry_after: float = 5.0) -> None:
        super().__init__(message, code=code, retry_after=retry_after)


class OverloadedError(UnavailableError):
    """More requests at once than this server takes; nothing was begun for this one."""

    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"


class UpstreamError(SwarmGatewayError):
    """The engine or an upstream answered with an error, or not at all."""

    status = 502
    type = "upstream_error"
    default_code = "upstream_error"


#: the code of a request of which the engine dies
FATAL_REQUEST = "fatal_request"


class FatalRequestError(UpstreamError):
    """The engine died of this request more than once: nobody is to send it again."""

    status = 500
    type = "server_error"
    default_code = FATAL_REQUEST


class StateError(SwarmGatewayError):
    """A state transition that :mod:`swarm.states` does not list."""

    status = 409
    default_code = "invalid_transition"


class HookError(SwarmGatewayError):
    """A reward hook failed to load, raised, timed out or returned something that is no reward.

    Attributes:
        public_message: ``message`` without a word of users, models or user code, for logs and terminals; empty where
            there is no such sentence.
    """

    default_code = "hook_error"
    public_message = ""


class LinkError(SwarmGatewayError):
    """The engine link carried something that its protocol does not allow."""

    default_code = "link_error"


class EngineError(SwarmGatewayError):
    """The engine process could not start, died, or refused a command."""

    default_code = "engine_error"
