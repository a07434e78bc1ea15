from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from support.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server over a fake engine that repeats each prompt; shared by a module's tests."""
    with live_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx2.Client]:
    """An HTTP client for ``server``."""
    with server.client() as client:
        yield client
