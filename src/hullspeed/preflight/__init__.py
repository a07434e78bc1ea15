"""The gate: is the stack from driver to model whole, before anything is loaded."""

from hullspeed.preflight.ask import Ask
from hullspeed.preflight.chain import check
from hullspeed.preflight.gate import exit_code, gate, run_preflight
from hullspeed.preflight.probes import MachineProbes, Probes, RecordedProbes
from hullspeed.preflight.stack import Stack

__all__ = [
    "Ask",
    "MachineProbes",
    "Probes",
    "RecordedProbes",
    "Stack",
    "check",
    "exit_code",
    "gate",
    "run_preflight",
]
