"""Points: published measurements, read row by row; what a row does not say is stated as assumed.

Columns: source, model, gpu, n_gpus, precision, engine, version, isl, osl, concurrency_or_rate,
ttft_ms, itl_ms, output_tok_s, notes.
"""

from __future__ import annotations

import csv
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hullspeed.errors import UsageError

_PROTOCOLS = Path(__file__).with_name("protocols.toml")
_COLUMNS = ("source", "model", "gpu", "n_gpus", "precision", "engine", "version", "isl", "osl",
            "concurrency_or_rate", "ttft_ms", "itl_ms", "output_tok_s", "notes")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row that says enough to be predicted.

    Attributes:
        line: Of the file, 1 is the header.
        source: Where it was published.
        family: Of sources that share a protocol.
        model: Name in the catalogue.
        quant: Weight format.
        protocol: ``closed``: ``concurrency`` in flight, ``prompts`` in all; ``burst``: all sent at
            once; ``open``: ``rate`` per second.
        spread: Lengths are uniform between this share of the nominal length and all of it; with
            0 they are drawn as conversations are, exponentially.
        lengths: Of ``protocols.toml``, the table that lengths are drawn from instead.
        accept: Tokens a decode step yields; 1 without speculation, 0 if the row does not say.
        step_tokens: Token budget of a step; 0 for the engine's default.
        memory_fraction: As the engine was told; 0 for its default.
        max_running: As the engine was told; 0 for its default.
        wait_steps: Decode steps that prompts are held back for until they fill ``wait_share`` of
            a step (TensorRT-LLM); 0: not at all.
        wait_share: See ``wait_steps``.
        in_process: The load was handed to the engine without a server in front.
        eager: The engine ran without CUDA graphs.
        machine: Whose host it ran on, where a source names its machines.
        median: ``ttft_s`` and ``tpot_s`` are medians; else means.
        assumed: What the row does not say.
        tpot_s: Mean time between tokens; 0 where not measured, as the next two.
    """

    line: int
    source: str
    family: str
    model: str
    gpu: str
    tp: int
    quant: str
    kv_dtype: str
    engine: str
    version: str
    isl: float
    osl: float
    protocol: Literal["closed", "burst", "open"]
    concurrency: int
    rate: float
    prompts: int
    spread: float
    lengths: str
    accept: float
    step_tokens: int
    memory_fraction: float
    max_running: int
    wait_steps: int
    wait_share: float
    in_process: bool
    eager: bool
    machine: str
    median: bool
    assumed: str
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float

    @property
    def group(self) -> str:
        """What is left out together: one model, format, GPU, number of GPUs and engine."""
        quant = self.quant.partition("-")[0]
        name = (self.family, self.model, quant, f"{self.tp}x{self.gpu}", self.engine)
        return " | ".join(name + (("speculative",) if self.accept != 1.0 else ()))


_GPUS = (
    ("h100 nvl", "H100-NVL"), ("h100", "H100-SXM"), ("h200", "H200"), ("h20", "H20"),
    ("gb200", "GB200"), ("gb300", "GB300"), ("b200", "B200"), ("b300", "B300"),
    ("a100-sxm4-40", "A100-40GB-SXM"), ("a100", "A100-80GB-SXM"), ("a800", "A100-80GB-SXM"),
    ("a6000", "RTX A6000"), ("6000 ada", "RTX 6000 Ada"), ("3090", "RTX 3090"),
    ("5090", "RTX 5090"), ("4090", "RTX 4090"), ("l40s", "L40S"),
)  # fmt: skip
_MODELS = (
    ("qwen3.6-27b", "Qwen/Qwen3.6-27B"), ("qwen3.8-27b", "Qwen/Qwen3.8-27B"),
    ("qwen3.5-27b", "Qwen/Qwen3.5-27B"), ("35b-a3b", "Qwen/Qwen3.6-35B-A3B"),
    ("qwen3.5-9b", "Qwen/Qwen3.5-9B"), ("qwen3-32b", "Qwen/Qwen3-32B"),
    ("qwen3-14b", "Qwen/Qwen3-14B"), ("qwen3-8b", "Qwen/Qwen3-8B"),
    ("qwen3-30b", "Qwen/Qwen3-30B-A3B"), ("gpt-oss-120b", "openai/gpt-oss-120b"),
    ("gpt-oss-20b", "openai/gpt-oss-20b"), ("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1"),
    ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"), ("deepseek-r1", "deepseek-ai/DeepSeek-R1"),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"), ("llama-3-8b", "meta-llama/Llama-3.1-8B"),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B"), ("llama-3-70b", "meta-llama/Llama-3.1-70B"),
    ("llama-3.3-70b", "meta-llama/Llama-3.1-70B"),
)  # fmt: skip


_MACHINES = ("accelmark", "gpustack")
_CAPTURED_TOKENS = 8192


def read_points(path: Path) -> list[Point]:
    """Every row of the file that says enough: model, GPU, lengths and load known.

    Raises:
        UsageError: if the file lacks a column, naming it, or a number is not one, naming its line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for name in _COLUMNS:
                if name not in (reader.fieldnames or ()):
                    raise UsageError("the points file lacks a column", seen=name)
            points = [_point(row, line) for line, row in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the points file: {error}", seen=str(path)) from error
    return [point for point in points if point is not None]


class _Load(NamedTuple):
    """How requests arrive, and what a source's own documents say of its runs."""

    protocol: Literal["closed", "burst", "open"]
    concurrency: int = 0
    rate: float = 0.0
    prompts: int = 0
    isl: float = 0.0
    osl: float = 0.0
    spread: float = -1.0
    lengths: str = ""
    step_tokens: int = 0
    memory_fraction: float = 0.0
    max_running: int = 0
    in_process: bool = False
    assumed: str = ""


def _point(row: dict[str, str], line: int) -> Point | None:
    model = next((full for key, full in _MODELS if key in row["model"].lower()), None)
    gpu = next((name for key, name in _GPUS if key in row["gpu"].lower()), None)
    family, spread, assumed = _family(row)
    load = _load(row, family)
    if not model or not gpu or load is None or "not stated" in row["gpu"]:
        return None
    isl, osl = load.isl or _length(row["isl"]), load.osl or _length(row["osl"])
    if isl < 1 or osl < 1:
        return None
    engine = {"nim (trt-llm)": "trtllm"}.get(row["engine"].lower(), row["engine"].lower())
    command = row["notes"].partition("cmd:")[2]
    step_tokens = load.step_tokens or _flag(command, "max-num-batched-tokens", "max_num_tokens",
                                            "chunked-prefill-size")  # fmt: skip
    assumed = load.assumed or assumed
    wait_steps, wait_share = 0, 0.0
    if family == "inferencemax":
        step_tokens, wait_steps, wait_share = _inferencemax(row, engine, isl, osl)
    if family == "sweep" and engine != "sglang":
        # TTFT there hardly depends on output length and grows with concurrency as one prompt a
        # step does; with 8,192 tokens a step it would be two to three times as long.
        step_tokens = int(isl) + (load.concurrency if engine == "vllm" else 0)
        assumed = f"{assumed}, one prompt a step"
    prompts = load.prompts
    if not prompts:
        prompts = max(10 * load.concurrency, 16)
        assumed = f"10 prompts a client; {assumed}" if assumed else "10 prompts a client"
    quant = _quant(row, model)
    accept = _accept(row)
    if accept != 1.0:
        spread = 0.8
        assumed = "accepted drafts vary as lengths between 0.8 and 1 would"
    said = re.search(r"mem-fraction ([\d.]+)", row["notes"])
    old = row["version"].startswith("0.7.")
    # vLLM 0.7 captures graphs for contexts of up to 8,192 tokens; AccelMark's 0.20 runner tells
    # suite C to run without them.
    long = old and isl + osl > _CAPTURED_TOKENS
    uncaptured = family == "accelmark" and row["version"].startswith("0.20") and _suite(row) == "C"
    return Point(
        line=line,
        source=row["source"],
        family=family,
        model=model,
        gpu=gpu,
        tp=int(_number(row["n_gpus"], "n_gpus", line)),
        quant=quant,
        kv_dtype=_kv_dtype(family, engine, model, quant, gpu),
        engine=f"{engine}-0.7" if old else engine,
        version=row["version"],
        isl=isl,
        osl=osl,
        protocol=load.protocol,
        concurrency=load.concurrency,
        rate=load.rate,
        prompts=prompts,
        spread=load.spread if load.spread >= 0 and accept == 1.0 else spread,
        lengths=load.lengths if accept == 1.0 else "",
        accept=accept,
        step_tokens=step_tokens,
        memory_fraction=float(said[1]) if said else load.memory_fraction,
        max_running=load.max_running or _flag(command, "max-num-seqs", "max_batch_size"),
        wait_steps=wait_steps,
        wait_share=wait_share,
        in_process=load.in_process,
        eager=long or uncaptured or "--enforce-eager" in command,
        machine=_machine(row, family, load),
        median="P50" in row["notes"],
        assumed=assumed,
        ttft_s=_number(row["ttft_ms"], "ttft_ms", line) / 1e3,
        tpot_s=_tpot(row, line) / 1e3,
        output_tokens_per_s=_number(row["output_tok_s"], "output_tok_s", line),
    )


def _kv_dtype(family: str, engine: str, model: str, quant: str, gpu: str) -> str:
    """Of the KV cache: as InferenceMAX's recipes say; else TensorRT-LLM follows the checkpoint, and
    NVIDIA's quantized ones ask for 8 bit, Qwen's own FP8 ones do not.
    """
    if family == "inferencemax":
        return "bf16" if gpu in _protocols()["inferencemax"]["kv_16_bit"] else "fp8"
    own = quant == "fp8" and model.startswith("Qwen/")
    return "fp8" if engine == "trtllm" and quant != "none" and not own else "bf16"


def _inferencemax(
    row: dict[str, str], engine: str, isl: float, osl: float
) -> tuple[int, int, float]:
    """Tokens of a step, and for how many steps prompts wait for how much of one."""
    said = _protocols()["inferencemax"]
    if engine != "trtllm":
        return int(said["step_tokens"]), 0, 0.0
    step_tokens = int(isl + osl + said["trtllm_step_tokens_beyond_length"])
    waits = isl == osl and int(row["n_gpus"]) < said["trtllm_waits_below_gpus"]
    return step_tokens, said["trtllm_wait_steps"] if waits else 0, said["trtllm_wait_share"]


def _machine(row: dict[str, str], family: str, load: _Load) -> str:
    """The host, where a source names its machines; a process that streams is another load to it
    than one that is handed a batch.
    """
    if family not in _MACHINES:
        return ""
    batch = load.in_process and load.protocol == "burst"
    return f"{family} {row['gpu']}" + (", batch" if batch else "")


def _load(row: dict[str, str], family: str) -> _Load | None:
    """Arrivals and what goes with them; ``None`` if the row does not say."""
    text, notes = row["concurrency_or_rate"], row["notes"]
    if family == "accelmark":
        return _accelmark(row)
    if family == "trtllm-docs":
        docs = _protocols()["trtllm_docs"]
        prompts = int(docs["prompts"])
        return _Load("burst", prompts, prompts=prompts, spread=1.0,
                     memory_fraction=float(docs["memory_fraction"]))  # fmt: skip
    said = re.search(r"num_prompts (\d+)(x conc)?", notes)
    if found := re.fullmatch(r"(?:concurrency )?(\d+)", text):
        concurrency = int(found[1])
        prompts = int(said[1]) * (concurrency if said and said[2] else 1) if said else 0
        return _Load("closed", concurrency, prompts=prompts)
    if found := re.match(r"rate inf, (\d+) prompts, max/peak concurrency (\d+|nan)", text):
        prompts = int(found[1])
        peak = prompts if found[2] == "nan" else int(found[2])
        if rate := re.search(r"\bRate ([\d.]+)\s*$", notes.partition("case:")[2]):
            return _Load("open", rate=float(rate[1]), prompts=prompts)
        if "Rate " in notes.partition("case:")[2]:
            return None  # a rate that the row does not repeat
        return _Load("burst" if peak >= prompts else "closed", min(peak, prompts), prompts=prompts)
    return None


def _accelmark(row: dict[str, str]) -> _Load | None:
    """A scenario of one of its suites."""
    known = _protocols()["accelmark"]
    suite = known["suites"].get(_suite(row))
    if suite is None:
        return None
    said = {**known, **suite}
    text, old = row["concurrency_or_rate"], row["version"].startswith("0.7.")
    lengths = str(said["lengths"])
    load = _Load(
        "closed",
        1,
        prompts=int(said["interactive"]),
        isl=float(said["isl"]),
        osl=float(said["osl"]),
        spread=1.0 if lengths == "equal" else 0.0,
        lengths="" if lengths == "equal" else lengths,
        # Without chunked prefill a step takes the longest prompt that the engine was started for.
        step_tokens=int(said["step_tokens"] if old else 0),
        memory_fraction=float(said.get("memory_fraction", 0.0)),
        in_process=True,
        assumed="lengths of its prompts; output lengths as its published median and cut say",
    )
    if text.startswith("offline"):
        prompts, running = int(said["offline"]), int(said["offline_max_running"])
        return load._replace(
            protocol="burst", concurrency=prompts, prompts=prompts, max_running=running
        )
    load = load._replace(
        max_running=int(said["online_max_running"]["old" if old else "new"]),
        step_tokens=load.step_tokens or int(said["online_step_tokens"]),
    )
    if found := re.match(r"open-loop ([\d.]+) qps", text):
        rate, prompts = float(found[1]), int(said["online"])
        return load._replace(protocol="open", concurrency=0, rate=rate, prompts=prompts)
    return load


def _suite(row: dict[str, str]) -> str:
    found = re.search(r"suite_([A-G])", row["notes"] + row["source"])
    return found[1] if found else ""


def _flag(command: str, *names: str) -> int:
    """A whole number that the engine was started with; 0 without it."""
    for name in names:
        if found := re.search(rf"--{name}[ =](\d+)", command):
            return int(found[1])
    return 0


def _length(text: str) -> float:
    found = re.search(r"\d+\.?\d*", text.replace("p50", ""))
    return float(found[0]) if found else 0.0


def _family(row: dict[str, str]) -> tuple[str, float, str]:
    source, notes = row["source"].lower(), row["notes"]
    if "accelmark" in source:
        return "accelmark", 0.0, ""
    if "tensorrt-llm docs" in source:
        return "trtllm-docs", 1.0, "all requests queued, equal lengths"
    if "gpustack" in source:
        return "gpustack", 1.0 if "random" in notes.partition("case:")[2] else 0.0, ""
    if source.startswith("sgl-project"):
        return "sglang", 1.0, ""
    if "nim" in source:
        return "nim", 0.8, "range ratio 0.8"
    if "source_file=2026" in notes:
        return "inferencemax", 0.8, "range ratio 0.8"
    return "sweep", 1.0, "equal lengths"


def _quant(row: dict[str, str], model: str) -> str:
    text = row["precision"].lower()
    command = row["notes"].partition("cmd:")[2].lower()
    if "w4a16/gptq" in text:
        return "gptq-exllama"  # asked for by name: kernels that are not Marlin's
    if "nvfp4" in text:
        return "nvfp4" if "w4a16" not in text else "awq"
    for key, quant in (("w4a16", "gptq"), ("w8a16", "w8a16"), ("w8a8", "int8"), ("awq", "awq"),
                       ("int4", "gptq"), ("fp8", "fp8")):  # fmt: skip
        if key in text or key in command:
            return quant
    if "gpt-oss" in model:
        return "mxfp4"
    return "fp8" if "deepseek" in model else "none"


def _accept(row: dict[str, str]) -> float:
    """Tokens a decode step yields; 1 without speculation, 0 if speculating and not said."""
    notes = row["notes"]
    if found := re.search(r"accept len ~?([\d.]+)", notes):
        return float(found[1])
    return 0.0 if re.search(r"MTP\S* on|EAGLE|speculative", notes) else 1.0


def _tpot(row: dict[str, str], line: int) -> float:
    said = re.search(r"mean TPOT ([\d.]+)", row["notes"])
    return float(said[1]) if said else _number(row["itl_ms"], "itl_ms", line)


def _number(text: str, name: str, line: int) -> float:
    try:
        return float(text) if text.strip() else 0.0
    except ValueError:
        raise UsageError(f"{name} in line {line} is not a number", seen=text) from None


def length_shares(name: str) -> dict[str, list[float]]:
    """Lengths of table ``name`` as multiples of their mean at 0, 10, ... 100 % of the requests:
    ``input`` and ``output``.
    """
    table: dict[str, list[float]] = _protocols()["lengths"][name]
    return table


@cache
def _protocols() -> dict[str, Any]:
    return tomllib.loads(_PROTOCOLS.read_text(encoding="utf-8"))
