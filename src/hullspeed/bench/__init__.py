"""bench: how fast an endpoint is, at which load, within which objective. Speaks HTTP only.

from hullspeed.bench import BenchSpec, run
result = await run(BenchSpec(url="http://127.0.0.1:8000", concurrency=(1, 8)))
"""

from hullspeed.bench.result import BenchResult, Cell, Distribution, Goodput, Trust, Verdict
from hullspeed.bench.run import run, run_sync
from hullspeed.bench.spec import BenchSpec, Objective

__all__ = [
    "BenchResult",
    "BenchSpec",
    "Cell",
    "Distribution",
    "Goodput",
    "Objective",
    "Trust",
    "Verdict",
    "run",
    "run_sync",
]
