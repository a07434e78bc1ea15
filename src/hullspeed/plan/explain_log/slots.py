"""SGLang's two pools, read back from what it prints."""

from __future__ import annotations

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.memory.budget import EngineSettings
from hullspeed.memory.profile import engine_profile
from hullspeed.memory.sglang import SglangAllocator
from hullspeed.plan.explain_log.facts import Facts
from hullspeed.plan.explain_log.serving import Remedy, Served
from hullspeed.units import GIB

TOLERANCE = 0.02


class SlotReading(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from slots, tokens and their GiB.

    Attributes:
        kv_dtypes: KV dtypes whose cell size agrees with the printed GiB.
        state_dtypes: State dtypes whose slot size agrees.
        strategies: Radix strategies whose slots per request give the printed running requests.
        bound: What limits running requests: ``"slots"``, ``"tokens"`` or ``"flag"``.
    """

    tokens: int
    token_bytes: float | None
    kv_dtypes: tuple[str, ...]
    slots: int | None
    slot_bytes: float | None
    state_dtypes: tuple[str, ...]
    max_running: int | None
    strategies: tuple[str, ...]
    bound: str
    tp: int


def read_slots(facts: Facts, arch: ModelArch) -> SlotReading | None:
    """Invert an SGLang log; ``None`` when it prints no pool."""
    if facts.tokens is None:
        return None
    tp = facts.tp or 1
    token_bytes = facts.kv_gib * GIB / facts.tokens if facts.kv_gib else None
    slot_bytes = None
    if facts.slots and facts.slot_pool_gib:
        slot_bytes = facts.slot_pool_gib * GIB / (facts.slots + 1)  # slot 0 is padding
    strategies = _strategies(facts)
    asked = facts.max_num_seqs
    bound = "tokens"
    if strategies:
        bound = "slots"
    if asked is not None and facts.max_running == asked:
        bound = "flag"
    return SlotReading(
        tokens=facts.tokens,
        token_bytes=token_bytes,
        kv_dtypes=_matching(arch, tp, token_bytes, "kv"),
        slots=facts.slots,
        slot_bytes=slot_bytes,
        state_dtypes=_matching(arch, tp, slot_bytes, "state"),
        max_running=facts.max_running,
        strategies=strategies,
        bound=bound,
        tp=tp,
    )


def _matching(arch: ModelArch, tp: int, printed: float | None, what: str) -> tuple[str, ...]:
    """Dtypes whose unit has the printed size (the draft layer's pool has a line of its own)."""
    if printed is None:
        return ()
    names = ("bf16", "fp8") if what == "kv" else ("fp32", "bf16")
    found = []
    for name in names:
        settings = EngineSettings(
            engine="sglang",
            tp=tp,
            kv_dtype=name if what == "kv" else None,
            state_dtype=name if what == "state" else None,
        )
        try:
            cells = SglangAllocator().cells(arch, settings)
        except UsageError:  # this TP does not divide the heads
            continue
        expected = cells.token_bytes if what == "kv" else cells.slot_bytes
        if expected and abs(printed / expected - 1) < TOLERANCE:
            found.append(name)
    return tuple(found)


def _strategies(facts: Facts) -> tuple[str, ...]:
    if facts.slots is None or facts.max_running is None:
        return ()
    table = engine_profile("sglang").table["slots_per_request"]
    return tuple(
        name for name, per in table.items() if facts.slots // int(per) == facts.max_running
    )


def served_slots(reading: SlotReading, lengths: list[int]) -> list[Served]:
    """Requests at once by length: tokens and running requests, whichever is less."""
    running = reading.max_running
    rows = []
    for length in lengths:
        by_tokens = reading.tokens / length
        really = int(by_tokens) if running is None else min(int(by_tokens), running)
        rows.append(
            Served(
                context_tokens=length,
                by_the_log=round(by_tokens, 2),
                really=really,
                bytes_per_request=round((reading.token_bytes or 0) * length),
            )
        )
    return rows


def slot_remedies(reading: SlotReading, lengths: list[int]) -> list[Remedy]:
    """Splits between slots and tokens that serve more requests of each length, best first.

    A request of ``n`` tokens takes ``n`` cells and its reserved slots from one budget, so the
    balanced split is budget over the sum; SGLang's default ratio knows no length.
    """
    if not (reading.slots and reading.slot_bytes and reading.token_bytes and reading.strategies):
        return []
    per_request = int(engine_profile("sglang").table["slots_per_request"][reading.strategies[0]])
    budget = reading.tokens * reading.token_bytes + reading.slots * reading.slot_bytes
    now = {row.context_tokens: row.really for row in served_slots(reading, lengths)}
    found = []
    for length in lengths:
        request = length * reading.token_bytes + per_request * reading.slot_bytes
        count = int(budget // request)
        if count <= now[length]:
            continue
        slots = count * per_request
        tokens = (budget - slots * reading.slot_bytes) / reading.token_bytes
        after = {n: min(count, int(tokens // n)) for n in lengths}
        found.append(
            Remedy(
                change=f"slots balanced for requests of {length:,} tokens",
                flag=f"--max-mamba-cache-size {slots}",
                really=after,
                gain=round(count / max(1, now[length]), 2),
                caveat="other lengths get less",
            )
        )
    return sorted(found, key=lambda remedy: -remedy.gain)
