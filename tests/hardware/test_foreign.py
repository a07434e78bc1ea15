"""ForeignLoad: own work, children's work, and the work of others."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from hullspeed.hardware import foreign
from hullspeed.hardware.foreign import ForeignLoad
from support.patience import until

WORK_S = 0.3


def test_children_are_not_others() -> None:
    """CPU time of a child counts while it runs and when it has ended.

    The child works until it is killed: how a kernel rounds CPU time to ticks must not decide when
    this test ends.
    """
    before_s = foreign._own_s()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            counted = until(lambda: foreign._own_s() - before_s >= WORK_S)
            running_s = foreign._own_s() - before_s
            told_s = sum(psutil.Process(child.pid).cpu_times()[:2])
        finally:
            child.kill()
    if told_s == 0:
        pytest.skip("this kernel counts no CPU time of processes")
    assert counted, f"only {running_s} s of {told_s} s of CPU time seen"
    assert foreign._own_s() - before_s >= 0.9 * running_s  # each read is rounded to ticks


def test_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([(10.0, 100.0, 5.0), (30.0, 140.0, 15.0)])
    monkeypatch.setattr(ForeignLoad, "_busy", lambda _: next(moments))
    assert ForeignLoad().share() == pytest.approx((20 - 10) / 40)
