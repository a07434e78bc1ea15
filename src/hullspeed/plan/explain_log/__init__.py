"""What a vLLM or SGLang start-up log means, and what it leaves out."""

from hullspeed.plan.explain_log.explain import Explanation, explain_log
from hullspeed.plan.explain_log.reader import read_log

__all__ = ["Explanation", "explain_log", "read_log"]
