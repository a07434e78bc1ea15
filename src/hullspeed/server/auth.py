"""Who may ask: keys, tenants, and the guard of a server without keys."""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hullspeed.server.errors import ApiError, error_response
from hullspeed.server.settings import ServerSettings, is_loopback

PUBLIC_PATHS = frozenset({"/health", "/ready"})


class Tenant(NamedTuple):
    """Who a request belongs to; ``salt`` separates its cached prefixes from everyone else's."""

    salt: bytes


ANYONE = Tenant(b"")


class KeyRing:
    """The keys that open this server, kept as sha256 digests."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, offered: bytes) -> Tenant | None:
        """The tenant of ``offered``; compares with every key, in constant time for each."""
        digest = hashlib.sha256(offered).digest()
        found: Tenant | None = None
        for known in self._digests:
            if hmac.compare_digest(digest, known):
                found = Tenant(hashlib.sha256(b"hullspeed tenant" + known).digest()[:16])
        return found


class Authentication:
    """ASGI middleware: deny by default; only the paths in ``public`` are open.

    It decides on ``scope["path"]``, the same string the router matches, and on nothing that is
    rebuilt from a ``Host`` header. Without keys it lets in loopback names only, so that a page in
    a browser cannot reach the server through a name or an origin of its own.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = KeyRing(settings.api_keys)
        self._public = PUBLIC_PATHS | ({"/metrics"} if settings.public_metrics else set())
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its tenant, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope["tenant"] = self._tenant(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant:
        if scope["path"] in self._public:
            return ANYONE
        headers = Headers(scope=scope)
        if not len(self._keys):
            self._check_names(headers)
            return ANYONE
        tenant = self._keys.find(_offered_key(headers))
        if tenant is None:
            raise ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                fix="send it as 'Authorization: Bearer KEY'",
            )
        return tenant

    def _check_names(self, headers: Headers) -> None:
        for header in ("host", "origin"):
            for value in headers.getlist(header):
                name = _host_name(value)
                if not is_loopback(name) and name.lower() not in self._hosts:
                    raise ApiError(
                        403,
                        f"without an API key only loopback names are answered, not this {header}",
                        code="host_not_allowed",
                        seen=value,
                        fix="use 127.0.0.1, or start the server with --api-key or --allowed-host",
                    )


def _offered_key(headers: Headers) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return headers.get("x-api-key", "").encode("latin-1")


def _host_name(value: str) -> str:
    """The name in ``Host`` (``name:port``) or ``Origin`` (``scheme://name:port``)."""
    name = value.rpartition("//")[2]
    if name.startswith("["):
        return name.partition("]")[0][1:]
    return name.partition(":")[0]
