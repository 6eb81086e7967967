"""Training: data preparation, the loop and its checkpoints."""

from .checkpoint import latest
from .config import TrainConfig
from .data import Loader, Tokens, prepare, unigram_entropy
from .loop import Trainer, train
from .metrics import plot_curves
from .text import load_tokenizer, train_tokenizer

__all__ = ["Loader", "Tokens", "TrainConfig", "Trainer", "latest", "load_tokenizer", "plot_curves", "prepare", "train",
           "train_tokenizer", "unigram_entropy"]
