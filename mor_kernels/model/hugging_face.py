"""What a model's folder has so that Hugging Face's transformers can load it; see :mod:`mor_kernels.hf`."""

from __future__ import annotations

import os
from pathlib import Path

from ..files import write_atomic, write_json, write_text

MODEL_TYPE = "mor"
LOADER = "modeling_mor.py"
_LOADER_TEXT = '''"""For transformers: AutoModelForCausalLM.from_pretrained(this folder, trust_remote_code=True)."""
from mor_kernels.hf import MoRConfig, MoRForCausalLM  # noqa: F401  (pip install "mor-kernels[hf]")
'''


def describe() -> dict:
    """Entries of ``config.json`` beside a model's fields."""
    module = LOADER.removesuffix(".py")
    classes = {"AutoConfig": f"{module}.MoRConfig", "AutoModelForCausalLM": f"{module}.MoRForCausalLM"}
    return {"model_type": MODEL_TYPE, "architectures": ["MoRForCausalLM"], "auto_map": classes}


def write_loader(folder: str | os.PathLike) -> None:
    """The module by which transformers finds :mod:`mor_kernels.hf`."""
    write_text(Path(folder) / LOADER, _LOADER_TEXT)


def write_tokenizer(folder: str | os.PathLike, tokenizer: Path, separator: str, separator_id: int, length: int) -> None:
    """A tokenizer for ``AutoTokenizer``, and for ``generate()`` the token that ends a text.

    tokenizer: a ``tokenizer.json``; separator: its token between documents, with its id; length: the model's context.
    """
    folder = Path(folder)
    write_atomic(folder / "tokenizer.json", lambda file: file.write(tokenizer.read_bytes()))
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": separator, "eos_token": separator,
        "model_max_length": length, "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), separator_id)
    write_json(folder / "generation_config.json", ends)
