"""From a model's files to a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.kernels.load import KernelsName, load_kernels
from hullspeed.models.decoder import Decoder
from hullspeed.models.gguf_weights import GgufWeights
from hullspeed.models.safetensors_weights import SafetensorsWeights
from hullspeed.models.weights import Weights


def open_weights(paths: Sequence[Path], arch: ModelArch) -> Weights:
    """The weights in ``paths``: one GGUF model or all shards of a safetensors checkpoint.

    Raises:
        UsageError: if the files are of neither kind, or of both.
        CorruptFileError: if a file is cut short or contradicts itself.
    """
    kinds = {path.suffix for path in paths}
    if kinds == {".gguf"}:
        return GgufWeights(paths, arch)
    if kinds == {".safetensors"}:
        return SafetensorsWeights(paths, arch)
    raise UsageError(
        "weights must be .gguf or .safetensors files",
        seen=[path.name for path in paths],
        fix="name the model's folder or file",
    )


def load_decoder(
    paths: Sequence[Path],
    arch: ModelArch,
    *,
    kernels: KernelsName = "cpu",
    weight_dtype: str = "fp16",
    threads: int = 1,
    max_context_tokens: int | None = None,
) -> Decoder:
    """Read, pack and check a model; give it pages with :meth:`Decoder.allocate_kv` before use.

    Peak memory is the packed model and one tensor in float32 for each thread.

    Raises:
        UnsupportedModelError: if the architecture or a number format is not computed here.
        CorruptFileError: if the files are damaged or do not fit the architecture.
        UsageError: for options that cannot be.
    """
    backend = load_kernels(kernels, weight_dtype=weight_dtype, threads=threads)
    weights = open_weights(paths, arch)
    return Decoder(arch, weights, backend, max_context_tokens=max_context_tokens)
