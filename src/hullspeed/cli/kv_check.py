"""``hullspeed verify --kv``: what each KV cache type costs a model in correctness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.runtime.config import KvDtype, WeightDtype
    from hullspeed.runtime.kv_error import KvError, KvReport

MEAN_KL_NATS = 0.01


def kv_check(
    model: str,
    *,
    kv_dtype: tuple[KvDtype, ...],
    max_kl: float,
    text: Path | None,
    threads: int | None,
    weight_dtype: WeightDtype,
    json: bool,
    quiet: bool,
) -> int:
    """Measure and print; 1 if a type of ``kv_dtype`` is further from float32 than ``max_kl``."""
    from hullspeed.runtime.config import KvDtype

    if not max_kl > 0:
        raise UsageError("--max-kl must be above 0", seen=max_kl)
    dtypes = kv_dtype or tuple(name for name in get_args(KvDtype) if name != "fp32")
    report = _measure(
        model, dtypes, text=text, threads=threads, weight_dtype=weight_dtype, quiet=quiet
    )
    beyond = [e.kv_dtype for e in report.errors if kv_dtype and not e.mean_kl_nats <= max_kl]
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _print(report)
    for name in beyond:
        sys.stderr.write(f"{name} is beyond --max-kl {max_kl:g} nats\n")
    return 1 if beyond else 0


def _measure(
    model: str, dtypes: tuple[KvDtype, ...], *, text: Path | None, threads: int | None,
    weight_dtype: WeightDtype, quiet: bool,
) -> KvReport:  # fmt: skip
    from hullspeed.arch.load import load_arch
    from hullspeed.hardware.machine import detect_machine
    from hullspeed.models.load import load_decoder
    from hullspeed.runtime.config import served_name
    from hullspeed.runtime.kv_error import measure_kv_error, passage
    from hullspeed.runtime.loading import text_path
    from hullspeed.sources.resolve import resolve
    from hullspeed.text.model_text import read_model_text

    def tell(line: str) -> None:
        if not quiet:
            sys.stderr.write(line + "\n")

    content = passage() if text is None else _read(text)
    tell(f"loading {model}")
    files = resolve(model)
    arch = load_arch(files)
    tokenizer = read_model_text(text_path(files)).tokenizer
    decoder = load_decoder(
        files.weights,
        arch,
        weight_dtype=weight_dtype,
        threads=threads or detect_machine().cores,
    )
    tokens = tokenizer.encode(content, parse_special=False, add_special=True)
    return measure_kv_error(decoder, tokens, dtypes, model=served_name(model), progress=tell)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "the text cannot be read", seen=f"{path}: {error}", fix="give a file of UTF-8 text"
        ) from None


def _print(report: KvReport) -> None:
    from rich.console import Console

    from hullspeed.report.blocks import Table
    from hullspeed.report.terminal import block_renderable

    console = Console(highlight=False)
    console.print(
        f"{report.model}: {report.text_tokens} tokens of text, the last {report.decoded_tokens} "
        f"decoded one by one; {report.greedy_tokens} greedy tokens after them",
        soft_wrap=True,
    )
    header = ("KV", "bytes/token", "mean KL", "worst KL", "decode KL", "top-1", "perplexity",
              "max logit change", "greedy equal")  # fmt: skip
    plain = ("fp32", f"{report.fp32_bytes_per_token:,}", "0", "0", "0", "100.00 %",
             f"{report.fp32_perplexity:.3f}", "0", str(report.greedy_tokens))  # fmt: skip
    rows = (plain, *(_row(error) for error in report.errors))
    console.print(block_renderable(Table(header=header, rows=rows)))
    console.print("KL in nats, of the next-token distributions, against float32 keys and values")


def _row(error: KvError) -> tuple[str, ...]:
    return (
        error.kv_dtype,
        f"{error.kv_bytes_per_token:,}",
        f"{error.mean_kl_nats:.2g}",
        f"{error.max_kl_nats:.2g}",
        f"{error.decode_kl_nats:.2g}",
        f"{error.top1_agreement:.2%}".replace("%", " %"),
        f"{error.perplexity:.3f}",
        f"{error.max_logit_change:.3g}",
        str(error.greedy_equal_tokens),
    )
