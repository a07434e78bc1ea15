"""Headers: what the files really hold, compared with what the architecture says they should."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hullspeed.arch.mlps import MoeMlp
from hullspeed.arch.model import Extra, Layer, ModelArch
from hullspeed.arch.quant import stored_parts
from hullspeed.arch.safetensors import StoredTensor
from hullspeed.arch.tensors import Role, TensorSpec
from hullspeed.errors import CorruptFileError

# safetensors' element types by our names
DTYPES = {
    "BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64", "F8_E4M3": "fp8",
    "F8_E5M2": "fp8", "F8_E8M0": "uint8", "I8": "int8", "U8": "uint8", "I16": "int16",
    "I32": "int32", "U32": "int32", "I64": "int64", "U64": "int64", "BOOL": "bool",
}  # fmt: skip

# Buffers that old checkpoints carry and every loader drops.
_DROPPED = re.compile(r"\.(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias|position_ids)$")
_SHOWN = 3

# Scales of activations and of the cache: exporters leave them out where they are one.
OPTIONAL_PARTS = (".k_scale", ".v_scale", ".input_scale", ".input_global_scale", ".weight_g_idx")


def with_headers(arch: ModelArch, headers: Mapping[str, StoredTensor]) -> ModelArch:
    """The architecture with the bytes that the files' headers state.

    A part beside the decoder (vision tower, MTP layer) that the files leave out is dropped; a
    head that they leave out is tied. Tensors that the architecture does not name become the
    extra ``"unlisted"``, so that no byte is lost.

    Raises:
        CorruptFileError: if a weight is missing or has another shape.
    """
    names = renamed(arch, headers)
    arch = _with_expert_layout(arch, names)
    if not arch.tied_embeddings and f"{arch.head_name}.weight" not in names:
        arch = replace(arch, tied_embeddings=True)
    modules = {_module(name) for name in names}
    arch = replace(arch, extras=tuple(e for e in arch.extras if _present(e, modules)))
    sizes: dict[str, int] = {}
    used: set[str] = set()
    problems: list[str] = []
    for spec, part in stored_parts(arch):
        found = names.get(part.name)
        if found is None:
            if not part.name.endswith(OPTIONAL_PARTS):
                problems.append(f"{part.name} is missing")
            continue
        used.add(part.name)
        scalars = math.prod(part.shape) == math.prod(found.shape) == 1
        if found.shape != part.shape and not scalars:
            problems.append(f"{part.name} has shape {found.shape}, expected {part.shape}")
        sizes[spec.name] = sizes.get(spec.name, 0) + found.nbytes
    _refuse(problems)
    unlisted = [t for name, t in names.items() if name not in used and not _DROPPED.search(name)]
    if arch.tied_embeddings:
        # Some checkpoints of tied models store the head a second time.
        unlisted = [t for t in unlisted if t.name != f"{arch.head_name}.weight"]
    if unlisted:
        extra = _unlisted(unlisted)
        arch = replace(arch, extras=(*arch.extras, extra))
        sizes |= {tensor.name: tensor.nbytes for tensor in unlisted}
    format_ = replace(arch.weight_format, stored_bytes=sizes)
    return replace(arch, weight_format=format_, dtype=_dtype(arch, names))


def _with_expert_layout(arch: ModelArch, names: Mapping[str, StoredTensor]) -> ModelArch:
    """Experts one by one or fused, as the files have them: transformers 5 writes either."""

    def as_stored(layer: Layer, below: str) -> Layer:
        mlp = layer.mlp
        if not isinstance(mlp, MoeMlp) or mlp.transposed or len(mlp.names) != 3:
            return layer
        root = f"{below}{mlp.module}.experts."
        fused = f"{root}gate_up_proj" in names
        single = any(name.startswith(f"{root}0.{mlp.names[0]}.") for name in names)
        if fused in (single, mlp.fused_experts):
            return layer
        return replace(layer, mlp=replace(mlp, fused_experts=fused))

    def extra_as_stored(extra: Extra) -> Extra:
        for i, layer in enumerate(extra.layers):
            below = f"{extra.name}.layers.{i}."
            stored = as_stored(layer, below)
            if stored is not layer:
                rest = (spec for spec in extra.tensors if not spec.name.startswith(below))
                own = (spec.under(below) for spec in stored.tensors(arch.hidden))
                layers = (*extra.layers[:i], stored, *extra.layers[i + 1 :])
                extra = replace(extra, layers=layers, tensors=(*rest, *own))
        return extra

    if not any(isinstance(layer.mlp, MoeMlp) for layer in arch.layers):
        return arch
    below = f"{arch.prefix}layers."
    layers = (as_stored(layer, f"{below}{i}.") for i, layer in enumerate(arch.layers))
    return replace(
        arch, layers=tuple(layers), extras=tuple(extra_as_stored(e) for e in arch.extras)
    )


def with_module_bytes(arch: ModelArch, headers: Mapping[str, StoredTensor]) -> ModelArch:
    """The architecture with each module's bytes, whatever tensors its weights are made of.

    For quantizations whose layout is not known here: shapes of plain weights are still compared.

    Raises:
        CorruptFileError: if a module has no tensor at all, or a plain weight another shape.
    """
    names = renamed(arch, headers)
    modules: dict[str, list[StoredTensor]] = {}
    for name, tensor in names.items():
        modules.setdefault(_module(name), []).append(tensor)
    if not arch.tied_embeddings and arch.head_name not in modules:
        arch = replace(arch, tied_embeddings=True)
    present = (e for e in arch.extras if any(_module(t.name) in modules for t in e.tensors))
    arch = replace(arch, extras=tuple(present))
    sizes: dict[str, int] = {}
    used: set[str] = set()
    problems: list[str] = []
    for spec in arch.tensors():
        module, _, last = spec.name.rpartition(".")
        own = names.get(spec.name)
        if own is not None and own.dtype in _PLAIN and own.shape != spec.shape:
            problems.append(f"{spec.name} has shape {own.shape}, expected {spec.shape}")
        held = modules.get(module, []) if last == "weight" else [own] if own else []
        if not held:
            problems.append(f"{spec.name} is missing")
        for tensor in held:
            if tensor.name not in used and not tensor.name.endswith(".bias"):
                used.add(tensor.name)
                sizes[spec.name] = sizes.get(spec.name, 0) + tensor.nbytes
        if last == "bias" and own:
            used.add(own.name)
            sizes[spec.name] = own.nbytes
    _refuse(problems)
    unlisted = [t for t in names.values() if t.name not in used and not _DROPPED.search(t.name)]
    sizes |= {tensor.name: tensor.nbytes for tensor in unlisted}
    extras = (*arch.extras, *((_unlisted(unlisted),) if unlisted else ()))
    stored = replace(arch.weight_format, name=arch.quant, stored_bytes=sizes)
    return replace(arch, weight_format=stored, extras=extras, dtype=_dtype(arch, names))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


_PLAIN = frozenset({"BF16", "F16", "F32"})


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CorruptFileError(
            f"the weights do not fit config.json in {len(problems)} tensors",
            seen="; ".join(problems[:_SHOWN]),
            fix="config.json and weights must be of one revision; fetch the model again",
        )


def renamed(arch: ModelArch, headers: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The headers under the names of the architecture.

    Text-only copies of multimodal models use ``model.``; checkpoints saved by transformers 5
    use ``model.language_model.`` for the decoder and keep the tower below ``model.``.
    """
    embedding = f"{arch.prefix}{arch.embedding_name}.weight"
    if embedding in headers:
        return headers
    for prefix in ("model.language_model.", "model.", "language_model.model.", "backbone."):
        if f"{prefix}{arch.embedding_name}.weight" in headers:
            return {_rename(name, prefix, arch.prefix): t for name, t in headers.items()}
    return headers


def _rename(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _present(extra: Extra, modules: Collection[str]) -> bool:
    """Whether the files hold any of an extra's modules, in whatever format."""
    return any(_module(spec.name) in modules for spec in extra.tensors)


def _unlisted(tensors: Iterable[StoredTensor]) -> Extra:
    specs = tuple(TensorSpec(t.name, t.shape, Role.VECTOR) for t in tensors)
    return Extra(name="unlisted", tensors=specs)


def _dtype(arch: ModelArch, names: Mapping[str, StoredTensor]) -> str:
    """The type that the embedding is really stored in."""
    stored = names[f"{arch.prefix}{arch.embedding_name}.weight"].dtype
    kind = DTYPES.get(stored, arch.dtype)
    return kind if kind in ("bf16", "fp16", "fp32") else arch.dtype
