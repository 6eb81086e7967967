"""Operators, models, training and decoding for Mixture-of-Recursions. Imports neither Triton nor a CUDA extension."""

__version__ = "0.1.0"
