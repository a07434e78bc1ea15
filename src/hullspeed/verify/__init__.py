"""verify: is an endpoint correct? Named checks, each with evidence. Speaks HTTP only.

from hullspeed.verify import run
report = await run("http://127.0.0.1:8000")
"""

from hullspeed.verify.check import Check
from hullspeed.verify.checks import CHECKS
from hullspeed.verify.report import CheckResult, Outcome, VerifyReport
from hullspeed.verify.run import run

__all__ = ["CHECKS", "Check", "CheckResult", "Outcome", "VerifyReport", "run"]
