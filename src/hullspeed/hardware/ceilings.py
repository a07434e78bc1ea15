"""Ceilings: what this machine's kernels really reach, measured once and kept on disk.

The numbers are rates of the kernels themselves, so that a cost model can time any model built
from them; ``runtime.ceilings`` measures them with the engine's own kernels (``hullspeed
calibrate``), and :func:`quick_ceilings` stands in with NumPy until that has been run.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from typing import Literal

import msgspec

from hullspeed.hardware.machine import Machine
from hullspeed.sources.cache import cache_dir, write_atomically

KERNELS_VERSION = "4"
"""Raise when a kernel changes speed: what was measured before no longer counts."""


KERNELS_ERROR = 0.2
"""Half-width of the interval where only kernels and steps were timed, and no server."""

NEAR_TOKENS = 512
"""Of a sequence's past, read at another rate than what lies beyond."""

_QUIET_SHARE = 0.1
_TIME = "%Y-%m-%dT%H:%M:%SZ"


class Curve(msgspec.Struct, frozen=True):
    """A positive quantity measured at some sizes, read between them on log-log axes.

    Outside the measured sizes it continues flat: no extrapolation beyond what was seen.
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, size: float) -> float:
        """The value at ``size``."""
        sizes, values = self.sizes, self.values
        i = bisect_left(sizes, size)
        if i == 0:
            return values[0]
        if i == len(sizes):
            return values[-1]
        share = log(size / sizes[i - 1]) / log(sizes[i] / sizes[i - 1])
        return exp(log(values[i - 1]) + share * log(values[i] / values[i - 1]))


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds beyond the kernels' own work.

    Attributes:
        step_s: Once a step: scheduling, messages, the executor's set-up.
        layer_s: Once a layer and step: norms, rotary embedding, page writes, calls.
        layer_token_s: The same per layer, token and 1,024 hidden units.
        sequence_s: Per sequence in a step: sampling and book-keeping.
        request_s: Per request over HTTP: waking two processes, parsing, first event.
        prompt_token_s: Per prompt token over HTTP: parsing, tokenizing, messages, cache look-up.
        request_work_s: Per request of several at once, what it keeps a core from the next one and
            from the steps: the API process takes one after the other.
        work_token_s: The same per prompt token.
        stream_token_s: Per streamed token over HTTP, on cores that compute as well.
    """

    step_s: float
    layer_s: float
    layer_token_s: float
    sequence_s: float
    request_s: float
    prompt_token_s: float
    stream_token_s: float
    request_work_s: float = 0.0
    work_token_s: float = 0.0

    def request_seconds(self, prompt_tokens: int) -> float:
        """From a request's bytes to its first step, and from its first token to the client."""
        return self.request_s + self.prompt_token_s * prompt_tokens

    def work_seconds(self, prompt_tokens: int) -> float:
        """How long a request keeps a core from the next one."""
        return self.request_work_s + self.work_token_s * prompt_tokens


class Interruptions(msgspec.Struct, frozen=True, kw_only=True):
    """What other processes take from steps: ``lost_s`` once in ``every_s`` of computing, which
    medians of short steps do not show.
    """

    every_s: float
    lost_s: float

    @property
    def share(self) -> float:
        """Of the time without them."""
        return self.lost_s / self.every_s


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates of one machine.

    Attributes:
        fingerprint: Of the machine and kernels they hold for.
        source: ``calibrated`` with the engine's kernels, ``quick`` with NumPy.
        dram_bytes_per_s: Streaming reads from memory, all threads.
        linear_flops_per_s: By weight format, FLOP/s of linear layers against rows (tokens).
        head_flops_per_s: The same for the output head, whose weights are much larger.
        decode_bytes_per_s: KV bytes read per second by decode attention against the number of
            (sequence, KV head) pairs that can run side by side.
        shared_bytes_per_s: The same where all sequences have one past, so that caches hold it; as
            ``decode_bytes_per_s`` where it was not measured.
        far_decode_bytes_per_s, far_shared_bytes_per_s: The same for what a sequence keeps beyond
            :data:`NEAR_TOKENS`: less of it is still in a cache from the step before. As the near
            ones where they were not measured.
        chunk_flops_per_s: FLOP/s of chunk attention against visible context in tokens.
        decode_factor: Whole steps that only decode over the sum of their parts, against sequences.
        chunk_factor: The same of steps with prompt chunks, against tokens.
        mixed_factor: On ``chunk_factor`` where sequences decode beside the chunks, against their
            number plus one.
        interruptions: By others while this was measured; ``None`` if they were nothing much.
        relative_error: Half-width of the 90 % interval of a step time, as a share of it.
        quiet: No other process disturbed the measurement.
        served: What requests and streams cost was measured at a server.
        hidden: Width of the model whose shapes were timed; 0 if they were no model's.
    """

    fingerprint: str
    source: Literal["calibrated", "quick"]
    measured_at: str
    threads: int
    dram_bytes_per_s: float
    linear_flops_per_s: dict[str, Curve]
    head_flops_per_s: dict[str, Curve]
    decode_bytes_per_s: Curve
    chunk_flops_per_s: Curve
    overheads: Overheads
    relative_error: float
    shared_bytes_per_s: Curve | None = None
    far_decode_bytes_per_s: Curve | None = None
    far_shared_bytes_per_s: Curve | None = None
    decode_factor: Curve = Curve((1.0,), (1.0,))
    chunk_factor: Curve = Curve((1.0,), (1.0,))
    mixed_factor: Curve = Curve((1.0,), (1.0,))
    interruptions: Interruptions | None = None
    quiet: bool = True
    served: bool = False
    hidden: int = 0
    notes: tuple[str, ...] = ()


def ceilings_path(machine: Machine, folder: Path | None = None) -> Path:
    """The file that holds the calibration of ``machine``."""
    name = f"ceilings-{machine.fingerprint(KERNELS_VERSION)}.json"
    return (folder or cache_dir()) / name


def load_ceilings(machine: Machine, folder: Path | None = None) -> Ceilings | None:
    """The calibration of this machine, or ``None`` if it was never made or is not readable."""
    try:
        data = ceilings_path(machine, folder).read_bytes()
        ceilings = msgspec.json.decode(data, type=Ceilings)
    except (OSError, msgspec.MsgspecError):  # absent, cut short or of an older shape: as if never
        return None
    return ceilings if ceilings.fingerprint == machine.fingerprint(KERNELS_VERSION) else None


def save_ceilings(ceilings: Ceilings, machine: Machine, folder: Path | None = None) -> Path:
    """Keep ``ceilings``; the file appears whole or not at all."""
    path = ceilings_path(machine, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(ceilings), indent=1))
    return path


def keep_ceilings(
    ceilings: Ceilings, machine: Machine, folder: Path | None = None
) -> tuple[Path, Ceilings | None]:
    """Save ``ceilings``, unless they were disturbed and those kept before were not.

    Returns the file, and the better ones if they stay.
    """
    before = load_ceilings(machine, folder)
    if (
        before is not None
        and before.quiet
        and not ceilings.quiet
        and before.threads == ceilings.threads
        and before.served >= ceilings.served
        and set(before.linear_flops_per_s) >= set(ceilings.linear_flops_per_s)
    ):
        return ceilings_path(machine, folder), before
    return save_ceilings(ceilings, machine, folder), None


def disturbed(ceilings: Ceilings, share: float) -> Ceilings:
    """``ceilings`` measured while others kept this ``share`` of the cores busy."""
    notes = ceilings.notes
    if share > _QUIET_SHARE:
        notes += (f"other processes kept {share:.0%} of the cores busy: measure again when quiet",)
    return msgspec.structs.replace(
        ceilings,
        relative_error=ceilings.relative_error + share,
        quiet=ceilings.quiet and share <= _QUIET_SHARE,
        notes=notes,
    )


def age_s(ceilings: Ceilings) -> float:
    """Seconds since they were measured."""
    made = datetime.strptime(ceilings.measured_at, _TIME).replace(tzinfo=UTC)
    return (datetime.now(UTC) - made).total_seconds()


def timestamp() -> str:
    """Now, UTC, to the second."""
    return datetime.now(UTC).strftime(_TIME)


# Ratios of the engine's kernels to NumPy's GEMM and to DRAM bandwidth, seen when both were
# measured on one machine (2 cores, AVX2: fp16-weight linear 1.0-1.2x of fp32 GEMM at many rows,
# decode attention 0.3x and chunk attention 0.25x of their roofs); the interval covers the rest.
_DECODE_SHARE_OF_DRAM = 0.35
_CHUNK_SHARE_OF_GEMM = 0.3


def quick_ceilings(machine: Machine, budget_s: float = 1.0) -> Ceilings:
    """A stand-in measured with NumPy within about ``budget_s``: bandwidth and fp32 GEMM only."""
    import numpy as np  # noqa: PLC0415 - a sixth of a second that other commands need not pay

    rng = np.random.default_rng(0)
    stream = np.ones(24 * 2**20, dtype=np.float32)  # 96 MiB: beyond the last-level cache of most
    dram = 0.0
    deadline = time.perf_counter() + 0.3 * budget_s
    while True:
        start = time.perf_counter()
        stream.sum()
        dram = max(dram, stream.nbytes / (time.perf_counter() - start))
        if time.perf_counter() > deadline:
            break
    weights = rng.standard_normal((1536, 1536), dtype=np.float32)
    gemm = 0.0
    deadline = time.perf_counter() + 0.5 * budget_s
    rows = rng.standard_normal((512, 1536), dtype=np.float32)
    while True:
        start = time.perf_counter()
        rows @ weights
        gemm = max(gemm, 2.0 * 512 * 1536 * 1536 / (time.perf_counter() - start))
        if time.perf_counter() > deadline:
            break
    # One NumPy sum runs on one core; memory of a few cores is shared, so it stands for all.
    linear = {dtype: _limited(gemm, dram, size) for dtype, size in (("fp16", 2.0), ("fp32", 4.0))}
    # On codes kernels do some 1.6 times the products a second that they do in float32.
    linear["native"] = _limited(1.6 * gemm, dram, 0.625)
    return Ceilings(
        fingerprint=machine.fingerprint(KERNELS_VERSION),
        source="quick",
        measured_at=timestamp(),
        threads=machine.cores,
        dram_bytes_per_s=dram,
        linear_flops_per_s=linear,
        head_flops_per_s=linear,
        decode_bytes_per_s=Curve((1.0,), (dram * _DECODE_SHARE_OF_DRAM,)),
        chunk_flops_per_s=Curve((1.0,), (gemm * _CHUNK_SHARE_OF_GEMM,)),
        overheads=Overheads(
            step_s=1e-3,
            layer_s=6e-5,
            layer_token_s=4e-6,
            sequence_s=1e-4,
            request_s=8e-3,
            prompt_token_s=2e-6,
            stream_token_s=3e-4,
            work_token_s=2e-6,
        ),
        relative_error=0.6,
        notes=(
            "NumPy bandwidth and GEMM only; run `hullspeed calibrate` for the engine's kernels",
        ),
    )


def _limited(gemm_flops_per_s: float, dram: float, bytes_per_weight: float) -> Curve:
    """FLOP/s against rows: the GEMM rate, or what reading each weight once allows if less."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    reading = [2.0 * m * dram / bytes_per_weight for m in rows]
    return Curve(
        tuple(float(m) for m in rows), tuple(min(gemm_flops_per_s, flops) for flops in reading)
    )
