"""Dense checkpoints of Hugging Face: what their configuration means, and that their weights compute the same here."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mor_kernels.__main__ import main
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.convert import dense_config, separate
from reference.model import ReferenceMoR, random_state
from tests.model.test_model import TINY, TOKEN

LLAMA = {"model_type": "llama", "vocab_size": 23, "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 5e4, "rms_norm_eps": 1e-4,
         "max_position_embeddings": 40, "tie_word_embeddings": True, "hidden_act": "silu"}  # fmt: skip
SHARINGS = ("middle_cycle", "middle_sequence", "cycle", "sequence")
# dense layers that each unrolled layer of two recursions is the mean of
SOURCES = {
    ("middle", "stepwise"): [[1], [4]], ("middle", "lower"): [[1], [2]], ("middle", "upper"): [[3], [4]],
    ("all", "stepwise"): [[0], [2], [5]], ("all", "lower"): [[0], [1], [2]], ("all", "upper"): [[3], [4], [5]],
    ("middle_cycle", "average"): [[1, 3], [2, 4]], ("middle_sequence", "average"): [[1, 2], [3, 4]],
    ("cycle", "average"): [[0, 3], [1, 4], [2, 5]], ("sequence", "average"): [[0, 1], [2, 3], [4, 5]],
}  # fmt: skip
INITS = ("stepwise", "average", "lower", "upper", "random")


def write(folder, **changes):
    """A checkpoint as transformers saves it, in two files; its state by our names."""
    found = {**LLAMA, **changes}
    config = MoRConfig.from_llama(found)
    state = {name: t.float() for name, t in random_state(config.to_dict(), seed=3).items()}
    (folder / "config.json").write_text(json.dumps(found))
    names = sorted(state)
    for part in range(2):
        weights = {f"model.{name}": state[name].contiguous() for name in names[part::2] if name != "lm_head.weight"}
        if "lm_head.weight" in names[part::2]:
            weights["lm_head.weight"] = state["lm_head.weight"]
        save_file(weights, folder / f"model-0000{part + 1}-of-00002.safetensors", {"format": "pt"})
    return config, state


def test_configuration_is_read():
    config = MoRConfig.from_llama(LLAMA)
    want = {name: value for name, value in LLAMA.items() if name not in ("model_type", "hidden_act")}
    assert want.items() <= config.to_dict().items() and config.head_dim == 4 and config.num_recursions == 1
    newer = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    newer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "head_dim": 6, "sliding_window": None}
    assert MoRConfig.from_llama(newer).rope_theta == 7e4 and MoRConfig.from_llama(newer).head_dim == 6
    absent = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    bare = MoRConfig.from_llama({name: value for name, value in LLAMA.items() if name not in absent})
    assert (bare.num_key_value_heads, bare.rope_theta, bare.rms_norm_eps) == (4, 10000.0, 1e-6)  # LlamaConfig's
    assert not bare.tie_word_embeddings and bare.max_position_embeddings == 2048


def test_changes_override_but_for_the_sizes_of_the_weights(tmp_path):
    write(tmp_path)
    changes = {"num_recursions": 2, "router": "expert_choice", "rope_theta": 1e6, "max_position_embeddings": 8}
    config = MoRConfig.from_llama(tmp_path, **changes, hidden_size=16)
    assert changes.items() <= config.to_dict().items()
    assert config.alpha == 0.1 and config.capacities == (1.0, 0.5)  # defaults of the router, not the dense model's
    with pytest.raises(ValueError, match=r"hidden_size: expected 16, as in .*config.json, got 32"):
        MoRConfig.from_llama(tmp_path, hidden_size=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type: expected 'llama', the only architecture that is read, got 'mistral'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: expected .* scaling, .*llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: expected .* without scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters: expected .* without scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: expected .* of whole heads"),
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"mlp_bias": True}, "mlp_bias: expected False"),
        ({"sliding_window": 4096}, "sliding_window: expected None"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', .*got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected None"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        MoRConfig.from_llama(tmp_path)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="llama: hidden_size: expected the size of a Llama, got no such entry"):
        MoRConfig.from_llama({name: value for name, value in LLAMA.items() if name != "hidden_size"})
    with pytest.raises(FileNotFoundError, match="config.json: expected the configuration of a dense model, found none"):
        dense_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: expected the JSON configuration of a Llama"):
        MoRConfig.from_llama(tmp_path)
    MoR(MoRConfig(vocab_size=9, hidden_size=8, num_hidden_layers=4, num_recursions=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config.json: expected a dense model .*got num_recursions=2, router='none'"):
        dense_config(tmp_path)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_one_recursion_is_the_dense_model(tmp_path, sharing, tie):
    config, state = write(tmp_path, tie_word_embeddings=tie)
    ids = torch.randint(23, (2, 13), generator=torch.Generator().manual_seed(0))
    want = ReferenceMoR(config.to_dict(), {name: t.double() for name, t in state.items()}).forward(ids).logits
    for init in INITS:
        model = MoR.from_dense(tmp_path, MoRConfig.from_llama(tmp_path, sharing=sharing), init).eval()
        got = model(ids).logits
        # "random" keeps what is outside the shared block, here nothing but embedding, norm, head and the ends
        same = torch.allclose(got.double(), want, rtol=0, atol=1e-4)  # fp32 over 6 layers
        assert same == (init != "random"), init


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("init", INITS)
def test_two_recursions_are_the_reference_with_the_layers_of_each_init(tmp_path, sharing, init):
    config, state = write(tmp_path)
    model = MoR.from_dense(tmp_path, MoRConfig.from_llama(tmp_path, num_recursions=2, sharing=sharing), init).eval()
    own = sharing.startswith("middle")
    if init == "random":
        drawn = separate(model.state_dict(), config)
        names = [name.removeprefix("layers.0.") for name in drawn if name.startswith("layers.0.")]
        shared = [{name: drawn[f"layers.{i}.{name}"] for name in names} for i in range(own, 3)]
        for i in range(own, 3 - own):
            drawn_up = drawn[f"layers.{i}.mlp.up_proj.weight"]
            assert not any(torch.equal(drawn_up, state[f"layers.{j}.mlp.up_proj.weight"]) for j in range(6))
    else:
        sources = SOURCES.get((sharing, init)) or SOURCES["middle" if own else "all", init]
        shared = [
            {name.removeprefix("layers.0."): torch.stack([state[name.replace(".0.", f".{i}.")] for i in source]).mean(0)
             for name in state if name.startswith("layers.0.")}
            for source in sources
        ]  # fmt: skip
    count = 2 if own else 3
    unrolled = [*range(count), *range(count)] if "cycle" in sharing else [i for i in range(count) for _ in range(2)]
    dense = {name: t.double() for name, t in state.items()}
    for i, layer in enumerate(unrolled, own):
        dense |= {f"layers.{i}.{name}": t.double() for name, t in shared[layer].items()}
    ids = torch.randint(23, (2, 13), generator=torch.Generator().manual_seed(0))
    want = ReferenceMoR(config.to_dict(), dense).forward(ids).logits
    torch.testing.assert_close(model(ids).logits.double(), want, rtol=0, atol=1e-4)  # fp32 over 6 layers


@pytest.mark.parametrize(
    ("sharing", "layers", "init", "sources"),
    [
        ("middle_cycle", 8, "stepwise", [[0], [1], [6], [7]]),
        ("middle_cycle", 8, "average", [[0], [1, 3, 5], [2, 4, 6], [7]]),
        ("middle_cycle", 8, "lower", [[0], [1], [2], [7]]),
        ("middle_cycle", 8, "upper", [[0], [5], [6], [7]]),
        ("middle_sequence", 8, "average", [[0], [1, 2, 3], [4, 5, 6], [7]]),
        ("cycle", 9, "stepwise", [[0], [4], [8]]),
        ("sequence", 9, "average", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
)
def test_a_layer_of_three_recursions_is_the_mean_of_its_sources(sharing, layers, init, sources):
    """To the bit."""
    dense = MoR(MoRConfig(**TINY, num_hidden_layers=layers))
    config = MoRConfig(**TINY, **{**TOKEN, "num_hidden_layers": layers, "sharing": sharing})
    model = MoR.from_dense(separate(dense.state_dict(), dense.config), config, init)
    for layer, origin in enumerate(sources):
        for name, value in model.layers[layer].state_dict().items():
            want = torch.stack([dense.layers[i].state_dict()[name] for i in origin]).mean(0)
            assert torch.equal(value, want)
    assert torch.equal(model.embed_tokens.weight, dense.embed_tokens.weight)


def test_weights_that_do_not_fit_are_named(tmp_path):
    def state_of(**fields):
        dense = MoR(MoRConfig(**TINY, **fields))
        return separate(dense.state_dict(), dense.config)

    config = MoRConfig(**TINY, **TOKEN)
    with pytest.raises(FileNotFoundError, match=r"expected a folder with \*.safetensors files"):
        MoR.from_dense(tmp_path, config)
    dense = state_of(num_hidden_layers=5)
    with pytest.raises(ValueError, match="dense: expected num_hidden_layers = 8 layers, got 5"):
        MoR.from_dense(dense, config)
    with pytest.raises(ValueError, match="init: expected one of stepwise, average"):
        MoR.from_dense(dense, config, "best")
    dense = state_of(num_hidden_layers=8, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="dense: expected a head tied to the embedding"):
        MoR.from_dense(dense, config)
    untied = MoR.from_dense(dense, MoRConfig(**TINY, **TOKEN, tie_word_embeddings=False))
    assert torch.equal(untied.lm_head.weight, dense["lm_head.weight"])
    dense["layers.0.self_attn.q_proj.bias"] = torch.zeros(24)
    with pytest.raises(ValueError, match="without biases, got also layers.0.self_attn.q_proj.bias"):
        MoR.from_dense(dense, MoRConfig(**TINY, **TOKEN, tie_word_embeddings=False))


@pytest.mark.parametrize("sharing", SHARINGS)
def test_norms_of_each_recursion_start_as_shared_ones_would(tmp_path, sharing):
    write(tmp_path)
    ids = torch.randint(23, (2, 13), generator=torch.Generator().manual_seed(0))
    fields = {"num_recursions": 2, "router": "expert_choice", "sharing": sharing}
    for init in ("average", "upper"):
        shared, own = (
            MoR.from_dense(tmp_path, MoRConfig.from_llama(tmp_path, **fields, share_norms=share), init).eval()
            for share in (True, False)
        )
        for name, router in own.routers.named_parameters():  # drawn
            router.data.copy_(shared.routers.get_parameter(name))
        assert torch.equal(own(ids).logits, shared(ids).logits)


@pytest.mark.parametrize("tie", [True, False])
def test_logits_are_those_of_transformers(tmp_path, tie):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    fields = {name: value for name, value in LLAMA.items() if name not in ("model_type", "rope_theta")}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**fields, "tie_word_embeddings": tie}))
    with torch.no_grad():
        for parameter in llama.parameters():  # of a size that makes attention attend
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    llama.eval().save_pretrained(tmp_path)
    ids = torch.randint(23, (3, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = llama(ids).logits
        assert want.std() > 0.3
        for sharing in SHARINGS:
            for init in INITS[:-1]:
                model = MoR.from_dense(tmp_path, MoRConfig.from_llama(tmp_path, sharing=sharing), init).eval()
                # the same fp32 operations in other orders: a few ulp a layer, of sums of magnitude about 10
                torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-4)


def test_a_run_takes_sizes_and_tokenizer_from_the_checkpoint(tmp_path, capsys):
    from mor_kernels.train import train_tokenizer

    dense, text = tmp_path / "dense", tmp_path / "text.txt"
    dense.mkdir()
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    _, state = write(dense, vocab_size=300)
    train = ["train", str(tmp_path / "run"), "--source", str(text), "--init", f"{dense}:upper", "--train", "steps=1",
             "sequence_length=16", "batch_size=1", "validation=0.1", "learning_rate=1e-30", "weight_decay=0.0",
             "eval_batches=1", "progress=false", "--model", "num_recursions=2", "router=expert_choice"]  # fmt: skip
    assert main(train) == 1 and "--tokenizer: expected that of" in capsys.readouterr().err
    train_tokenizer(text, 300).save(str(dense / "tokenizer.json"))
    assert main([*train, "hidden_size=20"]) == 1
    assert "hidden_size: expected 16, as in" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main(train) == 0
    model = MoR.from_pretrained(tmp_path / "run" / "model")
    assert model.config.hidden_size == 16 and model.config.rope_theta == 5e4
    made = separate(model.state_dict(), model.config)["layers.1.mlp.up_proj.weight"]
    assert torch.equal(made, state["layers.3.mlp.up_proj.weight"])
    made = (tmp_path / "run" / "model" / "tokenizer.json").read_bytes()
    assert made == (dense / "tokenizer.json").read_bytes()
    # the checkpoint itself is a model that the other commands read
    capsys.readouterr()
    assert main(["depth", str(dense), "The fox", "--color", "never"]) == 0
    assert "The fox" in capsys.readouterr().out
    assert "lm_head.weight" not in load_file(tmp_path / "run" / "model" / "model.safetensors")
