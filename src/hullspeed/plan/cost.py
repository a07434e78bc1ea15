"""Cost: dollars per million tokens and per useful task, and where renting by the token is cheaper.

$ per million tokens = dollars an hour / (tokens a second x 3600 x utilization) x 10^6
$ per useful task    = GPU hours x dollars an hour / successful tasks
break-even           = the utilization at which both ways cost the same
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hullspeed.errors import UsageError
from hullspeed.plan.workload import Workload

_FILE = Path(__file__).with_name("managed.toml")
UTILIZATIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


class ManagedPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A managed endpoint's price in dollars per million tokens."""

    usd_per_m_input: float
    usd_per_m_output: float
    date: str
    source: str


class CostAt(msgspec.Struct, frozen=True, kw_only=True):
    """Own cost when the GPUs are busy a share of the time."""

    utilization: float
    usd_per_m_output: float
    usd_per_m_total: float
    usd_per_task: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload costs.

    Attributes:
        usd_per_hour: All GPUs.
        curve: Own cost against utilization; the last entry is fully busy.
        managed: Price of the managed endpoint compared with, if any.
        managed_usd_per_task: Of one task there, failed ones paid for as well.
        break_even_utilization: Above it own GPUs are cheaper; above 1 they never are.
        break_even_requests_per_day: The same as traffic.
    """

    usd_per_hour: float
    price_source: str
    curve: tuple[CostAt, ...]
    managed: ManagedPrice | None = None
    managed_usd_per_task: float | None = None
    break_even_utilization: float | None = None
    break_even_requests_per_day: float | None = None


def make_cost(
    workload: Workload,
    *,
    usd_per_hour: float,
    price_source: str,
    requests_per_s: float,
    managed: ManagedPrice | None = None,
) -> Cost:
    """Cost of serving ``workload`` at ``requests_per_s`` when fully busy.

    Raises:
        UsageError: for a price that is not above zero.
    """
    if usd_per_hour <= 0:
        raise UsageError("a price per hour must be above 0", seen=usd_per_hour)
    per_hour = requests_per_s * 3600
    curve = []
    for share in UTILIZATIONS:
        usd_per_request = usd_per_hour / (per_hour * share)
        curve.append(
            CostAt(
                utilization=share,
                usd_per_m_output=usd_per_request / workload.osl * 1e6,
                usd_per_m_total=usd_per_request / workload.request_tokens * 1e6,
                usd_per_task=usd_per_request * workload.requests_per_task / workload.task_success,
            )
        )
    own = Cost(usd_per_hour=usd_per_hour, price_source=price_source, curve=tuple(curve))
    if managed is None:
        return own
    usd_per_request = (
        workload.isl * managed.usd_per_m_input + workload.osl * managed.usd_per_m_output
    ) / 1e6
    break_even = usd_per_hour / (per_hour * usd_per_request)
    return msgspec.structs.replace(
        own,
        managed=managed,
        managed_usd_per_task=usd_per_request * workload.requests_per_task / workload.task_success,
        break_even_utilization=break_even,
        break_even_requests_per_day=break_even * per_hour * 24,
    )


def managed_price(model: str) -> ManagedPrice | None:
    """The managed price on record for ``model``, by the end of its name."""
    name = model.lower()
    for row in _managed():
        if name.endswith(row["model"].lower()):
            return ManagedPrice(
                usd_per_m_input=row["usd_per_m_input"],
                usd_per_m_output=row["usd_per_m_output"],
                date=row["date"],
                source=row["source"],
            )
    return None


def given_managed(usd_in: float, usd_out: float) -> ManagedPrice:
    """A managed price from the command line.

    Raises:
        UsageError: for negative prices or two zeros.
    """
    if not (usd_in >= 0 and usd_out >= 0 and 0 < usd_in + usd_out < math.inf):
        raise UsageError("managed prices must be above 0", seen=(usd_in, usd_out))
    return ManagedPrice(
        usd_per_m_input=usd_in, usd_per_m_output=usd_out, date="now", source="given"
    )


@cache
def _managed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))["price"]
    return rows
