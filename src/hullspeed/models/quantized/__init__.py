"""Quantized weights as codes, scales and zero points, whatever format stored them."""

from hullspeed.models.quantized.tensor import QuantizedTensor

__all__ = ["QuantizedTensor"]
