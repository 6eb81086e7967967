"""The model as Hugging Face's transformers knows one: ``AutoModelForCausalLM``, ``generate()``, ``Trainer``.

Importing this registers both classes. A folder that :meth:`.MoR.save_pretrained` or ``save_pretrained`` here wrote can
also be loaded without the import, with ``trust_remote_code=True``: it has a module of two lines that makes it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

try:
    from huggingface_hub import snapshot_download
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        GenerationMixin,
        PretrainedConfig,
        PreTrainedModel,
        TrainerCallback,
    )
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.utils import ModelOutput
except ImportError as error:
    raise ImportError(f"transformers: expected it to be installed (pip install mor-kernels[hf]): {error}") from error

from .decode import Engine, SamplingParams
from .files import read_json
from .model import MoR
from .model import MoRConfig as Config
from .model.config import fail
from .model.convert import join, read_dense, separate
from .model.hugging_face import MODEL_TYPE, describe, write_loader

_FIELDS = tuple(field.name for field in dataclasses.fields(Config))

# Fields of a GenerationConfig that generate() follows; of the others it takes those values alone that change nothing.
HONOURED = frozenset({
    "max_length", "max_new_tokens", "max_time", "stop_strings", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "num_return_sequences", "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id",
})  # fmt: skip
# Where "nothing is changed" isn't None, False or what transformers calls the default
_NEUTRAL = {"use_cache": (True,), "renormalize_logits": (True, False), "disable_compile": (True, False),
            "early_stopping": (True, False)}  # fmt: skip
# Arguments of transformers' from_pretrained without a meaning here, which callers pass all the same
_WITHOUT_EFFECT = {"trust_remote_code", "low_cpu_mem_usage", "use_safetensors", "weights_only", "code_revision",
                   "attn_implementation", "adapter_kwargs"}  # fmt: skip
# Arguments of forward() that ask for what there isn't
_REFUSED = {"position_ids": "a token's position is its rank among those that attention_mask keeps",
            "past_key_values": "generate() has a cache of its own", "use_cache": "generate() has a cache of its own",
            "inputs_embeds": "tokens are what is embedded here", "output_attentions": "no kernel keeps them",
            "output_hidden_states": "tokens take different numbers of layers"}  # fmt: skip
_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download")


class MoRConfig(PretrainedConfig):
    """:class:`mor_kernels.model.MoRConfig` as a configuration of transformers: the same fields, the same checks."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["depths", "losses", "metrics"]

    def __init__(self, **fields):
        own = Config(**{name: fields.pop(name) for name in _FIELDS if name in fields})
        super().__init__(**fields)
        for name, value in own.to_dict().items():
            setattr(self, name, value)

    @classmethod
    def of(cls, config: Config, **fields) -> MoRConfig:
        """A model's configuration in this form; ``fields`` are transformers' own."""
        return cls(**config.to_dict(), **fields)

    def to_mor(self) -> Config:
        """The model's configuration; a ValueError names a field that was changed to what it can't be."""
        return Config(**{name: getattr(self, name) for name in _FIELDS})

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As transformers does, and what lets it load the folder. A model's ``save_pretrained`` calls this after it has
        noted what was there before, so that all of it goes to the Hub."""
        for name, value in describe().items():
            if name != "model_type":  # which the class says
                setattr(self, name, value)
        super().save_pretrained(save_directory, *args, **kwargs)
        write_loader(save_directory)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Nothing: transformers would copy this module into folders, where ``write_loader`` puts two lines."""


@dataclass
class MoRCausalLMOutput(ModelOutput):
    """What :class:`MoRForCausalLM` returns; see :class:`mor_kernels.model.MoROutput`."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    depths: torch.Tensor | None = None  # (B, T) int64
    losses: dict[str, torch.Tensor] | None = None  # without coefficients
    metrics: dict[str, torch.Tensor] | None = None


class MoRForCausalLM(PreTrainedModel, GenerationMixin):
    """A :class:`mor_kernels.model.MoR`, which is ``self.model``, with the interface of transformers.

    In training mode expert-choice looks at the whole sequence, in ``eval()`` it routes causally. Where the model's
    configuration warms capacities up or balances without a loss, training takes a :class:`MoRCallback`.
    """

    config_class = MoRConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # The loss is a mean over the batch's tokens, and router losses are means as well: Trainer averages over what it
    # accumulates.
    accepts_loss_kwargs = False

    def __init__(self, config: MoRConfig):
        super().__init__(config)
        self.model = MoR(config.to_mor())
        self.optimizer_step: int | None = None  # optimizer steps done, set by MoRCallback
        self.engine_options: dict[str, Any] = {}  # further arguments of the Engine that generate() makes
        self._engine: Engine | None = None
        self._engine_of: tuple = ()
        self._step_depths: list[torch.Tensor] = []  # of the optimizer step under way, for loss-free balancing
        self.register_load_state_dict_pre_hook(_from_file_names)
        self.post_init()

    def _init_weights(self, module):
        """Nothing: MoR has initialised itself."""

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.model.lm_head

    def set_output_embeddings(self, new_embeddings):
        self.model.lm_head = new_embeddings

    def tie_weights(self, *args, **kwargs):
        """Nothing: a tied head is the embedding itself."""

    def resize_token_embeddings(self, *args, **kwargs):
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = dataclasses.replace(self.model.config, vocab_size=self.config.vocab_size)
        return embeddings

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModelForCausalLM"):
        """See :meth:`MoRConfig.register_for_auto_class`."""

    # Recomputation is the model's own; both names, the older and the newer

    def activation_checkpointing_enable(self, *args, **kwargs):
        self.model.activation_checkpointing = True

    def activation_checkpointing_disable(self):
        self.model.activation_checkpointing = False

    gradient_checkpointing_enable, gradient_checkpointing_disable = (
        activation_checkpointing_enable, activation_checkpointing_disable,
    )  # fmt: skip

    @property
    def is_activation_checkpointing(self) -> bool:
        return self.model.activation_checkpointing

    is_gradient_checkpointing = is_activation_checkpointing

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        mode: str | None = None,
        skip_logits: bool | None = None,
        position_ids: None = None,
        past_key_values: None = None,
        inputs_embeds: None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MoRCausalLMOutput | tuple:
        """Loss, logits and depths of a batch, see :meth:`.MoR.forward`.

        Args:
            input_ids: (B, T) integers.
            attention_mask: (B, T), 0 at padding, which may be on either side.
            labels: (B, T) int64, as transformers has them: ``input_ids`` themselves, moved on here; -100 for none.
            mode: "topk" or "threshold", see :meth:`.MoR.forward`.
            skip_logits: whether to compute the loss without returning logits, which saves most of a head's memory; by
                default where ``labels`` are given in training mode.
            return_dict: False returns a tuple.

        The others are refused, but for the values that ask for nothing.

        Returns:
            :class:`MoRCausalLMOutput`.

        Raises:
            ValueError: an argument doesn't fit, or isn't served; the message names it.
        """
        refused = {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds,
                   "use_cache": use_cache, "output_attentions": output_attentions,
                   "output_hidden_states": output_hidden_states}  # fmt: skip
        for name, value in refused.items():
            if value is not None and value is not False:
                fail(name, f"None, since {_REFUSED[name]}", value if value is True else type(value).__name__)
        if input_ids is None:
            fail("input_ids", "token ids of shape (B, T)", None)
        targets = None
        if labels is not None:
            targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        ks = None
        if self.training and _needs_callback(self.model.config):
            if self.optimizer_step is None:
                fail("optimizer_step", "that MoRCallback() is among Trainer's callbacks, or sets it, since "
                      "cap_warmup_steps or balance='loss_free' depend on optimizer steps", None)  # fmt: skip
            if self.model.config.router == "expert_choice" and mode != "threshold":
                ks = self.model.kept(input_ids.shape[1], self.optimizer_step)
        if skip_logits is None:
            skip_logits = self.training and labels is not None
        out = self.model(
            input_ids, targets, attention_mask=attention_mask, ks=ks, mode=mode, logits=not skip_logits
        )
        if self.training and self.model.router_bias is not None:
            self._step_depths.append(out.depths.detach().flatten())
        output = MoRCausalLMOutput(out.loss, out.logits, out.depths, out.losses, out.metrics)
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    # Files

    def save_pretrained(self, save_directory, *args, state_dict=None, max_shard_size="50GB", **kwargs):
        """As transformers does, in the format of :meth:`.MoR.save_pretrained`, which can load it too."""
        state = self.state_dict() if state_dict is None else state_dict
        state = separate({name.removeprefix("model."): tensor for name, tensor in state.items()}, self.model.config)
        super().save_pretrained(save_directory, *args, state_dict=state, max_shard_size=max_shard_size, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs) -> MoRForCausalLM:
        """A model from a folder, or from the Hub, that either library saved; in evaluation mode.

        Args:
            config: in place of the folder's.
            kwargs: ``dtype`` (or ``torch_dtype``; the default, "auto", is the file's), ``device_map`` ("auto", or one
                device), ``subfolder``, ``output_loading_info``, those of the Hub (``revision``, ``token``,
                ``cache_dir``, ``local_files_only``, ``force_download``) and fields of the configuration.

        Raises:
            ValueError: a file is missing or of another model, or an argument isn't one of these.
        """
        hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
        dtype, older = kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
        dtype = dtype or older or "auto"
        device = _one_device(kwargs.pop("device_map", None))
        subfolder = kwargs.pop("subfolder", None) or ""
        with_info, generation = kwargs.pop("output_loading_info", False), kwargs.pop("generation_config", None)
        folder = os.fspath(pretrained_model_name_or_path)
        if not os.path.isdir(folder):
            pattern = os.path.join(subfolder, "*")
            folder = snapshot_download(folder, allow_patterns=[f"{pattern}.json", f"{pattern}.safetensors"],
                                       **{name: value for name, value in hub.items() if value is not None})  # fmt: skip
        folder = os.path.join(folder, subfolder) if subfolder else folder
        if not isinstance(config, PretrainedConfig):
            config, kwargs = _read(MoRConfig, config or folder, "config.json", return_unused_kwargs=True, **kwargs)
        for name, value in kwargs.items():
            if value is not None and name not in _WITHOUT_EFFECT and not name.startswith("_"):
                fail(name, "an argument that loads this model in another way, or a field of its configuration", value)
        state = read_dense(folder)
        MoR.check_state(config.to_mor(), state, folder)
        model = cls(config, *args)
        model.model.load_checked(state, folder)
        if dtype == "auto":
            dtype = state["embed_tokens.weight"].dtype
        model.to(device=device, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        model.name_or_path = model.config.name_or_path = os.fspath(pretrained_model_name_or_path)
        if generation is not None:
            model.generation_config = generation
        elif os.path.exists(os.path.join(folder, "generation_config.json")):
            model.generation_config = _read(GenerationConfig, folder, "generation_config.json")
        model.eval()
        info: dict[str, list[Any]]
        info = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return (model, info) if with_info else model  # type: ignore[return-value]  # as transformers has it

    # Generation

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor=None,
        stopping_criteria=None,
        streamer=None,
        *,
        tokenizer=None,
        **kwargs,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Continue each row by :class:`.Engine`, all at once.

        Args:
            inputs: (or ``input_ids``) (B, T) tokens; padding, on either side, is where ``attention_mask`` is 0 or, if
                that isn't given, where there are ``pad_token_id`` that isn't an ``eos_token_id``.
            generation_config: and ``kwargs`` that override it. The fields in ``HONOURED`` are followed; another is
                refused by name, unless it has a value that changes nothing.
            stopping_criteria: called after each token with the rows so far, padded, and ``scores=None``; rows run ahead
                of it by some tokens, which are dropped.
            streamer: gets the prompt and then each token; for one row.
            tokenizer: for ``stop_strings``.

        Returns:
            (B * num_return_sequences, T + new) int64, each row's prompt as it came, then its tokens, the one that ended
            it included, then ``pad_token_id``. Sampling is seeded by torch's generator on the CPU.
        """
        config, extra = self._prepare_generation_config(generation_config, **kwargs)
        input_ids, mask = extra.pop("input_ids", None), extra.pop("attention_mask", None)
        if inputs is not None and input_ids is not None:
            fail("input_ids", "None beside inputs", "both")
        input_ids = inputs if input_ids is None else input_ids
        if logits_processor:
            fail("logits_processor", "none", [type(p).__name__ for p in logits_processor])
        for name, value in extra.items():
            if value is not None and value is not False:
                fail(name, "nothing, since generate() has no such argument here", value)
        drawn, choices = self._sampling(config), config.num_return_sequences or 1
        stops = config.eos_token_id
        stops = [] if stops is None else [int(stop) for stop in torch.as_tensor(stops).flatten()]
        input_ids, mask = self._real_tokens(input_ids, mask, config, stops)
        limit = config.max_new_tokens
        if limit is None:
            # transformers' default, 20, is of new tokens; a length that somebody chose has the prompt's within it
            lengths = [c.max_length for c in (generation_config, self.generation_config) if c is not None]
            chosen = kwargs.get("max_length") is not None or any(length not in (None, 20) for length in lengths)
            limit = config.max_length - input_ids.shape[1] * chosen
        if limit < 1:
            fail("max_length", f"more than the {input_ids.shape[1]} tokens of the prompt", config.max_length)
        words = config.stop_strings
        words = [words] if isinstance(words, str) else list(words or ())
        if words and tokenizer is None:
            fail("tokenizer", "one, for stop_strings", None)
        if streamer is not None and len(input_ids) * choices != 1:
            fail("streamer", "one row", len(input_ids) * choices)

        input_ids, mask = (t.repeat_interleave(choices, 0) for t in (input_ids, mask.bool()))
        prompts = [ids[real].tolist() for ids, real in zip(input_ids.cpu(), mask.cpu())]
        params = SamplingParams(max_tokens=limit, stop_token_ids=stops, stop=words, **drawn)
        engine = self._engine_for(len(prompts))
        engine.tokenizer, engine.bos_token_id = tokenizer if words else None, config.bos_token_id
        pad = config.pad_token_id
        pad = pad if pad is not None else stops[0] if stops else 0
        if streamer is not None:
            streamer.put(input_ids.cpu())
        rows = _Rows(input_ids, pad, stopping_criteria or [], streamer)
        rows.run(engine, prompts, params, config.max_time)
        sequences = rows.upto(max(map(len, rows.tokens), default=0))
        if streamer is not None:
            streamer.end()
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _real_tokens(
        self, input_ids: torch.Tensor | None, mask: torch.Tensor | None, config: GenerationConfig, stops: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts (B, T), and which of their tokens are no padding."""
        if input_ids is None:
            if config.bos_token_id is None:
                fail("input_ids", "tokens of shape (B, T), since no bos_token_id is known", None)
            input_ids = torch.full((1, 1), config.bos_token_id, device=self.device)
        if input_ids.dim() != 2:
            fail("input_ids", "shape (B, T)", tuple(input_ids.shape))
        if mask is None:
            pad = config.pad_token_id
            padded = pad is not None and pad not in stops
            mask = input_ids != pad if padded else torch.ones_like(input_ids, dtype=torch.bool)
        if mask.shape != input_ids.shape:
            fail("attention_mask", f"the shape of input_ids, {tuple(input_ids.shape)}", tuple(mask.shape))
        return input_ids, mask

    @staticmethod
    def _sampling(config: GenerationConfig) -> dict:
        """Of SamplingParams, what says how tokens are drawn. Refuses what generate() doesn't follow."""
        defaults = {**GenerationConfig().to_dict(), **getattr(config, "_get_default_generation_params", dict)()}
        for name, value in config.to_dict().items():
            if name in HONOURED or name.startswith("_") or name == "transformers_version":
                continue
            neutral = (None, defaults.get(name), *_NEUTRAL.get(name, (False,)))
            if value not in neutral:
                fail(name, f"{defaults.get(name)!r}, since generate() doesn't follow this field", repr(value))
        if not config.do_sample:
            return {"temperature": 0.0}
        temperature = 1.0 if config.temperature is None else config.temperature
        if not temperature > 0:
            fail("temperature", "a number > 0 where do_sample=True", temperature)
        chosen = {"top_k": config.top_k or 0, "top_p": config.top_p, "min_p": config.min_p}
        return {"temperature": float(temperature), **{n: v for n, v in chosen.items() if v is not None}}

    def _engine_for(self, rows: int) -> Engine:
        """The last call's engine, if it has so many slots (or max_sequences of ``engine_options``), or a new one.

        Its CUDA graphs have the weights' places by heart, so a model that was moved takes a new one.
        """
        size = self.engine_options.get("max_sequences", 1 << max(rows - 1, 0).bit_length())
        of = (dict(self.engine_options), tuple(p.data_ptr() for p in self.model.parameters()))
        if self._engine is None or self._engine_of != of or self._engine.max_sequences < size:
            self._engine = None  # its memory first
            self._engine = Engine(self.model, **{**self.engine_options, "max_sequences": size})
            self._engine_of = of
        return self._engine


class _Rows:
    """What generate() makes of each prompt."""

    def __init__(self, prompts: torch.Tensor, pad: int, criteria, streamer):
        self.prompts, self.pad, self.criteria, self.streamer = prompts, pad, criteria, streamer
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.running = [True] * len(prompts)  # rows that may get more tokens
        self.checked = 0  # tokens a row that the criteria have seen

    def upto(self, count: int) -> torch.Tensor:
        new = [row[:count] + [self.pad] * (count - len(row[:count])) for row in self.tokens]
        ids = torch.tensor(new, dtype=torch.int64, device=self.prompts.device).view(len(new), count)
        return torch.cat((self.prompts.long(), ids), 1)

    def run(self, engine: Engine, prompts, params: SamplingParams, max_time: float | None) -> None:
        start, ids = time.monotonic(), []
        try:
            for prompt in prompts:
                while len(engine.waiting) >= engine.max_waiting:
                    engine.step()
                ids.append(engine.submit(prompt, params))
            where = {request: row for row, request in enumerate(ids)}
            while any(self.running):
                for event in engine.step():
                    row = where[event.request]
                    if not self.running[row]:
                        continue
                    if event.token is None:
                        raise FloatingPointError(f"logits: expected a number among those of row {row}, got none")
                    self.tokens[row].append(event.token)
                    self.running[row] = event.finish_reason is None
                    if self.streamer is not None:
                        self.streamer.put(torch.tensor([event.token]))
                self._check(lambda row: self._end(engine, ids, row))
                if max_time is not None and time.monotonic() - start > max_time:
                    for row in range(len(ids)):
                        self._end(engine, ids, row)
        finally:
            for request in ids:
                if request in engine.requests:
                    engine.cancel(request)

    def _end(self, engine: Engine, ids, row: int) -> None:
        if self.running[row]:
            self.running[row] = False
            engine.cancel(ids[row])

    def _check(self, end) -> None:
        """Ask the criteria about each number of tokens that all rows at work have reached."""
        if not self.criteria:
            return
        while any(len(row) > self.checked for row in self.tokens):
            if any(going and len(row) <= self.checked for row, going in zip(self.tokens, self.running)):
                return  # a row is behind
            self.checked += 1
            sequences = self.upto(self.checked)
            done = torch.zeros(len(self.tokens), dtype=torch.bool, device=sequences.device)
            for criterion in self.criteria:
                done |= torch.as_tensor(criterion(sequences, None), device=done.device)
            for row, ended in enumerate(done.tolist()):
                if ended and len(self.tokens[row]) >= self.checked:
                    end(row)
                    del self.tokens[row][self.checked :]


class MoRCallback(TrainerCallback):
    """Tells the model which optimizer step it is at, for the warm-up of capacities, and moves the router's bias after
    each (loss-free balancing, see :meth:`.MoR.update_router_bias`). For ``Trainer(callbacks=[...])``."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.optimizer_step = state.global_step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if model._step_depths:
            model.model.update_router_bias(torch.cat(model._step_depths))
            model._step_depths.clear()


def _needs_callback(config: Config) -> bool:
    warms_up = config.router == "expert_choice" and config.cap_warmup_steps > 0
    return warms_up or config.router == "token_choice" and config.balance == "loss_free"


def _read(kind, folder, file, **fields):
    """What transformers makes of a file of JSON."""
    path = os.path.join(folder, file)
    try:
        if os.path.exists(path):
            read_json(path)
        return kind.from_pretrained(folder, **fields)
    except OSError:
        raise
    except Exception as error:  # transformers takes fields of its own as they come
        raise ValueError(f"{path}: expected a {kind.__name__}, got: {error}") from None


def _one_device(device_map) -> torch.device | None:
    """The device that a device_map puts all of the model on; None leaves it on the CPU."""
    if isinstance(device_map, dict):
        devices = set(device_map.values())
        if len(devices) != 1:
            fail("device_map", "one device for all of the model", device_map)
        [device_map] = devices
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return None if device_map is None else torch.device(device_map)


def _from_file_names(model, state_dict, prefix, *_) -> None:
    """A state dict with names as in files, in place, as one with the model's; Trainer loads its checkpoints so."""
    if f"{prefix}embed_tokens.weight" in state_dict:
        found = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict)}
        state_dict.update({f"{prefix}model.{name}": tensor for name, tensor in join(found).items()})


AutoConfig.register(MODEL_TYPE, MoRConfig)
AutoModelForCausalLM.register(MoRConfig, MoRForCausalLM)
