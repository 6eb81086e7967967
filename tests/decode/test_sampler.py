import math

import pytest
import torch

from mor_kernels.decode.sampler import SamplingParams, log_probabilities


def test_log_probabilities_are_of_the_raw_logits():
    logits = torch.randn(3, 20, dtype=torch.float64)
    chosen = torch.tensor([4, 0, 19])
    value, top, ids = log_probabilities(logits, chosen, 5)
    want = logits - logits.exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(value, want[range(3), chosen], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(top, want.sort(-1, descending=True).values[:, :5], rtol=1e-12, atol=1e-12)
    assert torch.equal(want.gather(1, ids), want.sort(-1, descending=True).values[:, :5])
    half = logits.bfloat16()  # of which logarithms are taken in fp32
    value = log_probabilities(half, chosen, 0)[0]
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), half.double().log_softmax(-1)[range(3), chosen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("max_tokens", 0, "a whole number of at least 1"),
        ("max_tokens", 2.5, "a whole number"),
        ("temperature", -0.1, "a number of at least 0"),
        ("temperature", math.nan, "a number of at least 0"),
        ("top_k", -1, "a whole number of at least 0"),
        ("top_p", 0.0, r"a number in \(0, 1\]"),
        ("top_p", 1.5, r"a number in \(0, 1\]"),
        ("min_p", 1.01, r"a number in \[0, 1\]"),
        ("seed", -1, "None or a whole number"),
        ("seed", 2**63, "None or a whole number"),
        ("logprobs", -1, "None or a whole number"),
        ("ignore_eos", 1, "True or False"),
        ("stop", "end", "a sequence of non-empty strings"),
        ("stop", [""], "a sequence of non-empty strings"),
        ("stop_token_ids", 5, "a sequence of token ids"),
        ("stop_token_ids", [-1], "a sequence of token ids"),
    ],
)
def test_wrong_parameters_are_named(name, value, expected):
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
        SamplingParams(**{name: value})
