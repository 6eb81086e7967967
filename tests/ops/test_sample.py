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


def lanes(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    def full(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(n)

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
        for i in sorted(range(len(scores)), key=lambda i: (probs[i], -i)):
            mass += probs[i]
            if mass <= 1 - top_p:
                removed.add(i)
        removed.discard(max(range(len(scores)), key=lambda i: (probs[i], -i)))
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
    got = sample(logits, *settings)
    weights = weights[0].tolist()
    assert 1 < sum(w > 0 for w in weights) <= 20
    for i, u in enumerate(uniform(*settings[4:]).tolist()):
        mass, rank = weights[0], 0
        while mass <= Fraction(u) * sum(weights):
            rank += 1
            mass += weights[rank]
        assert got[i] == tokens[0, rank]


def test_temperature_zero_is_the_first_likeliest_and_lanes_do_not_mix():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).repeat(3, 1)
    t = torch.tensor([0.0, 5.0, 1e-6])
    got = sample(logits, t, *lanes(3, seed=3, position=torch.tensor([4, 5, 6]))[1:])
    alone = [sample(logits[i : i + 1], t[i : i + 1], *lanes(1, seed=3, position=4 + i)[1:]).item() for i in range(3)]
    assert got[0] == 1 and got[2] in (1, 2)
    assert got.tolist() == alone


def test_batch_mates_do_not_change_a_lane():
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 50, generator=g)
    settings = [torch.rand(8, generator=g) + 0.5, torch.randint(0, 20, (8,), generator=g)]
    settings += [torch.rand(8, generator=g) * 0.5 + 0.5, torch.rand(8, generator=g) * 0.1]
    settings += [torch.randint(0, 2**60, (8,), generator=g), torch.randint(0, 2000, (8,), generator=g)]
    together = sample(logits, *settings)
    order = torch.randperm(8, generator=g)
    assert torch.equal(sample(logits[order], *[s[order] for s in settings]), together[order])
    for i in range(8):
        assert sample(logits[i : i + 1], *[s[i : i + 1] for s in settings]) == together[i]


def test_odd_logits():
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[nan, 1.0, -inf, 0.0], [-inf, inf, 3.0, nan], [nan, nan, nan, nan], [-inf, -inf, -inf, 2.0]])
    for temperature in (0.0, 1.0, 1e-30):
        got = sample(logits, *lanes(4, temperature, seed=1, position=torch.arange(4)))
        assert got[0] in (1, 3) and got[1:].tolist() == [1, -1, 3]


def test_zero_lanes():
    assert sample(torch.zeros(0, 10), *lanes(0)).shape == (0,)


def test_the_ends_of_the_unit_interval(monkeypatch):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for u, token in ((0.0, 3), (1 - 2**-53, 0)):
        monkeypatch.setattr(sampler, "uniform", lambda *_: torch.tensor([u], dtype=torch.float64))  # noqa: B023
        assert sample(logits, *lanes(1)) == token
        assert sample(logits, *lanes(1, top_k=2)) == max(token, 2)


