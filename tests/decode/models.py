"""Tiny models with random weights, and what the reference makes of their completions."""

import torch

from mor_kernels.decode import Engine
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.convert import separate
from reference.model import ReferenceMoR

VOCABULARY = 50
KINDS = [  # of routers and of keys and values
    {"router": "expert_choice"},
    {"router": "expert_choice", "aux": "router", "kv": "shared"},
    {"router": "token_choice", "kv": "hybrid", "hybrid_base": "latest"},
    {"router": "none", "kv": "shared"},
    {"router": "none", "num_recursions": 1},
]


def tiny(seed=0, **fields):
    """(model, reference) in float64 with the same weights; large ones, so that depths and tokens vary."""
    recursions = fields.setdefault("num_recursions", 3)
    middle = fields.get("sharing", "middle_cycle").startswith("middle")
    fields.setdefault("num_hidden_layers", 2 * recursions + 2 * middle)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        **fields,
    }
    model = MoR(MoRConfig(**fields)).double().eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(generator=g).mul_(0.6 if p.dim() == 2 and "embed" not in name else 1)
            if name.endswith("norm.weight") or name == "recursion_encoding":
                p.mul_(0.2).add_(1)
        if model.router_bias is not None:
            model.router_bias.normal_(generator=g).mul_(0.1)
    return model, ReferenceMoR(fields, separate(model.state_dict(), model.config))


def random_prompts(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=g).tolist() for n in lengths]


def assert_equals_reference(reference, completion, params, tolerance=1e-9):
    """The completion asked for logprobs=VOCABULARY, so that every logit is seen. In float64 on both sides, sums of some
    hundred terms of size 1 come in another order."""
    given = completion.prompt + completion.tokens[:-1]
    result = reference.forward(torch.tensor([given]), mode="threshold")
    assert completion.depths == result.depths[0].tolist()
    log = result.logits[0, len(completion.prompt) - 1 :].log_softmax(-1)
    got = torch.empty_like(log)
    for row, top in zip(got, completion.top_logprobs):
        for token, value in top:
            row[token] = value
    torch.testing.assert_close(got, log, rtol=tolerance, atol=tolerance)
    assert completion.logprobs == [row[t].item() for row, t in zip(got, completion.tokens)]
    if params.temperature == 0:
        assert completion.tokens == log.argmax(-1).tolist()


class Letters:
    """Token i is a letter or two; 40 and up are the bytes of a three-byte character."""

    def pieces(self, token):
        return "€".encode()[token % 3 : token % 3 + 1] if token >= 40 else bytes([97 + token % 26]) * (1 + token // 26)

    def decode(self, tokens):
        return b"".join(self.pieces(t) for t in tokens).decode("utf-8", errors="replace")

    def encode(self, text):
        return [ord(c) - 97 for c in text]


def poisoned(model, **options):
    """An engine whose unwritten keys and values are NaN, so that reading one spoils the output."""
    engine = Engine(model, **options)
    for pool in (engine.cache.block, engine.cache.ends):
        if pool is not None:
            pool.k.fill_(float("nan"))
            pool.v.fill_(float("nan"))
    return engine


def assert_nothing_held(engine):
    assert engine.metrics()["pages_in_use"] == 0
    assert not engine._lengths.any() and not engine._ahead.any()
    assert sorted(engine.free_slots) == list(range(engine.max_sequences))
    assert not engine.running and not engine.waiting
