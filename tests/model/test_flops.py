"""Operations, counted by hand and by PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mor_kernels.model import MoR, MoRConfig

SMALL = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 2}  # fmt: skip
EXPERT = {"num_recursions": 2, "router": "expert_choice"}
TOKEN = {"num_recursions": 2, "router": "token_choice"}
# Multiply-adds of a token in a layer: q and o 16 each, k and v 8 each, MLP 3 * 24: 120. Head: 40 a token. Four tokens:
# 10 pairs a layer, each 4 * 2 * 2 = 16 operations. Two layers are outside the recursion, so each recursion has one.
LAYERS = 2 * 4 * (2 * 120 + 40), 2 * 10 * 16  # of those two and the head: products, attention


@pytest.mark.parametrize(
    ("fields", "kept", "products", "attention"),
    [
        ({}, None, 2 * 4 * 2 * 120, 2 * 10 * 16),
        ({"num_recursions": 2}, None, 2 * 4 * 2 * 120, 2 * 10 * 16),
        ({"num_recursions": 2, "kv": "shared"}, None, 2 * 4 * (120 + 104), 2 * 10 * 16),
        # recursions of 4 and 2 tokens; each router scores 4 tokens
        (EXPERT, None, 2 * (4 * 120 + 2 * 120 + 2 * 4 * 4), (10 + 3) * 16),
        ({**EXPERT, "kv": "shared"}, None, 2 * (4 * 120 + 2 * 104 + 2 * 4 * 4), (10 + 2 * 2.5) * 16),
        ({**EXPERT, "kv": "hybrid"}, None, 2 * (4 * 120 + 2 * 120 + 2 * 4 * 4), (10 + 2 * 2.5) * 16),
        (EXPERT, (4, 1), 2 * (4 * 120 + 1 * 120 + 2 * 4 * 4), (10 + 1) * 16),
        (EXPERT, (4, 0), 2 * (4 * 120 + 2 * 4 * 4), 10 * 16),
        ({**EXPERT, "aux": "router"}, None, 2 * (6 * 120 + 4 * 4 * 4), (10 + 3) * 16),
        ({**EXPERT, "router_arch": "mlp"}, None, 2 * (6 * 120 + 2 * 4 * (16 + 4)), (10 + 3) * 16),
        ({**EXPERT, "router_arch": "wide_mlp"}, None, 2 * (6 * 120 + 2 * 4 * (64 + 16)), (10 + 3) * 16),
        # rank 1: 4 + 4 for a query, 4 + 2 for a value
        ({**EXPERT, "lora_rank": 1}, None, 2 * (6 * (120 + 14) + 2 * 4 * 4), (10 + 3) * 16),
        ({**EXPERT, "kv": "shared", "lora_rank": 1}, None, 2 * (4 * 134 + 2 * 112 + 2 * 4 * 4), (10 + 5) * 16),
        # one router with an output a recursion; depths equally frequent
        (TOKEN, None, 2 * (4 * 120 + 2 * 120 + 4 * 4 * 2), (10 + 3) * 16),
        (TOKEN, (4, 1.5), 2 * (4 * 120 + 1.5 * 120 + 4 * 4 * 2), (10 + 1.5 * 2.5 / 2) * 16),
        ({"num_recursions": 2, "sharing": "cycle"}, None, 2 * 4 * 2 * 120, 2 * 10 * 16),
    ],
)
def test_by_hand(fields, kept, products, attention):
    config = MoRConfig(**{**SMALL, **fields})
    if fields.get("sharing") == "cycle":  # all four layers are in the block, two a recursion
        products, attention = 2 * products - 2 * 4 * 2 * 120, 2 * attention - 2 * 10 * 16
    products, attention = products + LAYERS[0], attention + LAYERS[1]
    assert config.flops(4, kept) == products + attention
    assert config.flops(4, kept, training=True) == 3 * products + 3.5 * attention
    assert isinstance(config.flops(4, kept), int)


@pytest.mark.parametrize("kv", ["recursion_wise", "shared", "hybrid"])
@pytest.mark.parametrize("fields", [{"num_recursions": 2}, EXPERT, TOKEN], ids=["fixed", "expert", "token"])
def test_products_are_those_that_pytorch_counts(fields, kv):
    """PyTorch sees linear layers; what is inside our operators (attention, the expert's score) it doesn't count."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6}
    config = MoRConfig(**{**SMALL, **fields, **sizes, "kv": kv, "initializer_range": 0.5})
    model = MoR(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        depths = model(torch.randint(50, (1, 16))).depths
    kept = [(depths > r).sum().item() for r in range(2)]
    assert config.router == "none" or 0 < kept[1] < 16
    attention = 2 * (config.flops(16, kept, training=True) - 3 * config.flops(16, kept))
    scored = 2 * 16 * 24 * 2 if config.router == "expert_choice" else 0
    assert counter.get_total_flops() == config.flops(16, kept) - attention - scored


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "length: expected an integer of at least 1, got 0"), ((4.0,), "length: .*got 4.0"),
     ((4, (4,)), "kept: expected 2 non-increasing numbers from 0 to 4"), ((4, (4, 5)), "kept: "),
     ((4, (5, 1)), "kept: ")],
)  # fmt: skip
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        MoRConfig(**SMALL, **EXPERT).flops(*arguments)
