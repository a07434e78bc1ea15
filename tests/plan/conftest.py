"""Cases built from the catalogues, as ``hullspeed plan`` builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hullspeed.arch import catalogue
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.memory.budget import EngineSettings
from hullspeed.plan.case import Case
from hullspeed.plan.model import PlannedModel
from hullspeed.plan.workload import make_workload

WORKLOAD = ("context", "isl", "osl", "concurrency", "rate", "shared_prefix", "ttft_s", "tpot_s",
            "structured", "requests_per_task", "task_success")  # fmt: skip

MakeCase = Callable[..., Case]


@pytest.fixture(scope="session")
def models() -> dict[str, PlannedModel]:
    """Planned models by name, loaded once."""
    return {}


@pytest.fixture(scope="session")
def make_case(models: dict[str, PlannedModel]) -> MakeCase:
    """``make_case(model, gpu, context=..., concurrency=..., **engine settings)``."""

    def make(model: str, gpu: str, engine: str = "vllm", **given: Any) -> Case:
        if model not in models:
            models[model] = PlannedModel.of(model, catalogue.load(model), "catalogue")
        planned = models[model]
        workload = {name: given.pop(name) for name in WORKLOAD if name in given}
        return Case(
            model=planned,
            workload=make_workload(planned.arch, **workload),
            settings=EngineSettings(engine=engine, **given),
            gpu=find_gpu(gpu),
        )

    return make
