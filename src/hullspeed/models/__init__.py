"""Torch modules and weight loading."""
