"""Case: one question to the planner: a model on a target under a workload, with an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hullspeed.errors import UsageError
from hullspeed.hardware.ceilings import Ceilings
from hullspeed.hardware.gpu import Gpu
from hullspeed.hardware.machine import Machine
from hullspeed.memory.budget import EngineSettings, GpuMemory
from hullspeed.perf.calibration import Calibration
from hullspeed.perf.measured_tables import CostModel
from hullspeed.plan.capacity import memory_of, memory_of_machine
from hullspeed.plan.model import PlannedModel
from hullspeed.plan.speed import Predictor
from hullspeed.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is asked.

    Attributes:
        gpu: The GPU, ``settings.tp`` of them; ``None`` for this machine's processor.
        machine: This machine, when ``gpu`` is ``None``.
        ceilings: Of this machine.
        weight_dtype: How the embedded engine holds weights.
        calibration: Of this model on this GPU, if it was measured there.
        cost_model: Which cost of a step on a GPU is asked.
    """

    model: PlannedModel
    workload: Workload
    settings: EngineSettings
    gpu: Gpu | None = None
    machine: Machine | None = None
    ceilings: Ceilings | None = None
    weight_dtype: str = "fp16"
    calibration: Calibration | None = None
    cost_model: CostModel = "fitted"

    @property
    def n_gpus(self) -> int:
        """GPUs in all."""
        return self.settings.tp * self.settings.pp

    @property
    def target(self) -> str:
        """The hardware in words."""
        if self.gpu is None:
            cores = self.machine.cores if self.machine else 0
            return f"this machine ({cores} cores)"
        return f"{self.n_gpus} x {self.gpu.name}" if self.n_gpus > 1 else self.gpu.name

    def memory(self) -> GpuMemory:
        """Memory of one rank."""
        if self.gpu is not None:
            return memory_of(self.gpu)
        if self.machine is None:
            raise UsageError("a case needs a GPU or a machine")
        return memory_of_machine(self.machine)

    def predictor(self) -> Predictor | None:
        """Cost model of the target; ``None`` when no speeds are known for it."""
        if self.gpu is not None:
            if self.gpu.bandwidth_bytes_per_s <= 0:
                return None
            return Predictor.on_gpu(
                self.model, self.gpu, self.settings, self.calibration, self.cost_model
            )
        if self.ceilings is None:
            return None
        return Predictor.on_machine(
            self.model,
            self.ceilings,
            self.weight_dtype,
            self.settings.max_num_batched_tokens,
            self.settings.kv_dtype or "fp32",
        )

    def with_settings(self, **changes: object) -> Case:
        """The same question with other engine settings."""
        return replace(self, settings=replace(self.settings, **changes))  # type: ignore[arg-type]
