"""Which token is chosen: the distribution that is sampled, and the backends' choices from it."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops.sample import eager
from mor_kernels.ops.sample.eager import filtered, uniform
from tests import strategies as s

MASK = 2**64 - 1


def splitmix64(state, count):
    """The published generator, in Python's whole numbers."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


def lanes(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0, device="cpu"):
    def full(value, dtype):
        return torch.as_tensor(value, dtype=dtype, device=device).expand(n)

    return (
        full(temperature, torch.float32),
        full(top_k, torch.int64),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        full(seed, torch.int64),
        full(position, torch.int64),
    )


def plain_filter(logits, temperature, top_k, top_p, min_p):
    """Hugging Face's processors, one lane, written out: probabilities by token id."""
    scores = [x / temperature for x in logits]
    if top_k:
        kth = sorted(scores, reverse=True)[min(top_k, len(scores)) - 1]
        scores = [x if x >= kth else -math.inf for x in scores]

    def softmax(values):
        peak = max(values)
        weights = [math.exp(x - peak) for x in values]
        return [w / sum(weights) for w in weights]

    if top_p < 1:
        probs = softmax(scores)
        removed, mass = set(), 0.0
        ascending = sorted(range(len(scores)), key=lambda i: (logits[i], -i))  # probabilities may be rounded to ties
        for i in ascending:
            mass += probs[i]
            if mass <= 1 - top_p:
                removed.add(i)
        removed.discard(ascending[-1])
        scores = [-math.inf if i in removed else x for i, x in enumerate(scores)]
    if min_p:
        probs = softmax(scores)
        scores = [x if p >= min_p * max(probs) else -math.inf for x, p in zip(scores, probs)]
    return softmax(scores)


def test_uniform_is_splitmix64():
    seeds = [0, 1, 42, 2**62 + 12345]
    got = uniform(torch.tensor(seeds)[:, None].expand(4, 5), torch.arange(5).expand(4, 5))
    for i, seed in enumerate(seeds):
        state = splitmix64(seed, 1)[0]
        want = [(x >> 11) * 2.0**-53 for x in splitmix64(state, 5)]
        assert got[i].tolist() == want


def test_uniform_covers_the_unit_interval_evenly():
    values = uniform(torch.arange(4096), torch.zeros(4096, dtype=torch.int64))
    assert 0 <= values.min() and values.max() < 1
    counts = torch.histc(values, 16, 0, 1)
    assert (counts - 256).abs().max() < 5 * 16  # 5 standard deviations of a count of 256


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k, top_p, min_p", [(0, 1, 0), (5, 1, 0), (0, 0.7, 0), (0, 1, 0.2), (9, 0.8, 0.1)])
def test_filters_equal_the_plain_formulas(temperature, top_k, top_p, min_p):
    logits = torch.randn(6, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    weights, tokens = filtered(logits, *lanes(6, temperature, top_k, top_p, min_p)[:4])
    by_id = torch.zeros_like(logits).scatter(1, tokens, weights.double() / weights.sum(-1, keepdim=True))
    # the parameters pass through float32, so the temperature is 1e-7 off
    t, p, m = (float(torch.tensor(x, dtype=torch.float32)) for x in (temperature, top_p, min_p))
    want = torch.tensor([plain_filter(row.tolist(), t, top_k, p, m) for row in logits], dtype=torch.float64)
    torch.testing.assert_close(by_id, want, rtol=1e-12, atol=1e-14)


def test_top_p_keeps_the_token_that_crosses_and_the_first_always():
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert (filtered(logits, *lanes(1, top_p=0.6)[:4])[0] > 0).tolist() == [[True, True, False]]
    assert (filtered(logits, *lanes(1, top_p=1e-9)[:4])[0] > 0).tolist() == [[True, False, False]]
    assert (filtered(logits, *lanes(1, top_p=1.0)[:4])[0] > 0).tolist() == [[True, True, True]]
    tied = torch.zeros(1, 4)  # two of four are half of the mass
    assert (filtered(tied, *lanes(1, top_p=0.5)[:4])[0] > 0).tolist() == [[True, True, False, False]]


def test_min_p_of_1_keeps_ties_with_the_likeliest():
    weights, tokens = filtered(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), *lanes(1, min_p=1.0)[:4])
    assert tokens[weights > 0].tolist() == [1, 3]


def test_top_k_keeps_ties_with_the_kth():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    weights, tokens = filtered(logits, *lanes(1, top_k=2)[:4])
    assert tokens.tolist() == [[1, 2, 3, 0]]
    assert (weights > 0).tolist() == [[True, True, True, False]]


def test_sample_is_the_inverse_of_the_cumulative_distribution():
    n = 2000
    logits = torch.randn(1, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).expand(n, 40)
    settings = lanes(n, 0.8, 20, 0.9, 0.01, seed=7, position=torch.arange(n))
    weights, tokens = filtered(logits, *settings[:4])
    got = ops.sample(logits, *settings)
    weights = weights[0].tolist()
    assert 1 < sum(w > 0 for w in weights) <= 20
    for i, u in enumerate(uniform(*settings[4:]).tolist()):
        mass, rank = weights[0], 0
        while mass <= Fraction(u) * sum(weights):
            rank += 1
            mass += weights[rank]
        assert got[i] == tokens[0, rank]


def test_the_ends_of_the_unit_interval(monkeypatch):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for u, token in ((0.0, 3), (1 - 2**-53, 0)):
        monkeypatch.setattr(eager, "uniform", lambda *_: torch.tensor([u], dtype=torch.float64))  # noqa: B023
        assert ops.sample(logits, *lanes(1)) == token
        assert ops.sample(logits, *lanes(1, top_k=2)) == max(token, 2)


def some_logits(kind, shape, seed, dtype):
    """Of a kind: normal ones; ties; ties, NaN and infinities; few numbers; or of all magnitudes."""
    if kind in ("tied", "special"):
        x = s.tied(shape, seed, dtype) * 3
        odd = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1))
        places = [(0.0, math.nan), (0.1, math.inf), (0.15, -math.inf), (0.25, -0.0)]
        for place, value in places if kind == "special" else ():
            x = x.masked_fill((odd >= place) & (odd < place + 0.1 / (1 + 9 * (value == math.inf))), value)
        return x
    x = s.normal(shape, seed) * 4
    if kind == "scattered":
        x *= 10.0 ** s.normal(shape, seed + 1)
    return x.to(dtype)


def some_settings(n, vocabulary, seed, positions=2000):
    """Of each lane its own; one in five is padding."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values, dtype=torch.float64):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (n,), generator=generator)]

    position = torch.randint(positions, (n,), generator=generator)
    return (
        one_of(0, 1e-320, 1e-6, 0.3, 1, 1, 2.5, 1e6, 1e308),
        one_of(0, 0, 1, 2, 9, vocabulary, vocabulary + 5, 2**40, dtype=torch.int64),
        one_of(1, 1, 1e-300, 0.25, 0.5, 0.9, 1 - 2**-53),
        one_of(0, 0, 1e-6, 0.05, 0.5, 1),
        torch.randint(2**62, (n,), generator=generator),
        torch.where(torch.randint(5, (n,), generator=generator) == 0, -1 - position, position),
    )


KINDS = ["normal", "tied", "special", "scattered"]


def plain_choices(logits, temperature, top_k, top_p, min_p, seed, position):
    """Tokens that one lane may get: more than one where a rounding decides."""
    finite = [-math.inf if math.isnan(x) else min(x, sys.float_info.max / 4) for x in logits]
    best = max(finite)
    if position < 0 or best == -math.inf:
        return {-1}
    if temperature == 0:
        return {finite.index(best)}
    scores = [x - best for x in finite]
    u = (splitmix64(splitmix64(seed, 1)[0], position + 1)[-1] >> 11) * 2.0**-53
    found = set()
    for off in (-1e-9, 0.0, 1e-9):
        p = top_p if top_p >= 1 else top_p + off * top_p
        probs = plain_filter(scores, temperature, top_k, p, min_p * (1 + off))
        mass = 0.0
        for i in sorted(range(len(probs)), key=lambda i: (-scores[i], i)):
            if probs[i] and mass - 1e-9 <= u <= mass + probs[i] + 1e-9:
                found.add(i)
            mass += probs[i]
    return found


@s.examples(60)
@given(n=st.integers(1, 4), vocabulary=st.sampled_from([1, 2, 7, 20]), seed=s.seeds, kind=st.sampled_from(KINDS))
def test_eager_equals_the_plain_formulas(n, vocabulary, seed, kind):
    logits, settings = some_logits(kind, (n, vocabulary), seed, torch.float64), some_settings(n, vocabulary, seed, 50)
    got = ops.sample(logits, *settings, backend="eager")
    for token, *lane in zip(got.tolist(), logits.tolist(), *(t.tolist() for t in settings)):
        assert token in plain_choices(*lane)


# Triton's is eager's
not_eager_on_a_cpu = pytest.mark.parametrize(
    ("device", "backend"), [t for t in s.targets("sample").args[1] if t[0] != "cpu" or t[1] == "cuda"],
    ids=lambda name: name,
)  # fmt: skip


def check(device, backend, logits, settings):
    """The same tokens as eager chooses on the CPU."""
    got = ops.sample(logits.to(device), *(t.to(device) for t in settings), backend=backend)
    assert torch.equal(got.cpu(), ops.sample(logits, *settings, backend="eager"))


@not_eager_on_a_cpu
@given(
    n=st.integers(0, 4), vocabulary=st.sampled_from([1, 2, 7, 8, 50, 97, 1000, 3001]), seed=s.seeds, dtype=s.dtypes,
    kind=st.sampled_from(KINDS), strided=st.booleans(), offset=st.integers(0, 3),
)  # fmt: skip
def test_equals_eager(device, backend, n, vocabulary, seed, dtype, kind, strided, offset):
    s.assume_served(device, backend, dtype)
    logits = some_logits(kind, (n, vocabulary), seed, dtype)
    memory = torch.full((n, 2 * vocabulary + 5), math.nan, dtype=dtype)
    view = memory[:, offset : offset + vocabulary * (1 + strided) : 1 + strided]
    view.copy_(logits)
    check(device, backend, view, some_settings(n, vocabulary, seed))


@not_eager_on_a_cpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, *s.HALVES])
def test_large_vocabularies(device, backend, dtype, kind):
    """Those that fit shared memory or not, and of more tokens than 16 bits count."""
    for vocabulary in (49152, 70001):
        check(device, backend, some_logits(kind, (4, vocabulary), 3, dtype), some_settings(4, vocabulary, vocabulary))


@s.kernels("sample", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, *s.HALVES])
def test_without_room(monkeypatch, device, backend, dtype):
    """In shared memory: for no logits and no counts; for the list of keys alone; for the counts of a few."""
    from mor_kernels.ops.sample import cuda

    for most in (0, 2**15, 2**15 + 2**8):
        monkeypatch.setattr(cuda, "MOST", most)
        for kind in ("scattered", "special"):
            check(device, backend, some_logits(kind, (3, 500), most, dtype), some_settings(3, 500, most))


@not_eager_on_a_cpu
@pytest.mark.parametrize("dtype", s.HALVES)
def test_every_number_of_16_bits(device, backend, dtype):
    """But the infinities: more distinct logits than the kernel lists."""
    logits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    logits = logits.masked_fill(logits.isinf(), math.nan).expand(4, -1)
    check(device, backend, logits, lanes(4, [0.0, 3e4, 3e38, 3e38], [0, 0, 0, 9000], position=torch.arange(4)))


@s.targets("sample")
def test_temperature_zero_is_the_first_likeliest_and_lanes_do_not_mix(device, backend):
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]], device=device).repeat(3, 1)
    settings = lanes(3, torch.tensor([0.0, 5.0, 1e-6]), seed=3, position=torch.tensor([4, 5, 6]), device=device)
    got = ops.sample(logits, *settings, backend=backend)
    assert got[0] == 1 and got[2] in (1, 2)
    for i in range(3):
        alone = slice(i, i + 1)
        assert ops.sample(logits[alone], *(t[alone] for t in settings), backend=backend) == got[i]


@s.targets("sample")
def test_batch_mates_do_not_change_a_lane(device, backend):
    """Nor where its row begins in memory, or what stands beside it."""
    logits = some_logits("normal", (6, 51), 5, torch.float32).to(device)
    settings = [t.to(device) for t in some_settings(6, 51, 6)]
    together = ops.sample(logits, *settings, backend=backend)
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    again = ops.sample(logits[order], *(t[order] for t in settings), backend=backend)
    assert torch.equal(again, together[order])


@s.targets("sample")
def test_odd_logits(device, backend):
    inf, nan = math.inf, math.nan
    logits = [[nan, 1.0, -inf, 0.0], [-inf, inf, 3.0, nan], [nan, nan, -nan, nan], [-inf, -inf, -inf, 2.0], [-inf] * 4]
    logits = torch.tensor(logits, device=device)
    for temperature in (0.0, 1.0, 1e-30):
        settings = lanes(5, temperature, seed=1, position=torch.arange(5), device=device)
        got = ops.sample(logits, *settings, backend=backend)
        assert got[0] in (1, 3) and got[1:].tolist() == [1, -1, 3, -1]


@s.targets("sample")
def test_padding_gets_no_token(device, backend):
    settings = lanes(3, [0.0, 1.0, 1.0], position=[-1, -(2**40), 2**40], device=device)
    got = ops.sample(torch.zeros(3, 1, device=device), *settings, backend=backend)
    assert got.tolist() == [-1, -1, 0]


@s.targets("sample")
def test_tokens_come_as_often_as_they_are_likely(device, backend):
    """By chi-square: above 30 with a probability of 1 in 2,000, of 10 degrees of freedom."""
    n = 4000
    if (device, backend) == ("cpu", "cuda"):
        pytest.skip("the emulator takes a tenth of a second a lane")
    logits = torch.arange(14.0, device=device).div(5).expand(n, -1)
    settings = lanes(n, 1.5, 11, seed=torch.arange(n), position=7, device=device)
    got = ops.sample(logits, *settings, backend=backend)
    want = n * (logits[0, 3:] / 1.5).softmax(-1)
    counts = torch.bincount(got, minlength=14)[3:]
    assert counts.sum() == n and ((counts - want) ** 2 / want).sum() < 30
