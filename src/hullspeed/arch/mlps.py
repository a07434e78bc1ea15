"""MLPs: what a layer does to each token alone, dense or routed to experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hullspeed.arch.tensors import Role, TensorSpec


class Mlp(Protocol):
    """What every kind of MLP can say about itself."""

    kind: ClassVar[str]

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """The weights of one layer, named as in the Hugging Face checkpoint, below the layer."""
        ...

    def active_share(self, n_tokens: int) -> float:
        """Expected share of the expert weights that a step of ``n_tokens`` tokens reads (0..1)."""
        ...

    def params_per_token(self, hidden: int) -> int:
        """Parameters that multiply one token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """Gated MLP: ``down(act(gate(x)) * up(x))``."""

    kind: ClassVar[str] = "dense"

    intermediate: int
    activation: str = "silu"
    bias: bool = False

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """gate, up and down."""
        for name, rows, columns in (
            ("gate_proj", self.intermediate, hidden),
            ("up_proj", self.intermediate, hidden),
            ("down_proj", hidden, self.intermediate),
        ):
            yield TensorSpec(f"mlp.{name}.weight", (rows, columns), Role.LINEAR)
            if self.bias:
                yield TensorSpec(f"mlp.{name}.bias", (rows,), Role.BIAS)

    def active_share(self, n_tokens: int) -> float:
        """All of it."""
        return 1.0

    def params_per_token(self, hidden: int) -> int:
        """All of them."""
        return 3 * hidden * self.intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp:
    """Router, ``experts`` gated MLPs of which each token takes ``experts_per_token``, and an
    optional shared expert (with its own gate in the Qwen families).
    """

    kind: ClassVar[str] = "moe"

    experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    fused_experts: bool = False
    activation: str = "silu"
    bias: bool = False

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Router, experts (one by one, or fused in two tensors) and the shared expert."""
        yield TensorSpec("mlp.gate.weight", (self.experts, hidden), Role.GATE)
        if self.fused_experts:
            both = (self.experts, 2 * self.intermediate, hidden)
            yield TensorSpec("mlp.experts.gate_up_proj", both, Role.EXPERT)
            down = (self.experts, hidden, self.intermediate)
            yield TensorSpec("mlp.experts.down_proj", down, Role.EXPERT)
        else:
            for i in range(self.experts):
                yield from _gated(f"mlp.experts.{i}.", hidden, self.intermediate, Role.EXPERT)
        if self.shared_intermediate:
            yield from _gated("mlp.shared_expert.", hidden, self.shared_intermediate, Role.LINEAR)
            if self.shared_gate:
                yield TensorSpec("mlp.shared_expert_gate.weight", (1, hidden), Role.GATE)

    def active_share(self, n_tokens: int) -> float:
        """1 - (1 - k/E)^n: the chance that an expert is chosen by at least one of n tokens,
        routing taken as uniform and independent.
        """
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** n_tokens

    def params_per_token(self, hidden: int) -> int:
        """Router, the chosen experts and the shared expert."""
        expert = 3 * hidden * self.intermediate
        shared = 3 * hidden * self.shared_intermediate + (hidden if self.shared_gate else 0)
        return self.experts * hidden + self.experts_per_token * expert + shared


def _gated(prefix: str, hidden: int, intermediate: int, role: Role) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate_proj.weight", (intermediate, hidden), role)
    yield TensorSpec(prefix + "up_proj.weight", (intermediate, hidden), role)
    yield TensorSpec(prefix + "down_proj.weight", (hidden, intermediate), role)
