"""Quantization configs: ``quantization_config`` of config.json, and ModelOpt's own file, to a
``WeightFormat``.

Sources: ``transformers.utils.quantization_config``, the compressed-tensors and ModelOpt schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hullspeed.arch.fields import Fields
from hullspeed.arch.quant import EVERY_LINEAR, LINEARS, UNQUANTIZED, Modules, WeightFormat
from hullspeed.arch.schemes import Scheme
from hullspeed.errors import UnsupportedModelError


class UnknownQuantizationError(UnsupportedModelError):
    """A quantization whose layout is not known here; only headers can tell its size.

    Args:
        method: Its name.
    """

    def __init__(self, what: str, *, method: str, seen: object = None) -> None:
        super().__init__(what, seen=seen, fix=_HEADERS_TELL)
        self.method = method


_HEADERS_TELL = "size it from its files: their headers state every size"

# Heads stay in the model's type unless a config says otherwise.
_HEAD = ("lm_head",)


def weight_format(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None
) -> WeightFormat:
    """The weight format that a config.json declares.

    Args:
        config: config.json.
        modelopt: ``hf_quant_config.json``, if the checkpoint has one.

    Raises:
        UnsupportedModelError: for a method or option that is not known here.
    """
    outer = Fields(config)
    section = outer.section_or_none("quantization_config")
    if section is None and (text := outer.section_or_none("text_config")):
        section = text.section_or_none("quantization_config")
    if section is None and modelopt is not None:
        inner = Fields(modelopt, "hf_quant_config.json").section("quantization")
        return _modelopt(inner)
    if section is None:
        return UNQUANTIZED
    method = section.text("quant_method", absent="modelopt" if section.has("quant_algo") else None)
    reader = _READERS.get(method)
    if reader is None:
        raise UnknownQuantizationError(
            f"a quantization method that is not known here (known: {', '.join(sorted(_READERS))})",
            method=method,
            seen=method,
        )
    found = reader(section)
    if config.get("model_type") in ("deepseek_v3", "deepseek_v2"):
        # The official checkpoints keep block scales and the routing bias in fp32.
        scheme = found.scheme
        if scheme.method == "fp8_block":
            scheme = replace(scheme, scale_dtype="fp32")
        found = replace(found, scheme=scheme, fp32_names=("e_score_correction_bias",))
    return found


def _fp8(section: Fields) -> WeightFormat:
    """Fine-grained FP8 of Qwen and DeepSeek, or one scale for a matrix."""
    static = section.text("activation_scheme", absent="dynamic") == "static"
    ignore = Modules(_names(section, "modules_to_not_convert", "ignored_layers") + _HEAD)
    block = section.naturals("weight_block_size")
    if not block:
        scheme = Scheme("fp8_tensor", bits=8, static_input=static)
        return WeightFormat("fp8_tensor", scheme, LINEARS, ignore)
    if len(block) != 2 or min(block) < 1:
        section.wrong("weight_block_size", "two positive integers")
    scheme = Scheme("fp8_block", bits=8, block=(block[0], block[1]), static_input=static)
    return WeightFormat("fp8_block", scheme, LINEARS, ignore)


def _awq(section: Fields) -> WeightFormat:
    version = section.text("version", absent="gemm").lower()
    if version != "gemm":
        raise UnknownQuantizationError(
            "an AWQ layout that is not known here (known: gemm)", method="awq", seen=version
        )
    ignore = Modules(_names(section, "modules_to_not_convert") + _HEAD)
    scheme = Scheme(
        "awq",
        bits=_bits(section, "bits", "w_bit"),
        group=_group(section, "group_size", "q_group_size"),
        symmetric=not section.flag("zero_point", absent=True),
    )
    return WeightFormat("awq", scheme, LINEARS, ignore)


def _gptq(section: Fields) -> WeightFormat:
    if section.flag("lm_head", absent=False) or section.has("dynamic"):
        raise UnknownQuantizationError(
            "a GPTQ checkpoint with rules of its own per module",
            method="gptq",
            seen=section.values.get("dynamic", "lm_head"),
        )
    ignore = Modules(_names(section, "modules_in_block_to_not_quantize") + _HEAD)
    layout = section.text("checkpoint_format", absent="gptq")
    if layout not in _GPTQ_ZERO_OFFSETS:
        raise UnknownQuantizationError(
            f"a GPTQ layout that is not known here (known: {', '.join(_GPTQ_ZERO_OFFSETS)})",
            method="gptq",
            seen=layout,
        )
    scheme = Scheme(
        "gptq",
        bits=_bits(section, "bits"),
        group=_group(section, "group_size"),
        zero_offset=_GPTQ_ZERO_OFFSETS[layout],
    )
    return WeightFormat("gptq", scheme, LINEARS, ignore)


def _mxfp4(section: Fields) -> WeightFormat:
    """gpt-oss: only the fused experts."""
    scheme = Scheme("mxfp4_blocks", bits=4, group=32, scale_dtype="uint8")
    ignore = Modules(_names(section, "modules_to_not_convert"))
    return WeightFormat("mxfp4", scheme, LINEARS, ignore)


def _compressed_tensors(section: Fields) -> WeightFormat:
    """compressed-tensors with one group of weights on ``Linear`` layers."""
    if section.text("quantization_status", absent="compressed") not in ("compressed", "frozen"):
        section.wrong("quantization_status", "compressed")
    groups = section.section("config_groups")
    schemes = []
    targets: list[str] = []
    for name in groups.values:
        group = groups.section(name)
        targets += group.words("targets") or []
        schemes.append(_group_scheme(group, section.text("format", absent="dense")))
    if len(set(schemes)) != 1 or set(targets) != {"Linear"}:
        raise UnknownQuantizationError(
            "a compressed-tensors checkpoint with several schemes or named targets",
            method="compressed-tensors",
            seen=sorted(targets),
        )
    cache = section.section_or_none("kv_cache_scheme")
    return WeightFormat(
        _NAMES[schemes[0].method],
        schemes[0],
        EVERY_LINEAR,
        Modules(_names(section, "ignore")),
        kv_dtype="fp8" if cache else None,
        kv_scales="compressed" if cache else "",
    )


def _group_scheme(group: Fields, default_format: str) -> Scheme:
    weights = group.section("weights")
    bits, kind = weights.natural("num_bits"), weights.text("type")
    strategy, layout = weights.text("strategy"), group.text("format", absent=default_format)
    inputs = group.section_or_none("input_activations")
    static = inputs is not None and not _dynamic(inputs)
    symmetric = weights.flag("symmetric", absent=True)
    if layout == "nvfp4-pack-quantized":
        # Even dynamic NVFP4 activations keep one global scale for the layer.
        return Scheme("nvfp4", bits=4, group=16, static_input=inputs is not None)
    if layout == "mxfp4-pack-quantized":
        return Scheme("mxfp4", bits=4, group=32, scale_dtype="uint8")
    if layout == "pack-quantized":
        size = weights.natural("group_size") if strategy == "group" else 0
        ordered = weights.has("actorder") and weights.values["actorder"] in ("group", "dynamic")
        return Scheme("packed", bits=bits, group=size, symmetric=symmetric, ordered=ordered)
    if layout in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8:
        method = "ct_fp8" if kind == "float" else "ct_int8"
        block = weights.naturals("block_structure")
        if strategy == "block" and len(block) != 2:
            weights.wrong("block_structure", "two positive integers")
        size = -1 if strategy == "tensor" else 0
        if strategy == "group":
            size = weights.natural("group_size")
        pair = (block[0], block[1]) if strategy == "block" else (0, 0)
        return Scheme(
            method, bits=8, group=size, block=pair, symmetric=symmetric, static_input=static
        )
    raise UnknownQuantizationError(
        "a compressed-tensors layout that is not known here",
        method="compressed-tensors",
        seen=f"{layout}, {bits} bit {kind}",
    )


def _dynamic(inputs: Fields) -> bool:
    """``dynamic`` is true, false or ``"local"`` (NVFP4: static global, dynamic block scales)."""
    return bool(inputs.values.get("dynamic"))


def _modelopt(section: Fields) -> WeightFormat:
    """ModelOpt: one algorithm with exclusions, or one per layer."""
    algorithm = section.text("quant_algo")
    cache = section.text("kv_cache_quant_algo", absent="")
    if not cache and (scheme := section.section_or_none("kv_cache_scheme")):
        cache = (
            f"{scheme.text('type', '').upper().replace('FLOAT', 'FP')}{scheme.natural('num_bits')}"
        )
    kv: dict[str, Any] = {"kv_dtype": "fp8", "kv_scales": "modelopt"} if cache == "FP8" else {}
    if algorithm == "MIXED_PRECISION":
        table = section.section("quantized_layers")
        layers = {name: _algorithm(table.section(name)) for name in table.values}
        return WeightFormat("mixed", roles=EVERY_LINEAR, layers=layers, **kv)
    excluded = Modules(_names(section, "exclude_modules", "ignore"))
    scheme_found = _algorithm(section)
    name = _NAMES[scheme_found.method]
    return WeightFormat(name, scheme_found, EVERY_LINEAR, excluded, **kv)


def _algorithm(section: Fields) -> Scheme:
    algorithm = section.text("quant_algo")
    group = section.natural_or(16, "group_size")
    schemes = {
        "FP8": Scheme("fp8_tensor", bits=8, static_input=True),
        "NVFP4": Scheme("modelopt_nvfp4", bits=4, group=group, static_input=True),
        "W4A16_NVFP4": Scheme("modelopt_nvfp4", bits=4, group=group),
    }
    if algorithm not in schemes:
        section.wrong("quant_algo", f"one of {', '.join(schemes)}, MIXED_PRECISION")
    return schemes[algorithm]


def _names(section: Fields, *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in section.words(key) or ())


def _bits(section: Fields, *keys: str) -> int:
    bits = section.natural(*keys)
    if bits not in (2, 3, 4, 8):
        section.wrong(next(key for key in keys if section.has(key)), "2, 3, 4 or 8")
    return bits


def _group(section: Fields, *keys: str) -> int:
    """Columns that share a scale; -1 in a config means all of a row, 0 here."""
    key = next((key for key in keys if section.has(key)), keys[0])
    return 0 if section.values.get(key) == -1 else section.natural(key)


# GPTQModel's ``FORMAT``: what is added to a stored zero point.
_GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}

_NAMES = {
    "fp8_tensor": "fp8_tensor", "ct_fp8": "compressed_fp8", "ct_int8": "compressed_int8",
    "packed": "compressed_int", "nvfp4": "nvfp4", "modelopt_nvfp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip

_READERS = {
    "fp8": _fp8, "awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4, "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}  # fmt: skip
