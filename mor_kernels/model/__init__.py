"""The model: configuration, layers, and the assembled Mixture-of-Recursions Transformer."""

from .config import MoRConfig
from .model import MoR, MoROutput

__all__ = ["MoR", "MoRConfig", "MoROutput"]
