"""Decoding: continuous depth-wise batching over a ragged paged cache."""

from .engine import Completion, Engine, Event, QueueFull
from .sampler import SamplingParams
from .text import Tokenizer

__all__ = ["Completion", "Engine", "Event", "QueueFull", "SamplingParams", "Tokenizer"]
