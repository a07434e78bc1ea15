"""From a model's files to a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.kernels.load import KernelsName, load_kernels
from hullspeed.models.decoder import Decoder
from hullspeed.models.gguf_weights import GgufWeights
from hullspeed.models.heap import trim
from hullspeed.models.safetensors_weights import SafetensorsWeights
from hullspeed.models.watched import WatchedWeights, silent
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
    weight_dtype: str = "native",
    threads: int = 1,
    max_context_tokens: int | None = None,
    draft: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Read, pack and check a model; give it pages with :meth:`Decoder.allocate_kv` before use.

    Peak memory is the packed model and, for each thread, the weight at hand in float32 with the
    copies that joining and packing make of it. Quantized weights are dequantized and held in
    fp16 or fp32, but for what ``"native"`` holds as it is stored.

    Args:
        paths: One GGUF file or shards, or all safetensors shards.
        arch: The model.
        kernels: Back end.
        weight_dtype: What linear layers are held in: ``"native"``, ``"fp16"`` or ``"fp32"``; see
            :func:`hullspeed.kernels.load.load_kernels`.
        threads: Of loading and computing.
        max_context_tokens: Highest position + 1 that will be asked for.
        draft: Load the multi-token-prediction layer too, as :attr:`Decoder.draft`.
        progress: Told of the share of the weights that is read, 0 to 1.

    Raises:
        UnsupportedModelError: if the architecture or a number format is not computed here.
        CorruptFileError: if the files are damaged or do not fit the architecture.
        UsageError: for options that cannot be.
    """
    backend = load_kernels(kernels, weight_dtype=weight_dtype, threads=threads)
    weights = open_weights(paths, arch)
    watched = WatchedWeights(weights, arch, progress or silent)
    decoder = Decoder(arch, watched, backend, max_context_tokens=max_context_tokens, draft=draft)
    trim()
    return decoder
