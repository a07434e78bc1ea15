"""Errors as the OpenAI API writes them: {"error": {"message", "type", "param", "code"}}.

Only what a client sent may appear in a message: paths, process names and the text of internal
errors go to the log.
"""

from __future__ import annotations

import orjson
from starlette.responses import Response

from hullspeed.errors import EngineError, HullspeedError, RequestError


class ApiError(HullspeedError):
    """An answer other than 2xx, decided.

    Args:
        status: HTTP status.
        code: Stable machine-readable name.
        retry_after_s: Sent as ``Retry-After``.
        close: Close the connection after the answer.
    """

    def __init__(
        self,
        status: int,
        what: str,
        *,
        code: str,
        seen: object = None,
        fix: str = "",
        param: str | None = None,
        retry_after_s: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(what, seen=seen, fix=fix)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.close = close


def to_api_error(error: HullspeedError) -> ApiError:
    """What a client is told about ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(
            error.http_status,
            error.what,
            code=error.code,
            seen=error.seen,
            fix=error.fix,
            param=error.param,
        )
    if isinstance(error, EngineError):
        return engine_lost()
    return internal_error()


def engine_lost() -> ApiError:
    """The engine failed under a request."""
    return ApiError(
        503,
        "the engine failed while this request was running",
        code="engine_error",
        fix="send it again",
        retry_after_s=1,
    )


def internal_error() -> ApiError:
    """Something that is our fault; the details are in the server's log."""
    return ApiError(500, "the server failed to process this request", code="internal_error")


def error_body(error: ApiError) -> bytes:
    """The JSON text of ``error``."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return orjson.dumps(
        {
            "error": {
                "message": _clean(str(error)),
                "type": kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_response(error: ApiError) -> Response:
    """``error`` as an HTTP answer."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.close:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, media_type="application/json")


def _clean(text: str) -> str:
    """Text that any JSON writer accepts: lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
