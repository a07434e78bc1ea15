"""ggml's tensor types: how many elements a block has and how many bytes it takes.

Source of the table: ``ggml.h`` (``enum ggml_type``) and ``ggml-common.h`` (block structs), as
mirrored by ``gguf.constants.GGML_QUANT_SIZES`` of gguf 0.19.0; a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """One tensor type of a GGUF file.

    Attributes:
        code: Number stored in the file.
        block_elements: Elements of a row that are stored together; 1 for plain types.
        block_bytes: Bytes of such a block, its scales included.
    """

    name: str
    code: int
    block_elements: int
    block_bytes: int

    @property
    def quantized(self) -> bool:
        """Whether elements share a block with scales."""
        return self.block_elements > 1

    def nbytes(self, elements: int) -> int:
        """Bytes of ``elements`` values, which must be whole blocks.

        Raises:
            ValueError: if they are not.
        """
        blocks, rest = divmod(elements, self.block_elements)
        if rest:
            raise ValueError(f"{elements} elements are not whole blocks of {self.block_elements}")
        return blocks * self.block_bytes


_ROWS = (
    ("F32", 0, 1, 4), ("F16", 1, 1, 2), ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34), ("Q8_1", 9, 32, 40),
    ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210), ("Q8_K", 15, 256, 292), ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74), ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18), ("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82),
    ("IQ4_XS", 23, 256, 136), ("I8", 24, 1, 1), ("I16", 25, 1, 2), ("I32", 26, 1, 4),
    ("I64", 27, 1, 8), ("F64", 28, 1, 8), ("IQ1_M", 29, 256, 56), ("BF16", 30, 1, 2),
    ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66), ("MXFP4", 39, 32, 17), ("NVFP4", 40, 64, 36),
    ("Q1_0", 41, 128, 18),
)  # fmt: skip

BY_CODE: dict[int, GgmlType] = {row[1]: GgmlType(*row) for row in _ROWS}
BY_NAME: dict[str, GgmlType] = {kind.name: kind for kind in BY_CODE.values()}
