"""How long a sweep of plans takes on one core: bar, 10,000 configurations in 30 seconds.

python benchmarks/plan_sweep.py [10000]
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

from hullspeed.arch import catalogue
from hullspeed.errors import HullspeedError
from hullspeed.hardware.catalogue import gpus
from hullspeed.memory.budget import EngineSettings
from hullspeed.plan.case import Case
from hullspeed.plan.model import PlannedModel
from hullspeed.plan.plan import make_plan
from hullspeed.plan.workload import make_workload

MODELS = ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-27B-FP8", "Qwen/Qwen3-32B", "openai/gpt-oss-120b")
ENGINES = ("vllm", "sglang")


def cases() -> Iterator[Case]:
    """Models x GPUs x contexts x concurrencies x KV formats x TP x engines, endlessly."""
    models = [PlannedModel.of(name, catalogue.load(name), "catalogue") for name in MODELS]
    grid = itertools.product(
        (4096, 16384, 32768), (1, 4, 16, 64), (None, "fp8"), (1, 2), ENGINES, gpus(), models
    )
    for context, concurrency, kv, tp, engine, gpu, model in itertools.cycle(grid):
        yield Case(
            model=model,
            workload=make_workload(model.arch, context=context, concurrency=concurrency),
            settings=EngineSettings(engine=engine, kv_dtype=kv, tp=tp),
            gpu=gpu,
        )


def sweep(n: int) -> tuple[float, int, int]:
    """CPU seconds for ``n`` configurations, how many fit and how many are refused."""
    fits = refused = 0
    start = time.process_time()
    for case in itertools.islice(cases(), n):
        try:
            fits += make_plan(case, advice=False).ok
        except HullspeedError:
            refused += 1
    return time.process_time() - start, fits, refused


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seconds, fitting, out = sweep(count)
    print(
        f"{count:,} configurations in {seconds:.1f} s of one core, {1e3 * seconds / count:.2f} ms "
        f"each; {fitting:,} fit, {out:,} are refused by their engine"
    )
