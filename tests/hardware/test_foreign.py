"""ForeignLoad: own work, children's work, and the work of others."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from hullspeed.hardware import foreign
from hullspeed.hardware.foreign import ForeignLoad

WORK_S = 0.3
DEADLINE_S = 120.0


def test_children_are_not_others() -> None:
    """CPU time of a child counts while it runs and when it has ended.

    The child works until it is killed: how a kernel rounds CPU time to ticks must not decide when
    this test ends.
    """
    before_s = foreign._own_s()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            give_up_s = time.monotonic() + DEADLINE_S
            while (running_s := foreign._own_s() - before_s) < WORK_S:
                assert time.monotonic() < give_up_s, f"only {running_s} s of CPU time seen"
                time.sleep(0.02)
        finally:
            child.kill()
    assert foreign._own_s() - before_s >= running_s


def test_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([(10.0, 100.0, 5.0), (30.0, 140.0, 15.0)])
    monkeypatch.setattr(ForeignLoad, "_busy", lambda _: next(moments))
    assert ForeignLoad().share() == pytest.approx((20 - 10) / 40)
