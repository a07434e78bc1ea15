"""In which form the embedded engine holds a weight, and in how many bytes."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

from hullspeed.arch.dtypes import bytes_per_element
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
_PROJECTIONS = (Role.LINEAR, Role.HEAD)


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
    """Bytes of one weight: a vector in fp32, a matrix in ``weight_dtype`` (``native`` as
    :func:`held_dtype` gives it); a tied output head is a copy of its own.

    Raises:
        UsageError: for a type in which no weights are held.
    """
    if weight_dtype not in ("native", "fp16", "fp32"):
        raise UsageError("weights are held as native, fp16 or fp32", seen=weight_dtype)
    if spec.role not in MATRICES:
        return 4 * spec.elements
    plain = bytes_per_element("fp16" if weight_dtype == "native" else weight_dtype)
    codes = _native(arch, spec) if weight_dtype == "native" else None
    if spec.role is Role.EMBEDDING:
        copy = (codes or plain) if arch.tied_embeddings else Fraction(0)
        size = plain + copy
    else:
        size = codes or plain
    return -int(-size * spec.elements // 1)


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
    if len(spec.shape) != 2 or spec.role is Role.EXPERT:
        return None
    types = arch.weight_format.stored_types
    if types is not None:
        return _NATIVE.get(types.get(spec.name, ""))
    kind = held_as_codes(arch.weight_format.scheme_of(spec))
    return _NATIVE.get(kind) if spec.shape[1] % 32 == 0 else None
