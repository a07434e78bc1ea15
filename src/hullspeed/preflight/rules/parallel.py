"""Tensor parallelism against the heads."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight.case import Case
from hullspeed.preflight.codes import found


def divides_heads(case: Case) -> Iterator[Finding]:
    """PF049: a head count that the group size does not divide.

    Key and value heads may also be fewer than GPUs, if they divide the group: each is then kept
    on several (vLLM, SGLang).
    """
    tp, heads = case.ask.tensor_parallel, case.stack.model.heads
    if tp == 1:
        return
    for name, count in heads.items():
        if _splits(name, count, tp):
            continue
        valid = [n for n in range(1, 65) if all(_splits(other, heads[other], n) for other in heads)]
        yield found(
            "PF049",
            tp=tp,
            count=count,
            heads=name.replace("_", "-"),
            valid=", ".join(str(n) for n in valid),
        )
        return


def _splits(name: str, count: int, tp: int) -> bool:
    if count % tp == 0:
        return True
    return name == "key_value" and tp % count == 0


RULES = (divides_heads,)
