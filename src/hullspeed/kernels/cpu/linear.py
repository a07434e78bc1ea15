"""Linear layers: FBGEMM with fp16 weights; in float32 MKL, and our own kernel for few rows.

The only file that knows torch's quantized operators (they are on torch's deprecation path).
FBGEMM keeps activations and sums in float32 and beats MKL at every size while reading half the
bytes; rounding weights to fp16 costs SmolLM2-135M a KL divergence of 3e-6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hullspeed.errors import UnsupportedModelError
from hullspeed.kernels.cpu import thin_gemm

# Below so many multiply-adds one thread is done before a second is awake.
_PARALLEL_PRODUCTS = 300_000
_FP16_MAX = 65504.0


class Fp16Linear:
    """``x @ weight.T + bias`` with the weight in fp16, packed for FBGEMM.

    Raises:
        UnsupportedModelError: if a weight is beyond the range of fp16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        low, high = torch.aminmax(weight)
        if not max(-float(low), float(high)) <= _FP16_MAX:
            raise UnsupportedModelError(
                "a weight is beyond the range of fp16",
                seen=(float(low), float(high)),
                fix='use weight_dtype="fp32"',
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self._apply: Any = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``."""
        y: Tensor = self._apply(x, self._packed)
        return y


class Fp32Linear:
    """``x @ weight.T + bias`` as it stands, few rows by our own kernel.

    Args:
        threads: Among which the kernel shares a product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, threads: int = 1) -> None:
        self._weight, self._bias, self._threads = weight.contiguous(), bias, threads
        self._rows = self._weight.numpy()

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``."""
        n, weight = x.shape[0], self._rows
        if n > thin_gemm.MAX_ROWS:
            return F.linear(x, self._weight, self._bias)
        out = torch.empty(n, weight.shape[0])
        args = x.contiguous().numpy(), weight, out.numpy()
        if self._threads > 1 and n * weight.size >= _PARALLEL_PRODUCTS:
            thin_gemm.linear_parallel(*args, self._threads)
        else:
            thin_gemm.linear(*args, 0, weight.shape[0])
        return out if self._bias is None else out.add_(self._bias)
