"""Room: the engine's pages and states, from its configuration and the memory that is free."""

from __future__ import annotations

from hullspeed.arch.model import ModelArch
from hullspeed.memory import ours_room
from hullspeed.memory.ours_room import Room, RoomRules
from hullspeed.runtime.config import EngineConfig


def plan_room(
    config: EngineConfig, arch: ModelArch, context_tokens: int, available_bytes: int
) -> Room:
    """Share the budget out: ``config.kv_budget_bytes``, or half of ``available_bytes``, the memory
    that is free with the weights loaded.

    Raises:
        UsageError: a share that cannot be.
        CapacityError: the budget does not hold the running states and one context.
    """
    config.check()
    given = config.kv_budget_bytes
    budget = available_bytes // 2 if given is None else given
    return ours_room.plan_room(arch, rules_of(config), context_tokens, budget)


def rules_of(config: EngineConfig) -> RoomRules:
    """What of ``config`` decides how memory is shared out."""
    return RoomRules(
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        kv_dtype=config.kv_dtype,
        state_store=config.state_store,
        state_share=config.state_share,
        given=config.kv_budget_bytes is not None,
        windows_apart=config.cache != "hash",
        draft=config.draft == "mtp",
    )
