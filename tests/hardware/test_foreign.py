"""ForeignLoad: own work, children's work, and the work of others."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from hullspeed.hardware import foreign
from hullspeed.hardware.foreign import ForeignLoad

BURN = "import time\nt = time.process_time()\nwhile time.process_time() < t + 0.4: pass"


def test_children_are_not_others() -> None:
    """CPU time of a child counts while it runs and when it has ended."""
    before = foreign._own_s()
    with subprocess.Popen([sys.executable, "-c", BURN + "\ninput()"], stdin=subprocess.PIPE) as p:
        child = psutil.Process(p.pid)
        while child.cpu_times().user + child.cpu_times().system < 0.4:
            pass
        assert foreign._own_s() - before >= 0.4
        p.communicate(b"\n")
    assert foreign._own_s() - before >= 0.4


def test_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([(10.0, 100.0, 5.0), (30.0, 140.0, 15.0)])
    monkeypatch.setattr(ForeignLoad, "_busy", lambda _: next(moments))
    assert ForeignLoad().share() == pytest.approx((20 - 10) / 40)
