"""sweep: many questions from one, by axes of values or one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from hullspeed.core.build import CACHES
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.hardware.gpu import Gpu
from hullspeed.memory.budget import GpuMemory
from hullspeed.twin.profiles import profiles
from hullspeed.twin.question import Question, with_settings

MAX_QUESTIONS = 20_000
MemoryOf = Callable[[Gpu], GpuMemory]

_SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "tp": ("tp", int),
    "kv-dtype": ("kv_dtype", str),
    "state-dtype": ("state_dtype", str),
    "max-num-seqs": ("max_num_seqs", int),
    "max-num-batched-tokens": ("max_num_batched_tokens", int),
    "memory-fraction": ("memory_fraction", float),
    "context": ("max_model_len", int),
    "prefix-caching": ("prefix_caching", lambda text: {"on": True, "off": False}[text]),
}
AXES = ("gpu", "engine", "cache", "eviction", *_SETTINGS)


def parse_axes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """``("gpu=h100-sxm,h200-sxm", "tp=1,2")`` as axes.

    Raises:
        UsageError: for an unknown axis, one without values, or one given twice.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if name not in AXES:
            raise UsageError("no such axis to sweep", seen=name, fix=f"use {', '.join(AXES)}")
        found = tuple(dict.fromkeys(v.strip() for v in values.split(",") if v.strip()))
        if not equals or not found or name in axes:
            raise UsageError(
                "an axis is a name and its values, once", seen=text, fix=f"write {name}=a,b"
            )
        axes[name] = found
    return axes


def expand(
    base: Question, axes: Mapping[str, Sequence[str]], memory_of: MemoryOf, price: float | None
) -> list[Question]:
    """One question for each combination of values, labelled by them.

    Raises:
        UsageError: for a value that is none, or too many combinations.
    """
    total = 1
    for values in axes.values():
        total *= len(values)
    if total > MAX_QUESTIONS:
        raise UsageError("too many combinations", seen=total, fix=f"at most {MAX_QUESTIONS:,}")
    questions = []
    for values in product(*axes.values()):
        question = base
        for name, value in zip(axes, values, strict=True):
            question = changed(question, name, value, memory_of)
        label = " ".join(f"{name}={value}" for name, value in zip(axes, values, strict=True))
        changes = tuple(zip(axes, values, strict=True))
        labelled = replace(question, label=label or base.label, changes=changes)
        questions.append(priced(labelled, price))
    return questions


def changed(question: Question, name: str, value: str, memory_of: MemoryOf) -> Question:
    """With one axis set.

    Raises:
        UsageError: for a value that cannot be.
    """
    if name == "gpu":
        gpu = find_gpu(value)
        # A calibration is of one model on one GPU: another one's factors say nothing here.
        same = question.gpu is not None and gpu.name == question.gpu.name
        calibration = question.calibration if same else None
        return replace(question, gpu=gpu, memory=memory_of(gpu), calibration=calibration)
    if name == "cache":
        if value not in CACHES:
            raise UsageError("unknown prefix cache", seen=value, fix=f"use {', '.join(CACHES)}")
        return replace(question, cache=value)
    if name == "eviction":
        if value not in ("lru", "density"):
            raise UsageError("unknown eviction policy", seen=value, fix="use lru or density")
        return replace(question, eviction=value)
    if name == "engine":
        if value not in profiles():
            raise UsageError("unknown engine", seen=value, fix=f"use {', '.join(profiles())}")
        other = with_settings(question, question.label, engine=value, version=None)
        return other if value == question.settings.engine else replace(other, calibration=None)
    field, convert = _SETTINGS[name]
    try:
        setting = convert(value)
    except (ValueError, KeyError):
        raise UsageError(f"{name} cannot be this", seen=value) from None
    other = with_settings(question, question.label, **{field: setting})
    return replace(other, calibration=None) if name == "tp" and other != question else other


def priced(question: Question, price: float | None) -> Question:
    """With the hourly price of all its GPUs: ``price`` each, or the catalogue's."""
    each = price
    if each is None and question.gpu is not None and question.gpu.price is not None:
        each = question.gpu.price.usd_per_hour
    n_gpus = question.settings.tp * question.settings.pp
    return replace(question, usd_per_hour=None if each is None else each * n_gpus)


def what_if(base: Question, memory_of: MemoryOf, price: float | None) -> list[Question]:
    """The question itself, then one change at a time, those that change nothing left out."""
    settings = base.settings
    changes = [
        ("tp", str(settings.tp * 2)),
        ("kv-dtype", "fp8"),
        ("max-num-batched-tokens", "2048"),
        ("max-num-batched-tokens", "16384"),
        ("max-num-seqs", "32"),
        ("max-num-seqs", "512"),
        ("prefix-caching", "off"),
        ("eviction", "density"),
        *(("engine", name) for name in ("vllm", "sglang", "trtllm")),
        *(("gpu", name) for name in ("h100-sxm", "h200-sxm", "b200", "l40s")),
    ]
    questions = [priced(replace(base, label="as asked"), price)]
    for name, value in changes:
        question = changed(base, name, value, memory_of)
        if question == base or (name == "gpu" and question.gpu == base.gpu):
            continue
        # A price that was given is that of the GPU asked about.
        own = price if question.gpu == base.gpu else None
        questions.append(priced(replace(question, label=f"{name}={value}"), own))
    return questions
