"""MLPs: what a layer does to each token alone, dense or routed to experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hullspeed.arch.tensors import Role, TensorSpec

GATED = ("gate_proj", "up_proj", "down_proj")
UNGATED = ("up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


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
    """Gated MLP ``down(act(gate(x)) * up(x))``, or plain ``down(act(up(x)))``.

    Attributes:
        names: Matrices in the order [gate,] up, down; two of them if there is no gate.
        module: Name of the MLP in the checkpoint.
    """

    kind: ClassVar[str] = "dense"

    intermediate: int
    activation: str = "silu"
    bias: bool = False
    names: tuple[str, ...] = GATED
    module: str = "mlp"

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Gate (if any), up and down."""
        yield from _matrices(
            f"{self.module}.", self.names, hidden, self.intermediate, Role.LINEAR, self.bias
        )

    def active_share(self, n_tokens: int) -> float:
        """All of it."""
        return 1.0

    def params_per_token(self, hidden: int) -> int:
        """All of them."""
        return len(self.names) * hidden * self.intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp:
    """Router, ``experts`` MLPs of which each token takes ``experts_per_token``, and an optional
    shared expert (with its own gate in the Qwen families).

    Attributes:
        fused_experts: The checkpoint keeps all experts in two tensors.
        transposed: Fused tensors are ``[experts, in, out]`` instead of ``[experts, out, in]``.
        bias: Experts have biases (gpt-oss).
        names: Matrices of an expert in the order [gate,] up, down.
        router: Name of the router; ``router_bias`` and ``correction_bias`` are vectors of it.
        correction_bias: Selection bias of routing without an auxiliary loss (DeepSeek-V3).
        shared_name: Name of the shared expert.
        module: Name of the MLP in the checkpoint.
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
    transposed: bool = False
    names: tuple[str, ...] = GATED
    router: str = "gate"
    router_bias: bool = False
    correction_bias: bool = False
    shared_name: str = "shared_expert"
    module: str = "mlp"

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Router, experts (one by one, or fused in two tensors) and the shared expert."""
        root = f"{self.module}."
        yield TensorSpec(f"{root}{self.router}.weight", (self.experts, hidden), Role.GATE)
        if self.router_bias:
            yield TensorSpec(f"{root}{self.router}.bias", (self.experts,), Role.BIAS)
        if self.correction_bias:
            name = f"{root}{self.router}.e_score_correction_bias"
            yield TensorSpec(name, (self.experts,), Role.VECTOR)
        if self.fused_experts:
            yield from self._fused(f"{root}experts.", hidden)
        else:
            for i in range(self.experts):
                prefix = f"{root}experts.{i}."
                yield from _matrices(
                    prefix, self.names, hidden, self.intermediate, Role.EXPERT, self.bias
                )
        if self.shared_intermediate:
            prefix = f"{root}{self.shared_name}."
            yield from _matrices(prefix, self.names, hidden, self.shared_intermediate, Role.LINEAR)
            if self.shared_gate:
                yield TensorSpec(f"{root}{self.shared_name}_gate.weight", (1, hidden), Role.GATE)

    def _fused(self, prefix: str, hidden: int) -> Iterator[TensorSpec]:
        gated = len(self.names) == 3
        width = self.intermediate * (2 if gated else 1)
        first = "gate_up_proj" if gated else "up_proj"
        for name, rows, columns in (
            (first, width, hidden),
            ("down_proj", hidden, self.intermediate),
        ):
            matrix = (columns, rows) if self.transposed else (rows, columns)
            yield TensorSpec(prefix + name, (self.experts, *matrix), Role.EXPERT)
            if self.bias:
                yield TensorSpec(f"{prefix}{name}_bias", (self.experts, rows), Role.BIAS)

    def active_share(self, n_tokens: int) -> float:
        """1 - (1 - k/E)^n: the chance that an expert is chosen by at least one of n tokens,
        routing taken as uniform and independent.
        """
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** n_tokens

    def params_per_token(self, hidden: int) -> int:
        """Router, the chosen experts and the shared expert."""
        expert = len(self.names) * hidden * self.intermediate
        shared = len(self.names) * hidden * self.shared_intermediate
        gate = hidden if self.shared_gate else 0
        return self.experts * hidden + self.experts_per_token * expert + shared + gate


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMlp:
    """A layer that is only a mixer (Nemotron-H)."""

    kind: ClassVar[str] = "none"

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """None."""
        return iter(())

    def active_share(self, n_tokens: int) -> float:
        """All of nothing."""
        return 1.0

    def params_per_token(self, hidden: int) -> int:
        """None."""
        return 0


def _matrices(
    prefix: str,
    names: tuple[str, ...],
    hidden: int,
    intermediate: int,
    role: Role,
    bias: bool = False,
) -> Iterator[TensorSpec]:
    *first, down = names
    shapes = [(name, intermediate, hidden) for name in first] + [(down, hidden, intermediate)]
    for name, rows, columns in shapes:
        yield TensorSpec(f"{prefix}{name}.weight", (rows, columns), role)
        if bias:
            yield TensorSpec(f"{prefix}{name}.bias", (rows,), Role.BIAS)
