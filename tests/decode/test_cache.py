import random

import pytest
import torch

from mor_kernels.decode.cache import KVCache, OutOfPages, PagePool
from mor_kernels.model import MoRConfig

G, D = 2, 4


def new_pool(layers=1, rows=4, num_pages=8, page_size=16, max_length=64, dtype=torch.float64, poison=float("nan")):
    pool = PagePool(layers, rows, num_pages, page_size, max_length, G, D, dtype, torch.device("cpu"))
    pool.k.fill_(poison)
    pool.v.fill_(poison)
    return pool


def new_cache(kv="recursion_wise", base="first", recursions=3, sequences=4, pages=64, page_size=4, length=64, layers=1):
    config = MoRConfig(
        num_hidden_layers=recursions * layers,
        num_recursions=recursions,
        sharing="cycle",
        kv=kv,
        hybrid_base=base,
        max_position_embeddings=length,
        num_attention_heads=2 * G,
        num_key_value_heads=G,
        head_dim=D,
    )
    cache = KVCache(config, sequences, pages, 0, page_size, torch.float64, torch.device("cpu"))
    cache.block.k.fill_(float("nan"))
    cache.block.v.fill_(float("nan"))
    return cache


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def content(*numbers):
    """Keys (n, G, d) that tell which token they belong to."""
    return torch.tensor(numbers, dtype=torch.float64)[:, None, None] + torch.arange(G * D).view(G, D) / 100


def put(pool, rows, counts, numbers, layer=0):
    slots = pool.prepare(ints(*rows), ints(*counts))
    k = content(*numbers)
    pool.append(layer, k, -k, slots)
    pool.commit(ints(*rows), ints(*counts))
    return slots


def get(pool, rows, layer=0):
    lengths = pool.lengths[ints(*rows)]
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    k, v = pool.lookup(layer, pool.page_table[ints(*rows)], cu, int(cu[-1]))
    assert torch.equal(v, -k)
    return k


def check_accounts(pool):
    free = pool.free_pages[: int(pool.free_count)].tolist()
    owned = [p for row, n in zip(pool.page_table.tolist(), pool.owned.tolist()) for p in row[:n]]
    assert sorted(free + owned) == list(range(pool.num_pages))
    rest = [p for row, n in zip(pool.page_table.tolist(), pool.owned.tolist()) for p in row[n:]]
    assert set(rest) <= {-1}


def test_row_grows_over_the_end_of_a_page():
    pool = new_pool(poison=1e4)
    put(pool, [1], [15], range(15))
    for n in (15, 16):
        assert torch.equal(get(pool, [1]), content(*range(n)))
        put(pool, [1], [1], [n])
    assert torch.equal(get(pool, [1]), content(*range(17)))
    assert pool.owned.tolist() == [0, 2, 0, 0]
    check_accounts(pool)


def test_padding_lanes_write_nowhere():
    pool = new_pool(page_size=3, num_pages=1, max_length=3)
    put(pool, [0], [3], [7, 8, 9])
    before = pool.k.clone()
    pool.append(0, content(1, 2, 3), content(1, 2, 3), ints(0, -1, 2))
    assert torch.equal(pool.k[0, 0, 1], before[0, 0, 1])
    assert torch.equal(pool.k[0, 0, [0, 2]], content(1, 3))
    before = pool.k.clone()
    pool.append(0, content(4, 5, 6), content(4, 5, 6), ints(-1, -1, -1))
    assert torch.equal(pool.k, before)


def test_rows_of_padding_take_no_page_and_do_not_grow():
    pool = new_pool(page_size=2)
    assert put(pool, [2, -1, 0], [1, 2, 3], [1, 90, 91, 2, 3, 4]).tolist() == [0, -1, -1, 2, 3, 4]
    assert pool.lengths.tolist() == [3, 0, 1, 0]
    assert torch.equal(get(pool, [0, 2]), content(2, 3, 4, 1))
    check_accounts(pool)


def test_empty_rows_and_no_rows():
    pool = new_pool()
    put(pool, [1], [1], [5])
    assert torch.equal(get(pool, [0, 1, 2]), content(5))
    put(pool, [0, 1], [0, 0], [])
    put(pool, [], [], [])
    assert get(pool, []).shape == (0, G, D)
    assert int(pool.owned.sum()) == 1


def test_a_freed_page_serves_the_next_row():
    pool = new_pool(num_pages=1)
    put(pool, [0], [16], range(16))
    pool.free(ints(0))
    put(pool, [3], [2], [50, 51])
    assert torch.equal(get(pool, [0, 3]), content(50, 51))
    check_accounts(pool)


def test_preparing_twice_takes_pages_once():
    pool = new_pool(page_size=2)
    first = pool.prepare(ints(0, 1), ints(3, 2))
    assert torch.equal(pool.prepare(ints(0, 1), ints(3, 2)), first)
    assert int(pool.free_count) == 8 - 3
    check_accounts(pool)


def test_out_of_pages_is_told_before_anything_changes():
    pool = new_pool(num_pages=3, page_size=2)
    put(pool, [0], [3], [1, 2, 3])
    state = [t.clone() for t in (pool.page_table, pool.owned, pool.lengths, pool.free_pages, pool.free_count)]
    with pytest.raises(OutOfPages, match="need 2 pages, 1 of 3 are free"):
        pool.prepare(ints(0, 1), ints(2, 1))
    for was, now in zip(state, (pool.page_table, pool.owned, pool.lengths, pool.free_pages, pool.free_count)):
        assert torch.equal(was, now)
    with pytest.raises(ValueError, match="outgrow its 1 pages of 2 tokens"):
        new_pool(page_size=2, max_length=2).prepare(ints(0), ints(3))


def test_layers_share_slots():
    pool = new_pool(layers=2)
    slots = pool.prepare(ints(2), ints(2))
    for layer in (0, 1):
        pool.append(layer, content(layer, 10 + layer), -content(layer, 10 + layer), slots)
    pool.commit(ints(2), ints(2))
    for layer in (0, 1):
        assert torch.equal(get(pool, [2], layer), content(layer, 10 + layer))


def test_ten_thousand_random_steps_leave_the_accounts_exact():
    rng = random.Random(0)
    rows = 8
    pool = new_pool(rows=rows, num_pages=12, page_size=3, max_length=18)
    held = [[] for _ in range(rows)]
    fresh = 0
    refused = 0
    for step in range(10_000):
        if rng.random() < 0.7:
            chosen = rng.sample(range(rows), rng.randint(0, 4))
            counts = [rng.randint(0, min(4, 18 - len(held[row]))) for row in chosen]
            numbers = list(range(fresh, fresh + sum(counts)))
            try:
                slots = pool.prepare(ints(*chosen), ints(*counts))
            except OutOfPages:
                refused += 1
                continue
            if rng.random() < 0.05:  # given up between prepare and commit
                pool.free(ints(*chosen))
                counts = [0] * len(chosen)
                for row in chosen:
                    held[row] = []
            else:
                k = content(*numbers)
                pool.append(0, k, -k, slots)
                pool.commit(ints(*chosen), ints(*counts))
            fresh += len(numbers)
            numbers = iter(numbers)
            for row, count in zip(chosen, counts):
                held[row] += [next(numbers) for _ in range(count)]
        else:
            chosen = rng.sample(range(rows), rng.randint(0, 2))
            pool.free(ints(*chosen))
            for row in chosen:
                held[row] = []
        assert int(pool.free_count) + int(pool.owned.sum()) == pool.num_pages
        if step % 50 == 0:
            check_accounts(pool)
            assert torch.equal(get(pool, range(rows)), content(*[n for row in held for n in row]))
    assert refused > 100
    pool.free(torch.arange(rows))
    assert int(pool.free_count) == pool.num_pages


STRATEGIES = [("recursion_wise", "first"), ("shared", "first"), ("hybrid", "first"), ("hybrid", "latest")]


def number(sequence, place, recursion):
    return 1000 * sequence + 10 * place + recursion


def feed(cache, runs):
    """runs: (sequence, recursion from 1, positions); returns the plan and the keys that each run sees."""
    sequences, recursions, counts = (ints(*column) for column in zip(*[(s, r - 1, len(p)) for s, r, p in runs]))
    plan = cache.plan(sequences, recursions, counts, ints(*[p for _, _, places in runs for p in places]))
    seen = []

    def attend():
        k = content(*[number(s, p, r) for s, r, places in runs for p in places])
        if plan.slots is not None:
            cache.block.append(0, k, -k, plan.slots)
        if plan.source is None:
            k, _ = cache.block.lookup(0, plan.pages, plan.cu_keys, plan.total)
        else:
            k = cache.block.k[0].flatten(0, 1)[plan.source]
        seen.extend(k[a:b] for a, b in zip(plan.cu_keys[:-1], plan.cu_keys[1:]))

    attend()
    plan.commit()
    return plan, seen


def expected(kv, base, depths, sequence, recursion, upto):
    """Keys that recursion `recursion` sees in a sequence whose first `upto` tokens have these depths."""
    numbers = []
    for place in range(upto):
        depth = depths[sequence][place]
        if kv == "recursion_wise":
            if depth >= recursion:
                numbers.append(number(sequence, place, recursion))
        elif kv == "shared":
            numbers.append(number(sequence, place, 1))
        elif depth >= recursion:
            numbers.append(number(sequence, place, recursion))
        else:
            numbers.append(number(sequence, place, 1 if base == "first" else depth))
    return content(*numbers)


@pytest.mark.parametrize("kv, base", STRATEGIES)
def test_each_strategy_sees_the_right_entries(kv, base):
    rng = random.Random(3)
    cache = new_cache(kv, base)
    depths = [[rng.randint(1, 3) for _ in range(40)] for _ in range(4)]
    done = [0] * 4
    # chunks of several sequences, recursion by recursion
    for chunks in ([3, 0, 7, 1], [0, 5, 1, 9], [6, 2, 1, 1]):
        for r in (1, 2, 3):
            runs = []
            for s in range(4):
                places = [p for p in range(done[s], done[s] + chunks[s]) if depths[s][p] >= r]
                if places:
                    runs.append((s, r, places))
            plan, seen = feed(cache, runs)
            for (s, _, _), keys in zip(runs, seen):
                assert torch.equal(keys, expected(kv, base, depths, s, r, done[s] + chunks[s]))
            if kv != "recursion_wise":
                assert plan.query_index.tolist() == [p for _, _, places in runs for p in places]
        done = [a + b for a, b in zip(done, chunks)]
    # single tokens at mixed recursions
    at = [1] * 4
    for _ in range(30):
        runs = [(s, at[s], [done[s]]) for s in range(4)]
        _, seen = feed(cache, runs)
        for s, r, (place,) in runs:
            shallow = [d[:place] + [r] for d in depths]  # this token has got no further than r
            assert torch.equal(seen[s], expected(kv, base, shallow, s, r, place + 1))
            at[s] += 1
            if at[s] > depths[s][place]:
                at[s], done[s] = 1, place + 1
        check_accounts(cache.block)
    for s in range(4):
        cache.free(s)
    assert int(cache.block.free_count) == cache.block.num_pages


@pytest.mark.parametrize("kv, base", STRATEGIES)
def test_mixed_depths_in_one_call_equal_one_by_one(kv, base):
    """Three sequences at recursions 1, 2 and 3 with 1, 5 and 17 keys."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, D, dtype=torch.float64, generator=g)
    k, v = torch.randn(2, 3, G, D, dtype=torch.float64, generator=g)
    history = torch.randn(3, 3, 17, G, D, dtype=torch.float64, generator=g)
    lengths = (1, 5, 17)

    def attend(groups):
        cache = new_cache(kv, base, page_size=16)
        for s, length in enumerate(lengths):
            for r in range(1, s + 2):  # all tokens but the newest took s+1 recursions; the newest is about to take it
                count = length if r <= s else length - 1
                if count:
                    plan = cache.plan(ints(s), ints(r - 1), ints(count), torch.arange(count))
                    plan.attend(0, torch.zeros(count, 4, D).double(), lambda: [history[s, r - 1, :count]] * 2)  # noqa: B023
                    plan.commit()
        out = torch.empty_like(q)
        for group in groups:
            lanes = ints(*group)
            plan = cache.plan(lanes, lanes, torch.ones_like(lanes), ints(*[lengths[s] - 1 for s in group]))
            out[lanes] = plan.attend(0, q[lanes], lambda: (k[lanes], v[lanes]))  # noqa: B023
            plan.commit()
        return out

    together = attend([(0, 1, 2)])
    torch.testing.assert_close(together, attend([(0,), (1,), (2,)]), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(together[0], v[0].repeat_interleave(2, 0), rtol=1e-13, atol=1e-14)


def test_bytes():
    cache = new_cache(layers=5, pages=10, page_size=4)
    assert cache.nbytes == 2 * 5 * 10 * 4 * G * D * 8
