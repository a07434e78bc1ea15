"""Case: what a rule is given, and the questions that several rules share."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from hullspeed.preflight import tables
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.stack import Gpu, Stack, Torch


@dataclass(frozen=True, slots=True)
class Case:
    """One launch on one stack."""

    ask: Ask
    stack: Stack

    @property
    def engine(self) -> tables.Engine:
        """The engine's table."""
        return tables.engines()[self.ask.engine]

    @property
    def engine_version(self) -> str | None:
        """Version of the engine in its interpreter; ``None`` when it is not installed."""
        held = self.stack.python.packages
        for name in (self.engine.package, self.engine.cpu_package):
            if name in held:
                return held[name]
        return None

    @property
    def row(self) -> tables.EngineVersion | None:
        """What the installed version needs; ``None`` when not installed or not in the table."""
        version = self.engine_version
        return self.engine.row(version) if version else None

    @property
    def torch(self) -> Torch | None:
        """torch, if it imports."""
        torch = self.stack.python.torch
        return torch if torch is not None and torch.imports else None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; none on a CPU run."""
        nvidia = self.stack.nvidia
        if not self.ask.on_gpu or nvidia is None:
            return ()
        value = self.stack.system.env.get("CUDA_VISIBLE_DEVICES")
        if value is None:
            return nvidia.gpus
        chosen = []
        for entry in value.split(","):
            gpu = find_device(entry, nvidia.gpus)
            if gpu is None or gpu in chosen:
                break  # CUDA stops reading here too
            chosen.append(gpu)
        return tuple(chosen)

    @property
    def used_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs this launch takes: the first of those visible."""
        return self.gpus[: self.ask.gpus]

    @property
    def named(self) -> dict[str, object]:
        """Evidence that most findings share."""
        return {"engine": self.ask.engine, "engine_version": self.engine_version or "?"}


def find_device(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that one entry of CUDA_VISIBLE_DEVICES names: an index or a UUID's beginning."""
    text = entry.strip()
    if text.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(text)), None)
    if text.startswith("MIG-"):
        return next((gpu for gpu in gpus if gpu.mig and gpu.mig_slices), None)
    if text.startswith("GPU-"):
        return next((gpu for gpu in gpus if gpu.uuid.startswith(text)), None)
    return None


def below(version: str, least: str) -> bool:
    """Whether ``version`` is older than ``least``; drivers, CUDA and capabilities alike."""
    return Version(version) < Version(least)
