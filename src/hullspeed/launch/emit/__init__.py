"""Emit: one launch as files for whatever runs it: containers, Kubernetes, Ray, systemd, SLURM."""

from hullspeed.launch.emit.targets import TARGETS, emit

__all__ = ["TARGETS", "emit"]
