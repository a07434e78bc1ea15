"""What can be asked about the server itself: /health, /ready, /metrics, /version, /v1/models."""

from __future__ import annotations

import time
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from hullspeed import __version__
from hullspeed.errors import UnknownModelError
from hullspeed.server.errors import ApiError
from hullspeed.server.metrics import Exposition
from hullspeed.server.service import Service

STARTED_S = int(time.time())


async def health(request: Request) -> Response:
    """200 while the server lives: this event loop answers and the engine's heart beats.

    Not readiness: a server that is loading or restarting its engine is healthy.
    """
    service: Service = request.app.state.service
    engine = service.engine
    status = {
        "status": "ok" if engine.healthy else "unhealthy",
        "engine": engine.state.value,
        "heartbeat_age_s": round(engine.heartbeat_age_s, 3),
        "restarts": engine.restarts,
    }
    return _json(status, 200 if engine.healthy else 503)


async def ready(request: Request) -> Response:
    """200 while requests are admitted: loaded, not draining."""
    service: Service = request.app.state.service
    if service.admitting:
        return _json({"status": "ready"}, 200)
    state = "draining" if service.draining else service.engine.state.value
    if state == "ready":
        state = "unhealthy" if service.texts is not None else "loading"
    return _json({"status": state}, 503, {"retry-after": str(service.settings.retry_after_s)})


async def metrics(request: Request) -> Response:
    """The Prometheus page."""
    exposition: Exposition = request.app.state.exposition
    return Response(exposition.text(), headers={"content-type": CONTENT_TYPE_LATEST})


async def version(_request: Request) -> Response:
    """This package's version."""
    return _json({"version": __version__}, 200)


async def models(request: Request) -> Response:
    """The models there are, under every name they answer to; 503 until one is loaded.

    Readiness probes of other servers ask here.
    """
    service = _loaded(request)
    data = [_card(service, name) for name in service.names]
    return _json({"object": "list", "data": data}, 200)


async def model(request: Request) -> Response:
    """One model."""
    service = _loaded(request)
    name = request.path_params["name"]
    if name not in service.names:
        raise UnknownModelError(
            "this model is not served here",
            seen=name,
            param="model",
            fix=f"use {service.names[0]!r}",
        )
    return _json(_card(service, name), 200)


def _loaded(request: Request) -> Service:
    service: Service = request.app.state.service
    if not service.admitting:
        raise ApiError(
            503,
            "the model is not being served now",
            code="draining" if service.draining else "loading",
            fix="try again",
            retry_after_s=service.settings.retry_after_s,
        )
    return service


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.info
    return {
        "id": name,
        "object": "model",
        "created": STARTED_S,
        "owned_by": "hullspeed",
        "root": service.names[0],
        "max_model_len": info.max_context_tokens if info else None,
    }


def _json(value: object, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
