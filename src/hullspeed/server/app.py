"""The ASGI application: routes, and the boundary at which errors become answers."""

from __future__ import annotations

import sys
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hullspeed.errors import HullspeedError
from hullspeed.server.auth import Authentication
from hullspeed.server.chat import chat_completions
from hullspeed.server.completions import completions
from hullspeed.server.errors import ApiError, error_response, internal_error, to_api_error
from hullspeed.server.metrics import Exposition, Metrics
from hullspeed.server.service import Service
from hullspeed.server.status import health, metrics, model, models, ready, version
from hullspeed.server.tokens import detokenize, tokenize

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health),
    Route("/ready", ready),
    Route("/metrics", metrics),
    Route("/version", version),
]


def make_app(service: Service) -> Starlette:
    """The application for ``service``."""
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(HttpMetrics, metrics=service.metrics),
            Middleware(Authentication, settings=service.settings),
        ],
        exception_handlers={
            HullspeedError: _on_known_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_unknown_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.exposition = Exposition(service.metrics, service, service.names[0])
    return app


class HttpMetrics:
    """ASGI middleware: counts and times requests by route, never by a client's own path."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note its status and duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status = 499  # nothing was sent: the client left

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
            seconds = time.monotonic() - started_s
            self._metrics.observe_http(method, _handler(scope), status, seconds)


def _handler(scope: Scope) -> str:
    for route in ROUTES:
        if route.matches(scope)[0] is not Match.NONE:
            return route.path
    return "other"


async def _on_known_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HullspeedError):
        raise error
    answer = to_api_error(error)
    if answer.status >= 500 and not isinstance(error, ApiError):
        sys.stderr.write(f"{request.scope['path']!r}: {error}\n")
    return error_response(answer)


async def _on_http_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        what, code = "there is no such path", "not_found"
    elif error.status_code == 405:
        what, code = "this path does not take this method", "method_not_allowed"
    else:
        what, code = "the request cannot be served", "bad_request"
    response = error_response(ApiError(error.status_code, what, code=code))
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody is there to read it


async def _on_unknown_error(_request: Request, _error: Exception) -> Response:
    """The boundary of one request: a defect of ours ends this request and nothing else.

    Starlette raises the error again once this is sent, and uvicorn logs it with its traceback.
    """
    return error_response(internal_error())
