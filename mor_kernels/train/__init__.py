"""Training: data preparation, the loop and its checkpoints."""

from .checkpoint import latest
from .config import TrainConfig
from .data import Loader, Tokens, load_tokenizer, prepare, train_tokenizer, unigram_entropy
from .loop import Trainer, train
from .metrics import plot_curves

__all__ = ["Loader", "Tokens", "TrainConfig", "Trainer", "latest", "load_tokenizer", "plot_curves", "prepare", "train",
           "train_tokenizer", "unigram_entropy"]
