"""workloads: options of traffic and its price, and which of them apply to which kind of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.twin.arrivals import Arrivals
    from hullspeed.twin.workload import Workload

Options = Mapping[str, Any]
MAX_REQUESTS = 10_000_000
_MAX_PRICE = 1e6  # dollars per GPU and hour: more is a slip


class _Rule(NamedTuple):
    """Options that say something only where ``applies``."""

    names: tuple[str, ...]
    applies: Callable[[Options], bool]
    where: str


def _drawn(o: Options) -> bool:
    return o["trace"] is None and not o["agents"]


def _objective(o: Options) -> bool:
    return o["slo_ttft"] is not None or o["slo_tpot"] is not None


def _many(o: Options) -> bool:
    return bool(o["sweep"]) or bool(o["what_if"])


_RULES = (
    _Rule(
        ("isl", "osl", "isl_sigma", "osl_sigma", "range_ratio", "shared_prefix", "prefixes",
         "warmup"),
        _drawn, "drawn requests, not of --trace or --agents",
    ),
    _Rule(("range_ratio",), lambda o: not o["isl_sigma"] and not o["osl_sigma"],
          "lengths without a sigma"),
    _Rule(("prefixes",), lambda o: o["shared_prefix"] != 0, "--shared-prefix"),
    _Rule(("agents",), lambda o: o["trace"] is None, "drawn sessions, not of --trace"),
    _Rule(("requests",), lambda o: not o["agents"], "requests, not of --agents sessions"),
    _Rule(("think", "thinking"), lambda o: o["agents"] != 0, "--agents"),
    _Rule(("format",), lambda o: o["trace"] is not None, "--trace"),
    _Rule(("thin",), lambda o: o["trace"] is not None and o["requests"] is not None,
          "--trace with --requests"),
    _Rule(("arrival",), lambda o: o["rate"] is not None and not o["agents"], "--rate"),
    _Rule(("burst",), lambda o: o["arrival"] == "gamma", "--arrival gamma"),
    _Rule(("end_rate", "ramp"), lambda o: o["arrival"] == "ramp", "--arrival ramp"),
    _Rule(("warmup",), lambda o: o["rate"] is None or math.isinf(o["rate"]),
          "closed loops, not of --rate"),
    _Rule(("attainment", "capacity"), _objective, "an objective: --slo-ttft, --slo-tpot"),
    _Rule(("capacity",), lambda o: not _many(o), "one configuration, not of several"),
    _Rule(("what_if",), lambda o: not o["sweep"], "one question at a time, not of --sweep"),
    _Rule(("compare_cache",), lambda o: not _many(o) and not o["capacity"],
          "one question at a time, not of --sweep, --what-if or --capacity"),
    _Rule(("cache_budget", "policy"), lambda o: o["compare_cache"], "--compare-cache"),
    _Rule(("workers", "ray", "resume"), _many, "--sweep and --what-if"),
)  # fmt: skip


def check_applies(options: Options, defaults: Options) -> None:
    """Refuse an option that would be ignored: who gave it expects something of it.

    Raises:
        UsageError: naming it and where it belongs.
    """
    for rule in _RULES:
        for name in rule.names:
            if options[name] != defaults[name] and not rule.applies(options):
                flag = "--keep-thinking" if name == "thinking" else f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} is an option of {rule.where}", seen=options[name], fix="leave it out"
                )


def check_price(price: float | None) -> None:
    """Refuse a ``--price`` that cannot be.

    Raises:
        UsageError: with the value.
    """
    if price is not None and not 0 < price < _MAX_PRICE:
        raise UsageError("--price is in dollars per GPU and hour, above 0", seen=price)


def check_load(concurrency: int | None, rate: float | None) -> None:
    """Refuse a load that is closed and open at once.

    Raises:
        UsageError: with both values.
    """
    if concurrency is not None and rate is not None:
        raise UsageError(
            "a load is closed (--concurrency) or open (--rate), not both", seen=(concurrency, rate)
        )


def check_tables(*, on_gpu: bool) -> None:
    """Whether ``--cost tables`` can be answered.

    Raises:
        UsageError: if no GPU is named.
        BrokenStackError: if the tables are not installed.
    """
    from hullspeed.perf.measured_tables import require_tables

    if not on_gpu:
        raise UsageError(
            "the measured tables are of GPUs", seen="--cost tables", fix="name one: --gpu h100-sxm"
        )
    require_tables()


def make_workload(options: Options, ramp_s: float, think_s: float) -> Workload:
    """The traffic that ``options`` describe.

    Raises:
        UsageError: for numbers that cannot be, or a trace that cannot be read.
    """
    options = dict(options)
    if options["rate"] == math.inf:  # as benchmarks say it: all at once, or as places are free
        options |= {"rate": None, "concurrency": options["concurrency"] or MAX_REQUESTS}
    concurrency, rate, requests = (options[n] for n in ("concurrency", "rate", "requests"))
    check_load(concurrency, rate)
    if concurrency is not None and concurrency < 1:
        raise UsageError("--concurrency must be at least 1", seen=concurrency)
    if requests is not None and not 1 <= requests <= MAX_REQUESTS:
        raise UsageError(f"--requests lies between 1 and {MAX_REQUESTS:,}", seen=requests)
    if options["trace"] is not None:
        return _traced(options, ramp_s)
    if options["agents"]:
        return _agents(options, think_s)
    return _requests(options, ramp_s)


def _requests(options: Options, ramp_s: float) -> Workload:
    from hullspeed.twin.generate import closed_loop, open_loop
    from hullspeed.twin.lengths import Lengths

    def lengths(tokens: int, sigma: float) -> Lengths:
        if sigma:
            return Lengths(tokens=tokens, kind="lognormal", sigma=sigma, most=32 * tokens)
        ratio = options["range_ratio"]
        return Lengths(tokens=tokens, kind="fixed" if ratio == 1 else "uniform", range_ratio=ratio)

    isl = lengths(options["isl"], options["isl_sigma"])
    osl = lengths(options["osl"], options["osl_sigma"])
    requests = 500 if options["requests"] is None else options["requests"]
    common = {"requests": requests, "shared_tokens": options["shared_prefix"],
              "n_shared": options["prefixes"], "seed": options["seed"]}  # fmt: skip
    if options["prefixes"] < 1:
        raise UsageError("--prefixes must be at least 1", seen=options["prefixes"])
    if options["rate"] is None:
        concurrency = min(options["concurrency"] or 8, requests)
        return closed_loop(isl, osl, concurrency=concurrency, warm_up=options["warmup"], **common)
    return open_loop(isl, osl, _arrivals(options, ramp_s), **common)


def _arrivals(options: Options, ramp_s: float) -> Arrivals:
    from hullspeed.twin.arrivals import Arrivals

    return Arrivals(
        rate=options["rate"],
        kind=options["arrival"],
        cv=options["burst"],
        end_rate=options["end_rate"],
        over_s=ramp_s,
    )


def _agents(options: Options, think_s: float) -> Workload:
    from hullspeed.twin.agents import AgentLoad, agent_sessions

    rate, sessions = options["rate"], options["agents"]
    if rate is not None and not rate > 0:
        raise UsageError("--rate must be above 0", seen=rate)
    over_s = sessions / rate if rate else AgentLoad().over_s
    load = AgentLoad(
        sessions=sessions,
        think_s=think_s,
        over_s=over_s,
        strip_thinking=options["thinking"],
        seed=options["seed"],
    )
    return _closed(agent_sessions(load), options["concurrency"])


def _traced(options: Options, ramp_s: float) -> Workload:
    import random
    from itertools import islice

    import msgspec

    from hullspeed.twin.traces import first, load_trace, thinned

    workload = load_trace(options["trace"], options["format"])
    requests = options["requests"]
    if requests is not None:
        sample = options["thin"]
        workload = (
            thinned(workload, requests, options["seed"]) if sample else first(workload, requests)
        )
    if options["rate"] is None:
        return _closed(workload, options["concurrency"])
    arrivals = _arrivals(options, ramp_s)
    times = islice(arrivals.times(random.Random(options["seed"])), len(workload.sessions))  # noqa: S311
    sessions = tuple(
        msgspec.structs.replace(session, at_s=at_s)
        for session, at_s in zip(workload.sessions, times, strict=True)
    )
    return msgspec.structs.replace(workload, sessions=sessions, concurrency=0)


def _closed(workload: Workload, concurrency: int | None) -> Workload:
    import msgspec

    if concurrency is None:
        return workload
    return msgspec.structs.replace(workload, concurrency=min(concurrency, len(workload.sessions)))


def told(workload: Workload) -> str:
    """The workload in a title: its name, and of sessions how many requests and how they come."""
    sessions, requests = len(workload.sessions), workload.n_requests
    if " requests of " in workload.name:
        return workload.name
    size = f"{requests:,} requests"
    if requests > sessions:
        size += f" in {sessions:,} sessions"
    if workload.concurrency:
        return f"{workload.name}: {size}, {workload.concurrency:,} in flight"
    last_s = max(session.at_s for session in workload.sessions)
    return f"{workload.name}: {size}, sent within {last_s:,.0f} s" if last_s else size
