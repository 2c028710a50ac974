"""What the gateway answers when it cannot answer: one exception hierarchy, one JSON envelope (OpenAI's).

Backends raise their own errors (``backends.base``); :func:`from_exception` is the one place that turns them, and
anything unexpected, into an :class:`ApiError`.
"""

from __future__ import annotations

import math

import msgspec

from backends import base

__all__ = [
    "ApiError",
    "ClientGone",
    "InvalidRequest",
    "MethodNotAllowed",
    "ModelNotFound",
    "NoUpstream",
    "NotLocally",
    "PayloadTooLarge",
    "RateLimited",
    "RequestTimeout",
    "RouteNotFound",
    "Unauthorized",
    "Unavailable",
    "UnsupportedMediaType",
    "UnsupportedParameter",
    "envelope",
    "from_exception",
]

_MESSAGE_CHARS = 1000


class ApiError(Exception):
    """A status and the four fields of OpenAI's error object."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        status: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}
        if code is not None:
            self.code = code
        if type is not None:
            self.type = type
        if status is not None:
            self.status = status


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class NotLocally(InvalidRequest):
    """A valid request that the local engine cannot answer; an upstream that serves the model could. ``reason`` is what
    ``x-onepass-reason`` says then."""

    def __init__(self, message: str, *, reason: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.reason = reason


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code, headers={"www-authenticate": "Bearer"})


class RouteNotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class ModelNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist here.", param="model")


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        allow = ", ".join(allowed)
        super().__init__(f"{method} is not allowed here; use {allow}.", headers={"allow": allow})


class PayloadTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request body exceeds {limit_bytes} bytes (ONEPASS_MAX_BODY_BYTES).", headers={"connection": "close"}
        )


class RequestTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "timeout"

    def __init__(self, timeout_s: float, part: str = "body") -> None:
        super().__init__(
            f"The request's {part} did not arrive within {timeout_s:g} s.", headers={"connection": "close"}
        )


class UnsupportedMediaType(ApiError):
    status = 415
    type = "invalid_request_error"


class RateLimited(ApiError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, headers=retry_after(retry_after_s))


class NoUpstream(ApiError):
    """A request that only a generating server can answer, and none is configured."""

    status = 501
    code = "no_upstream"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why} This needs a generating server, and none is configured: set ONEPASS_UPSTREAM_BASE_URL.",
            headers={"x-should-retry": "false"},
        )


class Unavailable(ApiError):
    status = 503
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, headers=retry_after(retry_after_s))


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def retry_after(seconds: float) -> dict[str, str]:
    """Both spellings; whole seconds are rounded up so that nobody comes back too early."""
    seconds = max(seconds, 0.001)
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def envelope(error: ApiError) -> bytes:
    """Messages repeat what they are about, and that may be megabytes of somebody's request: they are cut."""
    message = error.message if len(error.message) <= _MESSAGE_CHARS else f"{error.message[:_MESSAGE_CHARS]}…"
    return msgspec.json.encode(
        {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}
    )


def from_exception(exc: BaseException, *, prompt_param: str | None = None) -> ApiError:
    """``prompt_param`` names the field the prompt came from. Unexpected exceptions keep their details to the log."""
    match exc:
        case ApiError():
            return exc
        case base.ContextLengthExceeded():
            return NotLocally(str(exc), reason="too-long-locally", param=prompt_param, code="context_length_exceeded")
        case base.InvalidInput():
            return InvalidRequest(str(exc), param=prompt_param, code="invalid_value")
        case base.Overloaded():
            return RateLimited(str(exc), exc.retry_after_s)
        case base.ShuttingDown():
            return Unavailable(str(exc) or "The server is shutting down.")
        case base.OutOfMemory():
            return Unavailable(str(exc))
        case base.BadLogits():
            return ApiError(str(exc), headers={"x-should-retry": "false"})
        case base.UpstreamUnreachable():
            return ApiError(str(exc), status=502, code="upstream_unreachable")
        case base.UpstreamTimeout():
            return ApiError(str(exc), status=504, code="timeout")
        case base.BackendError():
            return ApiError(str(exc))
    return ApiError("The server failed while answering this request; its log has the details.")
