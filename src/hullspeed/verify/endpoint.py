"""Endpoint: the thing under test, seen only through HTTP."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2
import orjson

from hullspeed.errors import EngineError, UsageError
from hullspeed.sse import SseParser

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(slots=True)
class Answer:
    """One HTTP response.

    Attributes:
        json: The parsed body; None when it is not JSON (or is a stream).
        events: Data of the server-sent events, for a stream.
        undispatched: Whether the stream ended inside an event.
        broken: Transport failure, if any.
    """

    request: Request
    status: int = 0
    content_type: str = ""
    text: str = ""
    json: Any = None
    events: list[str] = field(default_factory=list)
    undispatched: bool = False
    broken: str = ""

    @property
    def shown(self) -> str:
        """Status and body, short enough for a report."""
        body = self.broken or self.text or " | ".join(self.events[-3:])
        return f"HTTP {self.status}: {body[:300]}"

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object of an OpenAI-style error body."""
        error = self.json.get("error") if isinstance(self.json, dict) else None
        return error if isinstance(error, dict) else None


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and the curl line that repeats it."""

    url: str
    body: dict[str, Any] | bytes | None

    @property
    def payload(self) -> bytes:
        """The body's bytes."""
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else orjson.dumps(self.body)

    @property
    def curl(self) -> str:
        """The line to type; a key is named, not shown."""
        if self.body is None:
            return f"curl -s {shlex.quote(self.url)}"
        payload = self.payload.decode("utf-8", "backslashreplace")
        if len(payload) > 2000:
            payload = payload[:2000] + f"... {len(payload)} bytes in all"
        return (
            f"curl -sN {shlex.quote(self.url)} -H 'Content-Type: application/json' "
            f'-H "Authorization: Bearer $HULLSPEED_API_KEY" -d {shlex.quote(payload)}'
        )


class Endpoint:
    """An OpenAI-compatible server; every method sends exactly one request.

    Args:
        url: With or without ``/v1``.
        model: Name to ask for.
        apis: The APIs that this endpoint serves; checks run on each of them.
    """

    def __init__(self, client: httpx2.AsyncClient, url: str, model: str) -> None:
        self._client = client
        self.url = url
        self.model = model
        self.apis: tuple[Api, ...] = ()
        self.gone = ""  # why no connection opens any more

    @property
    def api(self) -> Api:
        """The API with the least in between: completions if served, else chat."""
        return self.apis[0]

    def request(self, path: str, body: dict[str, Any] | bytes | None = None) -> Request:
        """A request to ``path``; ``body`` None is a GET."""
        return Request(self.url + path, body)

    def generation(self, api: Api, prompt: str, /, **params: Any) -> Request:
        """A generation request at temperature 0 unless ``params`` say otherwise."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0}
        if api == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        if params.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return self.request(PATHS[api], body | params)

    async def send(self, request: Request) -> Answer:
        """Send and read everything, streamed or not; transport failures are in the answer."""
        answer = Answer(request)
        method = "GET" if request.body is None else "POST"
        headers = {"Content-Type": "application/json"} if request.body is not None else {}
        try:
            async with self._client.stream(
                method, request.url, content=request.payload, headers=headers
            ) as response:
                answer.status = response.status_code
                answer.content_type = response.headers.get("content-type", "")
                if answer.content_type.startswith("text/event-stream"):
                    parser = SseParser()
                    async for piece in response.aiter_bytes():
                        answer.events += [event.data for event in parser.feed(piece)]
                    answer.undispatched = parser.pending
                else:
                    answer.text = (await response.aread()).decode("utf-8", "replace")
        except httpx2.HTTPError as error:
            answer.broken = f"{type(error).__name__}: {error}"
            if isinstance(error, httpx2.ConnectError):
                self.gone = answer.broken
        try:
            answer.json = orjson.loads(answer.text)
        except orjson.JSONDecodeError:
            answer.json = None
        return answer

    async def start_and_hang_up(self, request: Request) -> bool:
        """Read a stream up to its first event, then disconnect; whether there was one."""
        parser = SseParser()
        try:
            async with self._client.stream(
                "POST", request.url, content=request.payload,
                headers={"Content-Type": "application/json"},
            ) as response:  # fmt: skip
                async for piece in response.aiter_bytes():
                    if parser.feed(piece):
                        return True
        except httpx2.HTTPError:
            return False
        return False


async def connect(client: httpx2.AsyncClient, url: str, model: str | None) -> Endpoint:
    """Find the model's name and the APIs served.

    Raises:
        UsageError: ``url`` is not one.
        EngineError: nothing answers, or it serves neither completions nor chat.
    """
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise UsageError("not a URL", seen=url, fix="write http://127.0.0.1:8000") from error
    endpoint = Endpoint(client, url, model or "")
    models = await endpoint.send(endpoint.request("/v1/models"))
    if models.broken:
        raise EngineError(
            f"nothing answers at {url}",
            seen=models.broken,
            fix="start the server, or check host and port",
        )
    if not model:
        endpoint.model = _first_model(models)
    served = []
    for api in PATHS:
        answer = await endpoint.send(endpoint.generation(api, "Hello", max_tokens=1))
        if answer.status not in (404, 405, 501):
            served.append(api)
    if not served:
        raise EngineError(
            "the endpoint serves neither completions nor chat completions",
            seen=url,
            fix="give the URL in front of /v1, and --model as /v1/models lists it",
        )
    endpoint.apis = tuple(served)
    return endpoint


def _first_model(models: Answer) -> str:
    try:
        return str(models.json["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise EngineError(
            "the endpoint names no model at /v1/models", seen=models.shown, fix="give --model"
        ) from None
