"""hullspeed and llama.cpp's server on one hybrid model, in one run, by the same client.

    python benchmarks/hybrid_peers.py                       # loads a, b, e, s; three rounds
    python benchmarks/hybrid_peers.py --loads a --rounds 1 --sides hullspeed llama.cpp

The model is made here (`peers/hybrid_checkpoint.py`: 58.8 M random weights in fp32, three gated
delta layers to one of full attention), the peer is compiled once (`peers/llama_server.py`); both
stay under `.cache/peers`. We run twice: as `hullspeed serve FOLDER` does it, with linear weights
held in fp16, and with `--weight-dtype fp32`, which is what the peer computes with. First the sides
must say the same under greedy decoding, so that what is compared is the same model.

How rounds, medians and foreign CPU work is said in `side_by_side.py`. Exit code: 0 when all bars
measured are held, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from side_by_side import (
    Figure,
    Load,
    Measured,
    Server,
    Side,
    bench_load,
    call,
    compare,
    console,
    report,
)  # fmt: skip

from hullspeed.bench import BenchSpec, Cell
from hullspeed.bench.client import Client
from hullspeed.bench.http1 import Target
from hullspeed.bench.load import Recording
from hullspeed.bench.run import summarise
from hullspeed.bench.workload import Job, PromptWriter, RequestWriter, decoding_of
from hullspeed.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "peers"
CHECKPOINT = CACHE / "hybrid-fp32"
GGUF = CACHE / "hybrid-f32.gguf"
SLOTS, CONTEXT_TOKENS = 16, 4096
OURS, OURS_FP32, PEER = "hullspeed", "hullspeed fp32", "llama.cpp"

# Prompts that share their first two thirds.
PROMPT_TOKENS, SHARED_TOKENS = 1899, 1266
SETS, SHARERS = 2, 4

PARITY_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a river that",
    "def add(a, b):\n    return",
)
PARITY_TOKENS = 24


# --- preparation --------------------------------------------------------------------------------


def prepare() -> Path:
    """Checkpoint, GGUF and the peer's binary, each made once; returns the binary."""
    scripts = ROOT / "benchmarks" / "peers"
    CACHE.mkdir(parents=True, exist_ok=True)
    if not CHECKPOINT.exists():
        console.print("making the checkpoint")
        call(sys.executable, str(scripts / "hybrid_checkpoint.py"), str(CHECKPOINT))
    builder = (sys.executable, str(scripts / "llama_server.py"), str(CACHE))
    call(*builder, show=True)
    if not GGUF.exists():
        console.print("converting to GGUF")
        call(*builder, "--convert", str(CHECKPOINT), str(GGUF))
    return CACHE / "llama-server"


def sides(binary: Path, peer_options: list[str]) -> list[Side]:
    """Ours with default weights, ours in fp32, the peer; each on its own port."""
    start = "from hullspeed.cli.main import main; main()"
    ours = (sys.executable, "-c", start, "serve", str(CHECKPOINT), "--port")
    peer = (
        str(binary), "-m", str(GGUF), "--port", "8112", "-np", str(SLOTS),
        "-c", str(SLOTS * CONTEXT_TOKENS), "-t", "2", *peer_options,
    )  # fmt: skip
    return [
        Side(OURS, (*ours, "8110"), "http://127.0.0.1:8110"),
        Side(OURS_FP32, (*ours, "8111", "--weight-dtype", "fp32"), "http://127.0.0.1:8111"),
        Side(PEER, peer, "http://127.0.0.1:8112"),
    ]


# --- the same model? ----------------------------------------------------------------------------


async def greedy_texts(url: str) -> list[str]:
    """What a server says to the parity prompts."""
    async with Client(Target.parse(url)) as client:
        model = await model_name(client)
        texts = []
        for prompt in PARITY_PROMPTS:
            body = {
                "model": model, "prompt": prompt, "max_tokens": PARITY_TOKENS, "temperature": 0,
                "ignore_eos": True,
            }  # fmt: skip
            status, answer = await client.json("/v1/completions", body)
            if status != 200:
                raise SystemExit(f"{url} answers a completion with {status}: {answer}")
            texts.append(str(answer["choices"][0]["text"]))
        return texts


async def model_name(client: Client) -> str:
    _, answer = await client.json("/v1/models")
    return str(answer["data"][0]["id"])


def check_parity(chosen: list[Side]) -> None:
    """Refuse to compare different models: fp32 must agree to the letter; weights rounded to fp16
    may turn a close choice, after which the texts go apart, so there one text must be equal.
    """
    texts = {}
    for side in chosen:
        with Server(side, CACHE / "parity.log"):
            texts[side.name] = asyncio.run(greedy_texts(side.url))
    reference = texts.get(PEER)
    for name, said in texts.items():
        if reference is None or name == PEER:
            continue
        equal = sum(a == b for a, b in zip(said, reference, strict=True))
        console.print(f"{name}: {equal} of {len(said)} greedy texts equal the peer's")
        if equal < (len(said) if name == OURS_FP32 else 1):
            raise SystemExit(f"{name} and {PEER} compute different models: {said} {reference}")


# --- loads --------------------------------------------------------------------------------------


def loads() -> dict[str, Load]:
    """By letter."""
    tokenizer = Tokenizer.from_folder(CHECKPOINT)

    async def count(text: str) -> int:
        return len(tokenizer.encode(text))

    def spec(
        url: str, isl_tokens: int, osl_tokens: int, requests: int, **more: object
    ) -> BenchSpec:
        values = {"isl_tokens": isl_tokens, "osl_tokens": osl_tokens, "requests": requests}
        return msgspec.convert({"url": url, "concurrency": (1,), **values, **more}, BenchSpec)

    return {
        "a": bench_load(
            "one stream, 507 tokens in, 128 out",
            lambda url: [spec(url, 507, 128, 3)],
            (
                Figure("decode tok/s", lambda cells: 1 / cells[0].tpot_s.p50, bar=1 / 1.2),
                Figure("cold TTFT s", ttft_of(0), bar=1.2, at_least=False),
            ),
            count,
        ),
        "e": bench_load(
            f"a {PROMPT_TOKENS}-token prompt, new and repeated",
            lambda url: [
                spec(url, PROMPT_TOKENS, 4, 2),
                spec(url, PROMPT_TOKENS, 4, 5, cache="cached"),
            ],
            (
                Figure("cold TTFT s", ttft_of(0), bar=1.2, at_least=False),
                Figure("warm TTFT s", ttft_of(1), bar=0.040, at_least=False, absolute=True),
            ),
            count,
        ),
        "s": Load(
            f"{PROMPT_TOKENS}-token prompts that share their first {SHARED_TOKENS}: the one that "
            "comes first, the second, later ones; raw, and as system and user message; beside "
            f"prompts of {PROMPT_TOKENS - SHARED_TOKENS} tokens alone",
            lambda url: shared_cells(url, PromptWriter(random.Random(secrets.randbits(48)), count)),
            shared_figures(),
        ),
        "b": bench_load(
            "64 requests, 16 at once, 400 shared + 100 own in, 64 out",
            lambda url: [
                spec(url, 500, 64, 64, shared_prefix_tokens=400, concurrency=(16,))
            ],
            (
                Figure("output tok/s", lambda cells: cells[0].output_tok_s, bar=1.5),
                Figure("TTFT p50 s", ttft_of(0), at_least=False),
                Figure("TTFT p99 s", lambda cells: cells[0].ttft_s.p99, at_least=False),
                Figure("ITL mean s", lambda cells: cells[0].itl_s.mean, at_least=False),
            ),
            count,
        ),
    }  # fmt: skip


def ttft_of(cell: int) -> Callable[[list[Cell]], float]:
    return lambda cells: cells[cell].ttft_s.p50


def cached_of(cell: int) -> Callable[[list[Cell]], float]:
    def mean(cells: list[Cell]) -> float:
        cached = cells[cell].cached_tokens
        return cached.mean if cached else float("nan")

    return mean


# Cells of load s, in order.
REST, RAW, RAW_SECOND, RAW_LATER, CHAT, CHAT_SECOND, CHAT_LATER = range(7)


def shared_figures() -> tuple[Figure, ...]:
    """TTFT and cached tokens by kind of request; the bar: a sharer pays what its rest costs."""

    def against_rest(cell: int) -> Callable[[list[Cell]], float]:
        return lambda cells: cells[cell].ttft_s.p50 / cells[REST].ttft_s.p50

    figures = [Figure("rest alone, TTFT s", ttft_of(REST), at_least=False)]
    for name, first, second, later in (
        ("raw", RAW, RAW_SECOND, RAW_LATER),
        ("chat", CHAT, CHAT_SECOND, CHAT_LATER),
    ):
        figures.append(Figure(f"{name} first, TTFT s", ttft_of(first), at_least=False))
        for which, cell in ((f"{name} second", second), (f"{name} later", later)):
            figures += (
                Figure(f"{which}, TTFT s", ttft_of(cell), at_least=False),
                Figure(f"{which}, cached tokens", cached_of(cell)),
                Figure(
                    f"{which}, TTFT / rest alone", against_rest(cell), bar=1.2, at_least=False,
                    absolute=True,
                ),
            )  # fmt: skip
    return tuple(figures)


async def shared_cells(url: str, prompts: PromptWriter) -> list[Cell]:
    """Send the prompts of load s one after the other."""
    spec = BenchSpec(url=url, isl_tokens=PROMPT_TOKENS, osl_tokens=4, concurrency=(1,))
    chat = msgspec.structs.replace(spec, api="chat")
    specs = {cell: chat if cell >= CHAT else spec for cell in range(7)}
    recordings = {cell: Recording() for cell in specs}
    async with Client(Target.parse(url)) as client:
        model = await model_name(client)
        writers = {
            api: RequestWriter(client, s, model, decoding_of(s))
            for api, s in (("raw", spec), ("chat", chat))
        }
        rest_tokens = PROMPT_TOKENS - SHARED_TOKENS
        for _ in range(SETS):
            jobs = [(REST, writers["raw"].bytes_of((await prompts.write(rest_tokens)).text), 0)]
            shared = await prompts.write(SHARED_TOKENS)
            system = await prompts.write(SHARED_TOKENS)
            for i in range(SHARERS):
                raw = await prompts.write(PROMPT_TOKENS, shared)
                user = await prompts.write(rest_tokens)
                messages = [
                    {"role": "system", "content": system.text},
                    {"role": "user", "content": user.text},
                ]
                repeated = SHARED_TOKENS if i else 0
                jobs.append((RAW + min(i, 2), writers["raw"].bytes_of(raw.text), repeated))
                jobs.append((CHAT + min(i, 2), writers["chat"].bytes_of(messages), repeated))
            for cell, request, repeated in jobs:
                tokens = rest_tokens if cell == REST else PROMPT_TOKENS
                exchange = await client.exchange(request)
                recordings[cell].samples.append((Job(request, tokens, repeated), exchange))
    return [
        summarise(specs[cell], recording, concurrency=1, rate=None)
        for cell, recording in recordings.items()
    ]


# --- the run ------------------------------------------------------------------------------------


def main() -> int:
    """Prepare, check parity, measure in alternating order, report ours and ours in fp32."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loads", nargs="+", choices=("a", "b", "e", "s"), default=list("aesb"))
    parser.add_argument("--rounds", type=int, default=3)
    names = (OURS, OURS_FP32, PEER)
    parser.add_argument("--sides", nargs="+", choices=names, default=list(names))
    parser.add_argument("--no-parity", action="store_true", help="skip the check of equal output")
    parser.add_argument("--peer-option", action="append", default=[], help="for llama-server")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    args = parser.parse_args()
    chosen = [s for s in sides(prepare(), args.peer_option) if s.name in args.sides]
    if not args.no_parity:
        check_parity(chosen)
    known = loads()
    wanted = {name: known[name] for name in args.loads}
    measured = compare(chosen, wanted, args.rounds, CACHE)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured)))
    held = [said(measured, wanted, name, args.sides) for name in (OURS, OURS_FP32)]
    return 0 if all(held) else 1


def said(measured: list[Measured], wanted: dict[str, Load], name: str, names: list[str]) -> bool:
    """The table of one of ours beside the peer."""
    if name not in names:
        return True
    columns = [name, *([PEER] if PEER in names else [])]
    title = "58.8 M hybrid, greedy; medians; ratio = ours / peer"
    return report(title, measured, wanted, columns)


if __name__ == "__main__":
    sys.exit(main())
