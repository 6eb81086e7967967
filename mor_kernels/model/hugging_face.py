"""What a model's folder has so that Hugging Face's transformers can load it; see :mod:`mor_kernels.hf`."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..files import write_atomic

MODEL_TYPE = "mor"
_LOADER = "modeling_mor"
_LOADER_TEXT = '''"""For transformers: AutoModelForCausalLM.from_pretrained(this folder, trust_remote_code=True)."""
from mor_kernels.hf import MoRConfig, MoRForCausalLM  # noqa: F401  (pip install "mor-kernels[hf]")
'''


def describe() -> dict:
    """Entries of ``config.json`` beside a model's fields."""
    classes = {"AutoConfig": f"{_LOADER}.MoRConfig", "AutoModelForCausalLM": f"{_LOADER}.MoRForCausalLM"}
    return {"model_type": MODEL_TYPE, "architectures": ["MoRForCausalLM"], "auto_map": classes}


def write_loader(folder: str | os.PathLike) -> None:
    write_atomic(Path(folder) / f"{_LOADER}.py", lambda file: file.write(_LOADER_TEXT.encode()))


def _write(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def write_tokenizer(folder: str | os.PathLike, tokenizer: Path, separator: str, separator_id: int, length: int) -> None:
    """A tokenizer for ``AutoTokenizer``, and for ``generate()`` the token that ends a text.

    tokenizer: a ``tokenizer.json``; separator: its token between documents, with its id; length: the model's context.
    """
    folder = Path(folder)
    write_atomic(folder / "tokenizer.json", lambda file: file.write(tokenizer.read_bytes()))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": separator, "eos_token": separator,
              "model_max_length": length, "model_input_names": ["input_ids", "attention_mask"],
              "clean_up_tokenization_spaces": False}  # fmt: skip
    ends = {"bos_token_id": separator_id, "eos_token_id": separator_id, "pad_token_id": separator_id}
    for name, found in (("tokenizer_config", fields), ("generation_config", ends)):
        content = (json.dumps(found, indent=1) + "\n").encode()
        write_atomic(folder / f"{name}.json", partial(_write, content))
