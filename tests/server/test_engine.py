"""The engine as its server sees it."""

from __future__ import annotations

import asyncio

import msgspec

from hullspeed.runtime.messages import Ready
from hullspeed.server.engine import Engine
from hullspeed.server.settings import ServerSettings
from support.fake_engine import FakeLink, fake_info


def test_what_a_load_skipped_is_said() -> None:
    lines: list[str] = []
    engine = Engine(FakeLink, ServerSettings(), max_waiting=1, log=lines.append)
    skipped = ("333 vision tensors (1.2 GiB; images are refused)", "2 tensors")
    info = msgspec.structs.replace(fake_info(), skipped=skipped)

    async def ready() -> None:
        engine._on_message(Ready(info, 1.0))

    asyncio.run(ready())
    assert lines == ["skipped: 333 vision tensors (1.2 GiB; images are refused); 2 tensors"]
    assert engine.info == info
