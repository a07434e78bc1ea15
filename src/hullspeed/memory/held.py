"""In which form the embedded engine holds a weight, in how many bytes, and how many are read."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from fractions import Fraction

from hullspeed.arch.dtypes import bytes_per_element
from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.model import ModelArch
from hullspeed.arch.schemes import Scheme
from hullspeed.arch.tensors import Role, TensorSpec
from hullspeed.errors import UsageError

MATRICES = (Role.LINEAR, Role.EXPERT, Role.HEAD, Role.EMBEDDING, Role.GATE)
NATIVE_ISA = "avx512_vnni"
"""What the kernels for codes need of a processor."""

# Bytes of a weight by the GGUF type that the kernels take as it is: codes, with the fp16 scales
# (and, with 4 bits, minimums) of blocks of 32.
_NATIVE = {"Q4_0": Fraction(20, 32), "Q4_1": Fraction(20, 32), "Q8_0": Fraction(34, 32)}
_PROJECTIONS = (Role.LINEAR, Role.EXPERT, Role.HEAD)
_BLOCK = 32  # inputs of a scale, and outputs of a panel of packed codes

# FBGEMM packs fp16 in blocks of 512 inputs by 32 outputs (two AVX-512 registers; 16 with AVX2) and
# fills the last ones with zeros (``PackedGemmMatrixB`` in FbgemmPackMatrixB.h; a test measures it).
_FBGEMM_INPUTS, _FBGEMM_OUTPUTS = 512, 32

# Matrices that one product takes together: as codes only if all of them have codes of one width.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_LAST = re.compile(r"\.(\w+)\.weight$")
_GROUPS = {name: group for group in _TOGETHER for name in group}
_DELTA_NET = "linear_attn."  # read as numbers, and rearranged


def held_dtype(arch: ModelArch, weight_dtype: str, isa: Collection[str]) -> str:
    """``weight_dtype``, or ``fp16`` for a ``native`` that has no codes to hold here: on a processor
    without the instructions, or when most of the model's linear weights are stored otherwise.
    """
    if weight_dtype != "native":
        return weight_dtype
    if NATIVE_ISA not in isa:
        return "fp16"
    total = native = 0
    for spec in arch.tensors(extras=False):
        if spec.role in _PROJECTIONS:
            total += spec.elements
            native += spec.elements if _native(arch, spec) else 0
    return "native" if 2 * native > total else "fp16"


def held_bytes(arch: ModelArch, spec: TensorSpec, weight_dtype: str) -> int:
    """Bytes of one weight in memory: a vector or router in fp32, a matrix in ``weight_dtype``
    (``native`` as :func:`held_dtype` gives it), in fp16 with what fills FBGEMM's blocks. A tied
    output head is a copy of its own, but in fp32 the table itself.

    Raises:
        UsageError: for a type in which no weights are held.
    """
    return _bytes(arch, spec, weight_dtype, filled=True)


def read_bytes(arch: ModelArch, spec: TensorSpec, weight_dtype: str) -> int:
    """:func:`held_bytes` without what only fills blocks: a product does not read it."""
    return _bytes(arch, spec, weight_dtype, filled=False)


def _bytes(arch: ModelArch, spec: TensorSpec, weight_dtype: str, *, filled: bool) -> int:
    if weight_dtype not in ("native", "fp16", "fp32"):
        raise UsageError("weights are held as native, fp16 or fp32", seen=weight_dtype)
    router = spec.role is Role.GATE and _DELTA_NET not in spec.name
    if spec.role not in MATRICES or router:
        return 4 * spec.elements
    if spec.role is Role.EMBEDDING:
        table = math.ceil(_plain(weight_dtype) * spec.elements)
        if not arch.tied_embeddings or weight_dtype == "fp32":
            return table
        return table + _packed(arch, spec, weight_dtype, filled=filled)
    return _packed(arch, spec, weight_dtype, filled=filled)


def _plain(weight_dtype: str) -> Fraction:
    return bytes_per_element("fp16" if weight_dtype == "native" else weight_dtype)


def _packed(arch: ModelArch, spec: TensorSpec, weight_dtype: str, *, filled: bool) -> int:
    """Of a matrix, or one for each expert, packed for products."""
    codes = _native(arch, spec) if weight_dtype == "native" else None
    if codes is not None:
        return math.ceil(codes * spec.elements)
    if weight_dtype == "fp32" or not filled:
        return math.ceil(_plain(weight_dtype) * spec.elements)
    *experts, outputs, inputs = spec.shape
    if experts and any(getattr(layer.mlp, "transposed", False) for layer in arch.layers):
        outputs, inputs = inputs, outputs
    outputs += -outputs % _FBGEMM_OUTPUTS
    inputs += -inputs % _FBGEMM_INPUTS
    return math.prod(experts) * outputs * inputs * 2


def held_as_codes(scheme: Scheme) -> str:
    """The GGUF type whose blocks hold a safetensors scheme without loss, or nothing.

    Symmetric integers whose groups are multiples of 32 inputs; scales are 16-bit numbers that fp16
    holds but for the smallest (a weight with one of those is held in fp16).
    """
    whole_rows = scheme.method == "ct_int8" and not scheme.block[0] and scheme.group == 0
    grouped = scheme.method == "packed" and scheme.group % 32 == 0
    if not (whole_rows or grouped) or not scheme.symmetric or scheme.ordered:
        return ""
    return {4: "Q4_1", 8: "Q8_0"}.get(scheme.bits, "")


def _native(arch: ModelArch, spec: TensorSpec) -> Fraction | None:
    """Bytes of each weight of a matrix that is held as codes."""
    if len(spec.shape) != 2 or spec.role is Role.GATE or _DELTA_NET in spec.name:
        return None
    last = _LAST.search(spec.name)
    group = _GROUPS.get(last[1], ()) if last else ()
    if "q_proj" in group and _gated(arch):
        return None
    names = [spec.name]
    if last:
        names += [f"{spec.name[: last.start(1)]}{name}.weight" for name in group if name != last[1]]
    kinds = [_codes(arch, spec._replace(name=name)) for name in names]
    # Gate and up have the same number of rows; heads have a multiple of 16.
    rows = spec.shape[0] * (len(names) if "q_proj" not in group else 1)
    if rows % _BLOCK or spec.shape[1] % _BLOCK or len({kind[:2] for kind in kinds}) > 1:
        return None
    return _NATIVE.get(kinds[0])


def _gated(arch: ModelArch) -> bool:
    """Whether queries come with an output gate, whose rows are sorted out as numbers."""
    return any(
        isinstance(layer.mixer, FullAttention) and layer.mixer.output_gate for layer in arch.layers
    )


def _codes(arch: ModelArch, spec: TensorSpec) -> str:
    """The GGUF type of the codes that a matrix could be held in, or nothing."""
    types = arch.weight_format.stored_types
    if types is not None:
        kind = types.get(spec.name, "")
        return kind if kind in _NATIVE else ""
    scheme = arch.weight_format.scheme_of(spec)
    # Scales of 32 bits are hardly ever numbers that fp16 holds.
    return "" if (scheme.scale_dtype or arch.dtype) == "fp32" else held_as_codes(scheme)
