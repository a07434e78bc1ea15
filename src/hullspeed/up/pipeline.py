"""run: pull → plan → preflight → serve → verify → bench, each stage's result handed to the next."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from hullspeed import __version__
from hullspeed.arch.model import ModelArch
from hullspeed.bench import BenchSpec, run_sync
from hullspeed.bench import Objective as LatencyObjective
from hullspeed.bench import run as run_bench
from hullspeed.errors import EngineError, UsageError
from hullspeed.findings import Finding
from hullspeed.hardware.ceilings import Ceilings, age_s, load_ceilings
from hullspeed.hardware.machine import Machine, detect_machine
from hullspeed.memory.budget import EngineSettings, Term
from hullspeed.memory.held import held_dtype
from hullspeed.plan.case import Case
from hullspeed.plan.plan import Plan, make_plan
from hullspeed.plan.source import load_model
from hullspeed.plan.workload import make_workload
from hullspeed.preflight.gate import gate, run_preflight
from hullspeed.runtime.config import EngineConfig
from hullspeed.sources.progress import Progress
from hullspeed.sources.resolve import resolve
from hullspeed.up.loads import Cell, cells
from hullspeed.up.objective import judge
from hullspeed.up.predicted import Prediction, predict
from hullspeed.up.result import MeasuredCell, UpResult
from hullspeed.up.served import Server, served
from hullspeed.verify.report import VerifyReport
from hullspeed.verify.run import run as run_verify


class UpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to bring up, and what must hold.

    Attributes:
        isl_tokens: Prompt length of the cells; a long prompt of four times that is measured too.
        ttft_s: Limit for the time to first token of the cells with prompts of ``isl_tokens``.
        tpot_s: Limit for the mean time per output token of every cell.
        overrides: Codes of preflight findings to pass all the same.
    """

    engine: EngineConfig
    isl_tokens: int = 512
    osl_tokens: int = 64
    ttft_s: float | None = None
    tpot_s: float | None = None
    overrides: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: naming the field.
        """
        for name in ("isl_tokens", "osl_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", seen=getattr(self, name))
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be above 0", seen=value)


class Watcher:
    """Told how the run goes; does nothing by itself."""

    def stage(self, name: str, number: int, total: int) -> None:
        """Stage ``number`` of ``total`` begins."""

    def line(self, text: str) -> None:
        """Something worth a line within the stage."""

    def download(self, task: str, done_bytes: int, total_bytes: int | None) -> None:
        """Bytes arrive."""


_DISTURBED_S = 1800.0  # for so long a calibration that others disturbed is not made again
STAGES = ("pull", "calibrate", "plan", "preflight", "serve", "verify", "bench")


def run(spec: UpSpec, watcher: Watcher | None = None) -> UpResult:
    """Do all of it.

    Raises:
        HullspeedError: of the stage that could not be done; nothing is left running.
    """
    spec.check()
    return _Run(spec, watcher or Watcher()).run()


class _Run:
    def __init__(self, spec: UpSpec, watcher: Watcher) -> None:
        self._spec = spec
        self._watcher = watcher
        self._machine = detect_machine()
        self._stages_s: dict[str, float] = {}

    def run(self) -> UpResult:
        config = self._spec.engine
        with self._stage("pull"):
            resolve(config.model, self._progress())
        with self._stage("calibrate"):
            ceilings = self._ceilings()
        with self._stage("plan"):
            plan, loads, predictions = self._plan(ceilings)
        with self._stage("preflight"):
            findings = self._preflight(plan)
        with ExitStack() as stack:
            with self._stage("serve"):
                server = stack.enter_context(served(config))
            self._watcher.line(f"{server.model} at {server.url} after {server.ready_s:.1f} s")
            with self._stage("verify"):
                verified = run_sync(run_verify(server.url, progress=self._watcher.line))
            with self._stage("bench"):
                measured = [
                    self._measure(server, cell, prediction)
                    for cell, prediction in zip(loads, predictions, strict=True)
                ]
        return self._result(plan, findings, server, verified, measured)

    def _plan(self, ceilings: Ceilings) -> tuple[Plan, tuple[Cell, ...], list[Prediction]]:
        spec, config = self._spec, self._spec.engine
        model = load_model(config.model)
        config = msgspec.structs.replace(config, weight_dtype=self._held_dtype(model.arch))
        model = model.embedded(config.weight_dtype)
        context = config.max_context_tokens or model.arch.max_context_tokens
        if spec.isl_tokens + spec.osl_tokens > context:
            raise UsageError(
                f"the context holds {context:,} tokens, prompt and output together",
                seen=f"--isl {spec.isl_tokens} --osl {spec.osl_tokens}",
                fix="lower them",
            )
        loads = cells(context, isl_tokens=spec.isl_tokens, osl_tokens=spec.osl_tokens)
        workload = make_workload(
            model.arch,
            isl=loads[1].isl_tokens,
            osl=loads[1].osl_tokens,
            concurrency=loads[1].concurrency,
            ttft_s=spec.ttft_s,
            tpot_s=spec.tpot_s,
        )
        settings = EngineSettings(
            engine="hullspeed",
            kv_cache_bytes=config.kv_budget_bytes,
            kv_dtype=config.kv_dtype,
            max_num_seqs=config.max_running,
            max_num_batched_tokens=config.step_tokens,
        )
        case = Case(
            model=model,
            workload=workload,
            settings=settings,
            machine=self._machine,
            ceilings=ceilings,
            weight_dtype=config.weight_dtype,
        )
        plan = make_plan(case)
        self._watcher.line(plan.summary)
        predictions = predict(model.arch, config, ceilings, plan.capacity.blocks, loads)
        return plan, loads, predictions

    def _ceilings(self) -> Ceilings:
        """Kept ones, or measured now, in a process that goes away with its thread pools."""
        kept = self._load_ceilings()
        if kept is not None:
            self._watcher.line(f"kept from {kept.measured_at}")
            if not kept.quiet:
                self._watcher.line("; ".join(kept.notes))
            return kept
        config = self._spec.engine
        command = [sys.executable, "-m", "hullspeed", "calibrate", config.model]
        command += ["--weight-dtype", config.weight_dtype, "--json", "--quiet"]
        if config.threads is not None:
            command += ["--threads", str(config.threads)]
        self._watcher.line("timing this machine's kernels; the first time they are compiled too")
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        measured = load_ceilings(self._machine)
        if done.returncode not in (0, 1) or measured is None:
            raise EngineError(
                "this machine could not be calibrated",
                seen=f"exit code {done.returncode}",
                fix="run `hullspeed calibrate` to see why",
            )
        return measured

    def _held_dtype(self, arch: ModelArch) -> str:
        return held_dtype(arch, self._spec.engine.weight_dtype, self._machine.isa)

    def _load_ceilings(self) -> Ceilings | None:
        config = self._spec.engine
        kept = load_ceilings(self._machine)
        dtype = self._held_dtype(load_model(config.model).arch)
        if kept is None or dtype not in kept.linear_flops_per_s:
            return None
        threads = config.threads or self._machine.cores
        if kept.threads != threads or not kept.served:
            return None
        # On a machine that stays busy another calibration would be no better than the last.
        return kept if kept.quiet or age_s(kept) < _DISTURBED_S else None

    def _preflight(self, plan: Plan) -> list[Finding]:
        config = self._spec.engine
        claimed = (item for item in plan.stack.items if item.term is not Term.HEADROOM)
        need_bytes = sum(item.bytes for item in claimed)
        findings = run_preflight(config.model, need_bytes=need_bytes, port=0)
        for finding in findings:
            self._watcher.line(f"{finding.code} {finding.severity}: {finding.what}")
        gate(findings, self._spec.overrides)
        return findings

    def _measure(self, server: Server, cell: Cell, prediction: Prediction) -> MeasuredCell:
        limits = LatencyObjective(
            ttft_s=self._spec.ttft_s if cell.isl_tokens <= self._spec.isl_tokens else None,
            tpot_s=self._spec.tpot_s,
        )
        spec: BenchSpec = cell.as_bench(server.url, server.model, limits)
        bench = run_sync(run_bench(spec))
        if bench.cells:
            ttft, itl = bench.cells[0].ttft_s.p50, bench.cells[0].itl_s.p50
            self._watcher.line(
                f"{cell.title}: TTFT {ttft * 1e3:,.0f} ms, ITL {itl * 1e3:.1f} ms, "
                f"{bench.cells[0].output_tok_s:,.0f} tok/s"
            )
        return MeasuredCell(cell=cell, predicted=prediction, bench=bench)

    def _result(
        self,
        plan: Plan,
        findings: list[Finding],
        server: Server,
        verified: VerifyReport,
        measured: list[MeasuredCell],
    ) -> UpResult:
        return UpResult(
            model=server.model,
            version=__version__,
            machine=_describe(self._machine),
            ready_s=server.ready_s,
            skipped=server.skipped,
            stages_s=self._stages_s,
            plan=plan,
            preflight=findings,
            verify=verified,
            cells=measured,
            objectives=judge(plan, verified, measured),
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._watcher.stage(name, STAGES.index(name) + 1, len(STAGES))
        begin_s = time.monotonic()
        yield
        self._stages_s[name] = time.monotonic() - begin_s

    def _progress(self) -> Progress:
        return self._watcher.download


def _describe(machine: Machine) -> str:
    memory_gib = machine.memory_bytes / 2**30
    return f"{machine.cpu_model}, {machine.cores} cores, {memory_gib:.0f} GiB"
