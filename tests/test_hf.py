"""The model within Hugging Face's libraries: files, forward, generate(), Trainer, lm-evaluation-harness."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    WatermarkingConfig,
    pipeline,
    set_seed,
)

from mor_kernels import hf
from mor_kernels.decode import Engine, SamplingParams
from mor_kernels.evaluate import task_accuracy
from mor_kernels.hf import MoRCallback, MoRConfig, MoRForCausalLM
from mor_kernels.model import MoR
from mor_kernels.model import MoRConfig as Config
from mor_kernels.model.hugging_face import write_tokenizer

# alpha and initializer_range are so large that routing and logits matter
TINY = {
    "vocab_size": 258, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "num_recursions": 3, "alpha": 1.0,
    "initializer_range": 0.4,
}  # fmt: skip
EXPERT, TOKEN = {**TINY, "router": "expert_choice"}, {**TINY, "router": "token_choice"}
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
END = 256  # the tokenizer's only token besides bytes; 257 is free


def new(seed=0, **fields):
    torch.manual_seed(seed)
    return MoRForCausalLM(MoRConfig(**{**EXPERT, **fields})).eval()


def ids(*shape, seed=1):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    return new()


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def folder(model, tokenizer_file, tmp_path_factory):
    """A model as `mor-kernels train` leaves it."""
    path = tmp_path_factory.mktemp("model")
    model.model.save_pretrained(path)
    write_tokenizer(path, tokenizer_file, "<|endoftext|>", END, 32)
    return path


@pytest.mark.parametrize(
    "fields", [EXPERT, {**TOKEN, "balance": "loss_free"}, {**EXPERT, "tie_word_embeddings": False}]
)
def test_either_library_reads_what_the_other_wrote(fields, tmp_path):
    ours, x = MoR(Config(**fields)).eval(), ids(2, 7)
    if ours.router_bias is not None:
        ours.router_bias.copy_(torch.tensor([0.3, -0.1, 0.2000001]))
    want = ours(x).logits
    ours.save_pretrained(tmp_path / "ours")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(theirs) is MoRForCausalLM and not theirs.training and not any(info.values())
    assert torch.equal(theirs(x).logits, want)
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(MoR.from_pretrained(tmp_path / "theirs").eval()(x).logits, want)
    assert MoR.from_pretrained(tmp_path / "theirs").config == ours.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16, device_map="cpu")
    assert again.dtype == torch.bfloat16
    if ours.router_bias is not None:
        assert torch.equal(again.model.router_bias, ours.router_bias)  # stays in fp32
    again.save_pretrained(tmp_path / "theirs")
    assert MoRForCausalLM.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    files = {"config.json", "model.safetensors", "modeling_mor.py"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == files
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == files | {"generation_config.json"}


def test_a_folder_loads_where_nobody_imports_us(folder, tmp_path):
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A, AutoTokenizer as T\n"
        "assert 'mor_kernels' not in sys.modules\n"
        "model = A.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "inputs = T.from_pretrained(sys.argv[1])('Hello', return_tensors='pt')\n"
        "print(type(model).__module__, model.generate(**inputs, max_new_tokens=4)[0].tolist())\n"
        "model.save_pretrained(sys.argv[2]); A.from_pretrained(sys.argv[2])\n"
    )
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, folder, tmp_path / "again"]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    prompt = list(AutoTokenizer.from_pretrained(folder)("Hello").input_ids)
    [done] = Engine(MoR.from_pretrained(folder).eval()).generate([prompt], SamplingParams(max_tokens=4))
    assert out.stdout.strip() == f"mor_kernels.hf {prompt + done.tokens}"
    assert {p.name for p in (tmp_path / "again").glob("*.py")} == {"modeling_mor.py"}


def test_configurations_are_checked_and_kept(tmp_path):
    config = MoRConfig(**EXPERT, capacities=[1.0, 0.5, 0.25])
    config.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_mor.py").exists()  # before a model sends what is new in the folder to the Hub
    assert AutoConfig.from_pretrained(tmp_path).to_mor() == Config(**EXPERT, capacities=(1.0, 0.5, 0.25))
    assert AutoConfig.from_pretrained(tmp_path, num_recursions=1, capacities=None).num_recursions == 1
    with pytest.raises(ValueError, match="num_hidden_layers: expected a depth that divides into 3 recursions"):
        MoRConfig(**{**EXPERT, "num_hidden_layers": 6})
    config.alpha = "large"
    with pytest.raises(ValueError, match="alpha: expected a number, got 'large'"):
        MoRForCausalLM(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config: expected an argument that loads"),
        ({"device_map": {"model.layers": 0, "": "cpu"}}, "device_map: expected one device for all of the model"),
        ({"vocab_size": 259}, r"embed_tokens.weight: expected shape \(259, 16\), got \(258, 16\)"),
    ],
)
def test_what_loading_refuses(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder, **arguments)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"vocab_size": 2**31 - 1}, r"embed_tokens.weight: expected shape \(2147483647, 16\), got"),
        ("config.json", {"id2label": 5}, "config.json: expected a MoRConfig, got: "),
        ("config.json", "[" * 100_000, "config.json: expected a MoRConfig, got: more than 100 levels"),
        ("generation_config.json", "[]", "generation_config.json: expected a GenerationConfig, got: list"),
    ],
)
def test_folders_of_others(folder, tmp_path, file, content, message):
    """What is wrong is said before memory is taken: 128 GiB for the vocabulary alone."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps({**json.loads((tmp_path / file).read_text()), **content})
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        MoRForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("side", ["left", "right"])
def test_forward_is_the_models_with_labels_moved_on(side):
    model = new(z_coeff=0.01).train()
    x, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    labels = torch.where(mask.bool(), x, -100)
    labels[0, 3] = -100
    got = model(x, mask, labels, skip_logits=False)
    want = model.model(x, torch.cat((labels[:, 1:], torch.full((2, 1), -100)), 1), attention_mask=mask)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    assert set(got.losses) == {"lm", "aux", "z"} and torch.equal(got.depths, want.depths)
    # alone, real tokens give what they give beside padding; fp32's rounding in sums of 16 and 24 numbers of size 1
    short = model.eval()(x[1:, mask[1].bool()]).logits
    torch.testing.assert_close(model(x, mask).logits[1:, mask[1].bool()], short, rtol=1e-5, atol=1e-5)
    assert model.train()(x, mask, labels).logits is None
    # computed from chunks of logits, in another order
    torch.testing.assert_close(model(x, mask, labels, return_dict=False)[0], want.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["position_ids", "past_key_values", "inputs_embeds", "output_attentions", "use_cache"])
def test_forward_refuses_by_name(model, name):
    with pytest.raises(ValueError, match=f"{name}: expected None, since "):
        model(ids(1, 3), **{name: True})
    assert model(ids(1, 3), **{name: None}).logits is not None


# generate()


@pytest.mark.parametrize("device", DEVICES)
def test_generation_is_the_engines_whatever_the_padding(device):
    model = new().to(device)
    prompts = [ids(5).tolist(), ids(2, seed=2).tolist(), ids(9, seed=3).tolist()]
    done = Engine(model.model, max_sequences=4).generate(prompts, SamplingParams(max_tokens=6, stop_token_ids=[200]))
    want = [prompt + c.tokens for prompt, c in zip(prompts, done)]
    for side in ("left", "right"):
        rows = [([0] * (9 - len(p)) + p) if side == "left" else p + [0] * (9 - len(p)) for p in prompts]
        mask = [([0] * (9 - len(p)) + [1] * len(p)) if side == "left" else [1] * len(p) + [0] * (9 - len(p))
                for p in prompts]  # fmt: skip
        rows, mask = (torch.tensor(part, device=device) for part in (rows, mask))
        out = model.generate(rows, attention_mask=mask, max_new_tokens=6, eos_token_id=200, pad_token_id=7)
        assert torch.equal(out[:, :9], rows)
        for row, prompt, whole in zip(out[:, 9:].tolist(), prompts, want):
            new_tokens = whole[len(prompt) :]
            assert row == new_tokens + [7] * (len(row) - len(new_tokens))
    # without a mask: what is pad_token_id, and not eos_token_id as well, is padding
    rows = torch.tensor([[257] * (9 - len(p)) + p for p in prompts], device=device)
    inferred = model.generate(input_ids=rows, max_new_tokens=6, eos_token_id=200, pad_token_id=257)
    assert [[t for t in row if t != 257] for row in inferred.tolist()] == want


def test_a_row_ends_with_its_eos_token(model):
    x = ids(1, 4)
    free = model.generate(x, max_new_tokens=8)[0, 4:].tolist()
    end = next(token for token in free[1:] if token != free[0])
    both = model.generate(x, max_new_tokens=8, eos_token_id=[251, end])[0, 4:].tolist()
    assert both == free[: free.index(end) + 1]
    config = GenerationConfig(max_new_tokens=8, eos_token_id=end, return_dict_in_generate=True)
    assert model.generate(x, config).sequences[0, 4:].tolist() == both


def test_lengths(model):
    x = ids(1, 5)
    assert model.generate(x).shape == (1, 25)  # transformers' own default, 20 tokens
    assert model.generate(x, max_length=8).shape == (1, 8)
    assert model.generate(x, GenerationConfig(max_length=9)).shape == (1, 9)
    assert model.generate(x, max_new_tokens=500).shape == (1, 33)  # the context, and a token that has no position
    with pytest.raises(ValueError, match="max_length: expected more than the 5 tokens of the prompt, got 5"):
        model.generate(x, max_length=5)
    assert model.generate(bos_token_id=4, max_new_tokens=2)[0, 0] == 4
    assert model.generate(torch.empty(0, 5, dtype=torch.int64)).shape == (0, 5)


def test_sampling_follows_the_seed_and_the_filters(model):
    x = ids(2, 4)

    def sample(seed, **fields):
        set_seed(seed)
        return model.generate(x, do_sample=True, max_new_tokens=3, **fields)

    several = sample(3, num_return_sequences=2)
    assert several.shape == (4, 7) and torch.equal(several[:, :4], x.repeat_interleave(2, 0))
    assert len({tuple(row) for row in several.tolist()}) == 4
    assert torch.equal(several, sample(3, num_return_sequences=2))
    assert not torch.equal(several, sample(4, num_return_sequences=2))
    greedy = model.generate(x, max_new_tokens=3)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert torch.equal(sample(5, **narrow), greedy), narrow
    with pytest.raises(ValueError, match="num_return_sequences"):  # says transformers
        model.generate(x, num_return_sequences=2)
    with pytest.raises(ValueError, match="temperature: expected a number > 0 where do_sample=True, got 0"):
        model.generate(x, do_sample=True, temperature=0.0)


# of each field that generate() doesn't follow, a value that asks for something
ASKS = {
    "use_cache": False, "early_stopping": "never", "num_beams": 2, "cache_implementation": "static",
    "cache_config": {"a": 1}, "bad_words_ids": [[3]], "suppress_tokens": [1], "begin_suppress_tokens": [1],
    "sequence_bias": [[[1], 2.0]], "exponential_decay_length_penalty": [3, 1.5], "speculation_type": "dflash",
    "num_assistant_tokens_schedule": "heuristic", "compile_config": CompileConfig(),
    "assistant_ensemble_weight": 0.5, "watermarking_config": WatermarkingConfig(),
}  # fmt: skip


def test_every_field_of_a_generation_config_is_followed_or_refused(model):
    """Also those that a newer transformers adds."""
    fields = set(GenerationConfig().to_dict())
    fields |= set(getattr(GenerationConfig, "_get_default_generation_params", dict)())
    fields -= {name for name in fields if name.startswith("_")} | {"transformers_version"}
    assert hf.HONOURED <= fields | {"min_p", "max_time", "stop_strings"}
    refused = fields - hf.HONOURED
    assert {"num_beams", "repetition_penalty", "min_new_tokens", "output_scores", "typical_p"} <= refused
    for name in sorted(refused):
        config = GenerationConfig(max_new_tokens=1)
        default = getattr(config, name, None)
        if name not in ASKS and (default is True or name in ("renormalize_logits", "disable_compile")):
            continue  # True changes nothing
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        value = ASKS.get(name, default + 3 if number else 3)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
            model.generate(ids(1, 3), config)
    neutral = {"use_cache": True, "num_beams": 1, "repetition_penalty": 1.0}
    assert model.generate(ids(1, 3), max_new_tokens=2, **neutral).shape == (1, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits_processor": [print]}, "logits_processor: expected none"),
        ({"assistant_model": "draft"}, "assistant_model: expected nothing, since generate"),
        ({"max_tokens": 3}, "max_tokens: expected nothing"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask: expected the shape of input_ids, \(2, 3\), got"),
        ({"streamer": "standard output"}, "streamer: expected one row, got 2"),
        ({"stop_strings": ["."]}, "tokenizer: expected one, for stop_strings, got None"),
        ({"input_ids": ids(2, 3)}, "input_ids: expected None beside inputs, got both"),
    ],
)  # fmt: skip
def test_what_generation_refuses(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.generate(ids(2, 3), **arguments)


class _Until(StoppingCriteria):
    """Ends a row at a token, and keeps what it has been shown."""

    def __init__(self, ends):
        self.ends, self.seen = torch.tensor(ends), []

    def __call__(self, input_ids, scores, **_):
        self.seen.append(input_ids.tolist())
        return input_ids[:, -1] == self.ends


def test_criteria_see_one_token_more_at_a_time(model):
    x = ids(3, 4)
    free = model.generate(x, max_new_tokens=7)[:, 4:].tolist()
    ends = [free[0][1], free[1][4], 257]
    criterion = _Until(ends)
    got = model.generate(x, max_new_tokens=7, stopping_criteria=[criterion], pad_token_id=9).tolist()
    lengths = [row.index(end) + 1 if end in row else 7 for row, end in zip(free, ends)]
    assert lengths[0] == 2 and lengths[2] == 7
    assert got == [p + row[:n] + [9] * (7 - n) for p, row, n in zip(x.tolist(), free, lengths)]
    assert [len(rows[0]) for rows in criterion.seen] == list(range(5, 12))
    for shown in criterion.seen:
        count = len(shown[0]) - 4
        assert shown == [p + row[: min(n, count)] + [9] * (count - min(n, count))
                         for p, row, n in zip(x.tolist(), free, lengths)]  # fmt: skip


def test_stop_strings_streamers_and_time(model, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.eos_token_id == END
    x = tokenizer("Once", return_tensors="pt").input_ids
    free = model.generate(x, max_new_tokens=24)[0].tolist()
    text = tokenizer.decode(free[4:])
    printable = next(c for c in text if c.isascii())
    stopped = model.generate(x, max_new_tokens=24, stop_strings=printable, tokenizer=tokenizer)[0].tolist()
    assert stopped == free[: len(stopped)] and tokenizer.decode(stopped[4:]).endswith(printable)
    assert printable not in tokenizer.decode(stopped[4:-1])

    class Collector:
        got: list = []

        def put(self, value):
            self.got.append(value.tolist())

        def end(self):
            self.got.append("end")

    model.generate(x, max_new_tokens=24, streamer=Collector())
    assert Collector.got == [x.tolist(), *[[t] for t in free[4:]], "end"]
    start = time.monotonic()
    model.generate(ids(1, 3), max_new_tokens=25, max_time=0.0)
    assert time.monotonic() - start < 5
    assert not model._engine.requests and model._engine.metrics()["pages_in_use"] == 0
    [said] = pipeline("text-generation", model=model, tokenizer=tokenizer)("Once", max_new_tokens=24, do_sample=False)
    assert said["generated_text"] == tokenizer.decode(free)


def test_weights_that_change_or_move_are_the_ones_that_generate():
    model, x = new(), ids(1, 4)
    before = model.generate(x, max_new_tokens=8)
    engine = model._engine
    model.load_state_dict(new(seed=5).state_dict())
    after = model.generate(x, max_new_tokens=8)
    assert model._engine is engine and not torch.equal(after, before)
    assert torch.equal(after, new(seed=5).generate(x, max_new_tokens=8))
    model.double()
    assert model.generate(x, max_new_tokens=8).shape == (1, 12) and model._engine is not engine
    model.float().resize_token_embeddings(300)
    assert model.model.config.vocab_size == 300 and model(x).logits.shape == (1, 4, 300)
    assert model.generate(x, max_new_tokens=3).shape == (1, 7)
    own_head = new(tie_word_embeddings=False)
    own_head.resize_token_embeddings(300)
    assert own_head.model.lm_head.weight.shape == (300, 16) and own_head(x).logits.shape == (1, 4, 300)


# Trainer


def train(model, folder, steps=6, callbacks=(), resume=None, **arguments):
    data = [{"input_ids": row, "labels": row} for row in ids(4, 12, seed=7).repeat(6, 1)]
    settings = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, report_to=[],
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, seed=1, **{"save_strategy": "no", **arguments}
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data[:3], callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_trains_and_goes_on_from_a_checkpoint(tmp_path):
    whole = train(new(), tmp_path / "a", gradient_accumulation_steps=2, save_strategy="steps", save_steps=3)
    assert losses(whole)[-1] < losses(whole)[0]
    assert "eval_loss" in whole.evaluate()
    half = tmp_path / "a" / "checkpoint-3"
    again = train(new(seed=9), tmp_path / "b", resume=half, gradient_accumulation_steps=2)
    for (name, want), got in zip(whole.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=name)
    whole.save_model(tmp_path / "end")
    end = MoR.from_pretrained(tmp_path / "end").eval()
    assert torch.equal(end(ids(1, 5)).logits, whole.model.eval()(ids(1, 5)).logits)


def test_checkpointing_of_activations_changes_no_result(tmp_path):
    plain = train(new(), tmp_path, steps=2)
    model, newer = new(), "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    saved = train(model, tmp_path, steps=2, **{f"{'activation' if newer else 'gradient'}_checkpointing": True})
    assert model.model.activation_checkpointing and model.is_gradient_checkpointing
    assert losses(saved) == losses(plain)


class _Watch(TrainerCallback):
    def __init__(self):
        self.kept, self.biases = [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.kept.append(model.model.kept(12, model.optimizer_step))
        if model.model.router_bias is not None:
            self.biases.append(model.model.router_bias.clone())


def test_capacities_warm_up_and_router_biases_move_by_optimizer_steps(tmp_path):
    with pytest.raises(ValueError, match=r"optimizer_step: expected that MoRCallback\(\) is among Trainer's callbacks"):
        train(new(cap_warmup_steps=4), tmp_path)
    watch, model = _Watch(), new(cap_warmup_steps=4)
    kept = []
    forward = model.model.forward
    model.model.forward = lambda *a, **k: kept.append(k["ks"]) or forward(*a, **k)
    train(model, tmp_path, callbacks=[MoRCallback(), watch], gradient_accumulation_steps=2)
    assert kept == [model.model.kept(12, step) for step in range(6) for _ in range(2)]
    assert kept[0] == (12, 12, 12) and kept[-1] == (12, 8, 4)

    watch, model = _Watch(), MoRForCausalLM(MoRConfig(**TOKEN, balance="loss_free", bias_update_rate=0.25))
    depths = []
    forward = model.model.forward
    model.model.forward = lambda *a, **k: depths.append((out := forward(*a, **k)).depths) or out
    train(model, tmp_path, steps=2, callbacks=[MoRCallback(), watch], gradient_accumulation_steps=2)
    bias = torch.zeros(3)
    for step in range(2):
        counts = torch.bincount(torch.cat(depths[2 * step : 2 * step + 2]).flatten() - 1, minlength=3).float()
        bias = bias + 0.25 * (counts.mean() - counts).sign()
        assert torch.equal(watch.biases[step], bias)
    assert bias.any()


# lm-evaluation-harness


def test_lm_eval_finds_what_our_evaluation_finds(folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    words = ["ab", "the cat", "Zebra 7", "of", "in a"]
    choices = [[" yes", " no way", " " + words[i % 4]] for i in range(14)]
    examples = [{"question": f"{words[i % 5]} is {i}", "choices": choices[i], "answer": i % 3} for i in range(14)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    where = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{validation: {tmp_path}/data.jsonl}}\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: local_choice\n{where}validation_split: validation\noutput_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\ntarget_delimiter: ''\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
        "metric_list:\n  - metric: acc\n"
    )
    (tmp_path / "until.yaml").write_text(
        f"task: local_until\n{where}validation_split: validation\noutput_type: generate_until\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: ' yes'\ngeneration_kwargs: {until: ['e'], max_gen_toks: 8}\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    harness = HFLM(pretrained=str(folder), device="cpu", batch_size=4, trust_remote_code=True)
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(harness, tasks=["local_choice", "local_until"], task_manager=tasks, bootstrap_iters=0)

    model = MoR.from_pretrained(folder).eval()
    pairs = [{"choices": [[e["question"], choice] for choice in e["choices"]], "gold": e["answer"]} for e in examples]
    want = task_accuracy(model, Tokenizer.from_file(str(folder / "tokenizer.json")), pairs)
    assert 0 < want["acc"] < 1
    assert found["results"]["local_choice"]["acc,none"] == want["acc"]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = Engine(model, tokenizer=tokenizer, eos_token_id=END)
    for sample in found["samples"]["local_until"]:
        [done] = engine.generate([sample["doc"]["question"]], SamplingParams(max_tokens=8, stop=["e"]))
        assert sample["resps"] == [[done.text]]


def test_fields_are_the_models():
    assert set(hf._FIELDS) == {field.name for field in dataclasses.fields(Config)}
