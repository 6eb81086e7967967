"""Rows of pages on every backend, with keys and values that are NaN wherever nothing was written."""

import random

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mor_kernels import ops
from mor_kernels.decode.cache import KVCache, OutOfPages, PagePool
from mor_kernels.model import MoRConfig
from mor_kernels.ops._dispatch import BACKENDS
from tests.ops.test_pages import Accounts
from tests.strategies import cu_seqlens, prefer, run_machine, targets

G, D = 2, 4


@pytest.fixture
def used(monkeypatch, device, backend):
    """The device, with a backend for everything that is called."""
    prefer(monkeypatch, backend)
    return device


every_backend = targets("take_pages_")  # Triton has all that serving needs, CUDA some
also_cuda = targets("paged_attention")


def new_pool(device, layers=1, rows=4, num_pages=8, page_size=16, max_length=64, poison=float("nan")):
    pool = PagePool(layers, rows, num_pages, page_size, max_length, G, D, torch.float32, torch.device(device))
    pool.k.fill_(poison)
    pool.v.fill_(poison)
    return pool


def new_cache(
    device, kv="recursion_wise", base="first", recursions=3, sequences=4, pages=64, page_size=4, length=64, layers=1
):
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
    cache = KVCache(config, sequences, pages, 0, page_size, torch.float32, torch.device(device))
    cache.block.k.fill_(float("nan"))
    cache.block.v.fill_(float("nan"))
    return cache


def ints(pool, *values):
    return torch.tensor(values, dtype=torch.int64, device=pool.k.device)


def offsets(pool, counts):
    return cu_seqlens(torch.tensor([*counts], dtype=torch.int64)).to(pool.k.device)


def content(*numbers):
    """Keys (n, G, d) that tell which token they belong to."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None, None] + torch.arange(G * D).view(G, D) / 128


def write(pool, layer, k, slots):
    """Keys k, as they are, and values -k."""
    k = k.to(slots.device)
    pool.append(layer, k, k, -k, slots, torch.zeros_like(slots), 1.0)


def put(pool, rows, counts, numbers, layer=0):
    rows = ints(pool, *rows)
    taken = pool.prepare(rows, offsets(pool, counts), sum(counts))
    write(pool, layer, content(*numbers), taken.slots)
    pool.commit(taken.rows, offsets(pool, counts))
    return taken.slots


def get(pool, rows, layer=0):
    """All keys of rows, one after another."""
    lengths = pool.pages.lengths[ints(pool, *rows)]
    table = pool.pages.page_table[ints(pool, *rows)]
    k, v = ops.kv_lookup(pool.k[layer], pool.v[layer], table, offsets(pool, lengths.tolist()), int(lengths.sum()))
    assert torch.equal(v, -k)
    return k.cpu()


def check_accounts(pool):
    state = pool.pages
    free = state.free_pages[: int(state.free_count)].tolist()
    owned = [p for row, n in zip(state.page_table.tolist(), state.owned.tolist()) for p in row[:n]]
    assert sorted(free + owned) == list(range(pool.num_pages))
    rest = [p for row, n in zip(state.page_table.tolist(), state.owned.tolist()) for p in row[n:]]
    assert set(rest) <= {-1}


@every_backend
def test_row_grows_over_the_end_of_a_page(used):
    pool = new_pool(used, poison=1e4)
    put(pool, [1], [15], range(15))
    for n in (15, 16):
        assert torch.equal(get(pool, [1]), content(*range(n)))
        put(pool, [1], [1], [n])
    assert torch.equal(get(pool, [1]), content(*range(17)))
    assert pool.pages.owned.tolist() == [0, 2, 0, 0]
    check_accounts(pool)


@every_backend
def test_padding_lanes_write_nowhere(used):
    pool = new_pool(used, page_size=3, num_pages=1, max_length=3)
    put(pool, [0], [3], [7, 8, 9])
    before = pool.k.clone()
    write(pool, 0, content(1, 2, 3), ints(pool, 0, -1, 2))
    assert torch.equal(pool.k[0, 0, 1], before[0, 0, 1])
    assert torch.equal(pool.k[0, 0, [0, 2]].cpu(), content(1, 3))
    before = pool.k.clone()
    write(pool, 0, content(4, 5, 6), ints(pool, -1, -1, -1))
    assert torch.equal(pool.k, before)


@every_backend
def test_rows_of_padding_take_no_page_and_do_not_grow(used):
    pool = new_pool(used, page_size=2)
    slots = put(pool, [2, -1, 0], [1, 2, 3], [1, 90, 91, 2, 3, 4])
    assert slots.tolist() == [0, -1, -1, 2, 3, 4]
    assert pool.pages.lengths.tolist() == [3, 0, 1, 0]
    assert torch.equal(get(pool, [0, 2]), content(2, 3, 4, 1))
    check_accounts(pool)
    pool.free(ints(pool, -1, 2, -1))
    assert pool.pages.lengths.tolist() == [3, 0, 0, 0]
    check_accounts(pool)
    taken = pool.prepare(ints(pool, 1), offsets(pool, [1]), 4)  # tokens past the last row's are padding
    assert (taken.slots >= 0).tolist() == [True, False, False, False] and taken.k_lens.tolist() == [1]


@every_backend
def test_empty_rows_and_no_rows(used):
    pool = new_pool(used)
    put(pool, [1], [1], [5])
    assert torch.equal(get(pool, [0, 1, 2]), content(5))
    put(pool, [0, 1], [0, 0], [])
    put(pool, [], [], [])
    pool.free(ints(pool))
    assert get(pool, []).shape == (0, G, D)
    assert int(pool.pages.owned.sum()) == 1


@every_backend
def test_a_freed_page_serves_the_next_row(used):
    pool = new_pool(used, num_pages=1)
    put(pool, [0], [16], range(16))
    pool.free(ints(pool, 0))
    put(pool, [3], [2], [50, 51])
    assert torch.equal(get(pool, [0, 3]), content(50, 51))
    check_accounts(pool)


@every_backend
def test_preparing_twice_takes_pages_once(used):
    pool = new_pool(used, page_size=2)
    first = pool.prepare(ints(pool, 0, 1), offsets(pool, [3, 2]), 5)
    again = pool.prepare(ints(pool, 0, 1), offsets(pool, [3, 2]), 5)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert int(pool.pages.free_count) == 8 - 3
    check_accounts(pool)


def refused(pool, rows, counts):
    """What a call that can't be served says; nothing may change, and nothing be written."""
    state = [t.clone() for t in pool.pages]
    arguments = (ints(pool, *rows), offsets(pool, counts), sum(counts))
    taken = ops.take_pages_(pool.pages, *arguments, pool.page_size)
    assert all(torch.equal(was, now) for was, now in zip(state, pool.pages))
    assert set(taken.slots.tolist()) == set(taken.rows.tolist()) == {-1} and not taken.k_lens.any()
    pool.commit(taken.rows, arguments[1])
    assert torch.equal(state[0], pool.pages.lengths)
    if pool.k.device.type == "cpu":  # where it costs nothing to know
        with pytest.raises((OutOfPages, ValueError)) as error:
            pool.prepare(*arguments)
        return int(taken.refused), str(error.value)
    return int(taken.refused), None


@every_backend
def test_out_of_pages_is_told_before_anything_changes(used):
    pool = new_pool(used, num_pages=3, page_size=2)
    put(pool, [0], [3], [1, 2, 3])
    assert refused(pool, [0, 1], [2, 1]) in ((1, "rows: need 2 pages, 1 of 3 are free"), (1, None))
    pool = new_pool(used, page_size=2, max_length=2)
    assert refused(pool, [0], [3]) in ((-1, "counts: a row would outgrow its 1 pages of 2 tokens"), (-1, None))


@every_backend
def test_layers_share_slots(used):
    pool = new_pool(used, layers=2)
    taken = pool.prepare(ints(pool, 2), offsets(pool, [2]), 2)
    for layer in (0, 1):
        write(pool, layer, content(layer, 10 + layer), taken.slots)
    pool.commit(taken.rows, offsets(pool, [2]))
    for layer in (0, 1):
        assert torch.equal(get(pool, [2], layer), content(layer, 10 + layer))


@every_backend
def test_ten_thousand_random_steps_leave_the_accounts_exact(used, backend):
    rng = random.Random(0)
    rows = 8
    pool = new_pool(used, rows=rows, num_pages=12, page_size=3, max_length=18)
    held = [[] for _ in range(rows)]
    fresh = 0
    refusals = 0
    steps = 10_000 if (used, backend) != ("cpu", "triton") else 50  # Triton's interpreter takes 0.1 s a step
    for step in range(steps):
        if rng.random() < 0.7:
            chosen = rng.sample(range(rows), rng.randint(0, 4))
            counts = [rng.randint(0, min(4, 18 - len(held[row]))) for row in chosen]
            numbers = list(range(fresh, fresh + sum(counts)))
            lanes = [*chosen, -1]  # and one of padding
            cu = offsets(pool, [*counts, 1])
            taken = ops.take_pages_(pool.pages, ints(pool, *lanes), cu, sum(counts) + 1, pool.page_size)
            write(pool, 0, content(*numbers, -1), taken.slots)
            pool.commit(taken.rows, cu)
            if taken.refused:
                refusals += 1
                continue
            if rng.random() < 0.05:  # a request that is cancelled
                pool.free(ints(pool, *lanes))
                counts = [0] * len(chosen)
                for row in chosen:
                    held[row] = []
            fresh += len(numbers)
            numbers = iter(numbers)
            for row, count in zip(chosen, counts):
                held[row] += [next(numbers) for _ in range(count)]
        else:
            chosen = rng.sample(range(rows), rng.randint(0, 2))
            pool.free(ints(pool, *chosen))
            for row in chosen:
                held[row] = []
        assert int(pool.pages.free_count) + int(pool.pages.owned.sum()) == pool.num_pages
        if step % 50 == 0:
            check_accounts(pool)
            assert torch.equal(get(pool, range(rows)), content(*[n for row in held for n in row]))
    assert refusals > steps / 100
    pool.free(torch.arange(rows, device=used))
    assert int(pool.pages.free_count) == pool.num_pages


STRATEGIES = [("recursion_wise", "first"), ("shared", "first"), ("hybrid", "first"), ("hybrid", "latest")]


def number(sequence, place, recursion):
    return 1000 * sequence + 10 * place + recursion


def feed(cache, runs, commits=True):
    """runs: (sequence, recursion from 1, positions); returns the keys that each run sees."""
    sequences, recursions, counts = zip(*[(s, r - 1, len(p)) for s, r, p in runs])
    positions = ints(cache.block, *[p for _, _, places in runs for p in places])
    cu = offsets(cache.block, counts)
    at = recursions[0] if len(set(recursions)) == 1 else ints(cache.block, *recursions)
    plan = cache.plan(ints(cache.block, *sequences), at, positions, cu)
    if plan.taken is not None:
        write(cache.block, 0, content(*[number(s, p, r) for s, r, places in runs for p in places]), plan.taken.slots)
    keys = cache.block.k[0].flatten(0, 1)
    seen = []
    for row, length in zip(plan.rows.tolist(), plan.k_lens.tolist()):
        if plan.by_slot:
            seen.append(keys[plan.page_table[row, :length].long()].cpu())
        else:
            index = torch.arange(length, device=keys.device)
            page_size = cache.block.page_size
            slots = plan.page_table[row, index // page_size] * page_size + index % page_size
            seen.append(keys[slots.long()].cpu())
    assert plan.by_position == (cache.kv != "recursion_wise")
    if commits:
        plan.commit()
    return seen


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


strategies = pytest.mark.parametrize("kv, base", STRATEGIES)


class Kept(RuleBasedStateMachine):
    """A pool beside accounts of its pages and the last number written to each slot; NaN is where there is none."""

    def begin(self, pool):
        state, self.pool = pool.pages, pool
        rows, max_pages = state.page_table.shape
        self.plain = Accounts(rows, pool.num_pages, max_pages, pool.page_size)
        self.memory = [[float("nan")] * (pool.num_pages * pool.page_size) for _ in pool.k]

    def note(self, layer, slots, numbers):
        for slot, number in zip(slots, numbers, strict=True):
            if slot >= 0:
                self.memory[layer][slot] = number

    @invariant()
    def nothing_else_has_changed(self):
        if not hasattr(self, "pool"):
            return
        self.plain.check(self.pool.pages)
        check_accounts(self.pool)
        for k, v, numbers in zip(self.pool.k.cpu(), self.pool.v.cpu(), self.memory):
            torch.testing.assert_close(k.flatten(0, 1), content(*numbers), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(v, -k, rtol=0, atol=0, equal_nan=True)


ROWS, LENGTH = 5, 16
some_rows = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS)
some_sequences = st.lists(st.integers(0, 2), unique=True, max_size=3)


class Rows(Kept):
    """Rows that grow, of one or several tokens, among padding; are prepared for and left; read; freed; and refused."""

    def __init__(self, device):
        super().__init__()
        self.device, self.fresh, self.held = device, 0, [[] for _ in range(ROWS)]

    @initialize(layers=st.integers(1, 2), pages=st.integers(1, 12), page_size=st.integers(1, 5), most=st.integers(1, 4))
    def new(self, layers, pages, page_size, most):
        self.begin(new_pool(self.device, layers, ROWS, pages, page_size, most * page_size))

    @rule(
        rows=some_rows, counts=st.lists(st.integers(0, 6), min_size=ROWS + 1, max_size=ROWS + 1),
        padding=st.none() | st.integers(0, ROWS), slack=st.integers(0, 2), commits=st.booleans(),
    )  # fmt: skip
    def grow(self, rows, counts, padding, slack, commits):
        if padding is not None:
            rows = [*rows[:padding], -1, *rows[padding:]]
        counts, pool = counts[: len(rows)], self.pool
        lanes, cu, total = ints(pool, *rows), offsets(pool, counts), sum(counts) + slack
        taken = ops.take_pages_(pool.pages, lanes, cu, total, pool.page_size)
        slots, refused = self.plain.take(rows, counts)
        assert int(taken.refused) == refused
        if refused and self.device == "cpu":
            with pytest.raises(OutOfPages if refused > 0 else ValueError):
                pool.prepare(lanes, cu, total)
        slots = [*(slots or [-1] * sum(counts)), *[-1] * slack]
        assert taken.slots.tolist() == slots
        numbers = list(range(self.fresh, self.fresh + total))
        self.fresh += total
        for layer in range(len(pool.k)):
            write(pool, layer, content(*numbers) + 1000 * layer, taken.slots)
            self.note(layer, slots, [number + 1000 * layer for number in numbers])
        if commits:
            pool.commit(taken.rows, cu)
            numbers = iter(numbers)
            for row, count in zip(rows, counts):
                new = [next(numbers) for _ in range(count)]
                if row >= 0 and not refused:
                    self.held[row] += new
                    self.plain.lengths[row] += count

    @rule(rows=some_rows)
    def read(self, rows):
        for layer in range(len(self.pool.k)):
            numbers = [number + 1000 * layer for row in rows for number in self.held[row]]
            assert torch.equal(get(self.pool, rows, layer), content(*numbers))

    @rule(rows=some_rows, padding=st.integers(0, 2))
    def free(self, rows, padding):
        self.pool.free(ints(self.pool, *rows, *[-1] * padding))
        self.plain.give_back(rows)
        for row in rows:
            self.held[row] = []


class Sequences(Kept):
    """Sequences of tokens that end at any depth, in chunks and one by one, at the recursions that each has reached."""

    def __init__(self, device, kv, base):
        super().__init__()
        self.device, self.kv, self.base = device, kv, base
        self.depths = [[] for _ in range(3)]  # of tokens that have got there
        self.at = [None] * 3  # of a token on its way: the recursion that it takes next, and its depth

    @initialize(pages=st.integers(3, 40), page_size=st.integers(1, 4))
    def new(self, pages, page_size):
        sizes = {"sequences": 3, "pages": pages, "page_size": page_size, "length": LENGTH}
        self.cache = new_cache(self.device, self.kv, self.base, **sizes)
        self.begin(self.cache.block)

    def feed(self, runs, commits=True):
        """Whether there was room; compares what each run sees."""
        rows = [s if self.kv == "shared" else 3 * s + r - 1 for s, r, _ in runs]
        rows = [-1 if s < 0 or self.kv == "shared" and r > 1 else row for row, (s, r, _) in zip(rows, runs)]
        slots, refused = self.plain.take(rows, [len(places) for *_, places in runs])
        if refused:
            if self.device == "cpu":
                with pytest.raises(OutOfPages):
                    feed(self.cache, runs)
            else:
                feed(self.cache, runs)
            return False
        self.note(0, slots, [number(s, p, r) for s, r, places in runs for p in places])
        seen = feed(self.cache, runs, commits)
        for (s, r, _), keys in zip(runs, seen):
            depths = [] if s < 0 else self.depths[s] + [r] * (self.at[s] is not None)  # that token has got no further
            assert torch.equal(keys, expected(self.kv, self.base, {s: depths}, s, r, len(depths)))
        if commits:
            for row, (*_, places) in zip(rows, runs):
                if row >= 0:
                    self.plain.lengths[row] += len(places)
        return True

    @rule(
        sequences=some_sequences, depths=st.lists(st.lists(st.integers(1, 3), max_size=7), min_size=3, max_size=3),
        commits=st.booleans(),
    )  # fmt: skip
    def chunk(self, sequences, depths, commits):
        sequences = [s for s in sequences if self.at[s] is None]
        first = {s: len(self.depths[s]) for s in sequences}
        for s in sequences:
            self.depths[s] = (self.depths[s] + depths[s])[:LENGTH]
        for r in (1, 2, 3):
            places = {s: [p for p in range(first[s], len(self.depths[s])) if self.depths[s][p] >= r] for s in sequences}
            runs = [(s, r, places[s]) for s in sequences if places[s]]
            if runs and not self.feed(runs, commits):
                self.free([s for s, *_ in runs])
                return
            if not commits:  # nothing has come of it
                for s in sequences:
                    del self.depths[s][first[s] :]
                return

    @rule(
        sequences=some_sequences, depths=st.lists(st.integers(1, 3), min_size=3, max_size=3),
        padding=st.none() | st.integers(0, 3), commits=st.booleans(),
    )  # fmt: skip
    def tick(self, sequences, depths, padding, commits):
        sequences = [s for s in sequences if len(self.depths[s]) < LENGTH]
        for s in sequences:
            self.at[s] = self.at[s] or (1, depths[s])
        runs = [(s, self.at[s][0], [len(self.depths[s])]) for s in sequences]
        if padding is not None:
            runs.insert(padding, (-1, 1, [0]))
        if not runs or not self.feed(runs, commits) or not commits:
            return
        for s in sequences:
            r, depth = self.at[s]
            self.at[s] = (r + 1, depth) if r < depth else None
            if r == depth:
                self.depths[s].append(depth)

    @rule(sequences=some_sequences, padding=st.booleans())
    def free(self, sequences, padding=False):
        self.cache.free(ints(self.cache.block, *sequences, *[-1] * padding))
        for s in sequences:
            self.plain.give_back([s] if self.kv == "shared" else range(3 * s, 3 * s + 3))
            self.depths[s], self.at[s] = [], None


def number_of_examples(device, backend):
    """Of a machine; Triton's interpreter takes 0.1 s a step."""
    return {"number": 3, "steps": 8} if (device, backend) == ("cpu", "triton") else {"number": 10, "steps": 25}


@every_backend
@pytest.mark.machine
def test_rows_keep_what_plain_accounts_say(used, backend):
    run_machine(Rows, used, **number_of_examples(used, backend))


@every_backend
@strategies
@pytest.mark.machine
def test_sequences_see_what_plain_accounts_say(used, backend, kv, base):
    run_machine(Sequences, used, kv, base, **number_of_examples(used, backend))


@also_cuda
@strategies
def test_mixed_depths_in_one_call_equal_one_by_one(used, kv, base):
    """Three sequences at recursions 1, 2 and 3 with 1, 5 and 17 keys, and a lane of padding; NaN in every free slot."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, D, generator=g).to(used)
    k, v = torch.randn(2, 4, G, D, generator=g).to(used)
    history = torch.randn(3, 3, 17, G, D, generator=g).to(used)
    lengths = (1, 5, 17)

    def attend(groups):
        cache = new_cache(used, kv, base, page_size=16)

        def run(sequences, recursions, positions, q, k, v, cu=None):
            sequences, recursions, positions = (ints(cache.block, *t) for t in (sequences, recursions, positions))
            plan = cache.plan(sequences, recursions, positions, cu)
            projected = torch.cat((q, k, v), 1)
            out = plan.attend(0, lambda keys=True: projected if keys else q, 4, positions, 100.0)
            plan.commit()
            return out

        for s, length in enumerate(lengths):
            for r in range(1, s + 2):  # all tokens but the newest took s+1 recursions; the newest is about to take it
                count = length if r <= s else length - 1
                if count:
                    old = history[s, r - 1, :count]
                    cu = offsets(cache.block, [count])
                    run([s], [r - 1], range(count), torch.zeros(count, 4, D, device=used), old, old, cu)
        out = torch.full_like(q, torch.nan)
        for group in groups:
            sequences = [s if s < 3 else -1 for s in group]
            positions = [lengths[s] - 1 if s < 3 else 0 for s in group]
            lanes = list(group)
            out[lanes] = run(sequences, [s % 3 for s in group], positions, q[lanes], k[lanes], v[lanes])
        return out

    together = attend([(0, 1, 3, 2)])
    # the same sums in fp32, in another order
    torch.testing.assert_close(together, attend([(0,), (1,), (2,), (3,)]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together[0], v[0].repeat_interleave(2, 0), rtol=1e-6, atol=1e-6)
    assert not together[3].any()


def test_bytes():
    """Everything is counted, and a page's share of it is exact."""
    for dtype, scales in ((torch.bfloat16, 0), (torch.float8_e4m3fn, 2 * 5 * G * 4)):
        pool = PagePool(5, 6, 10, 4, 64, G, D, dtype, torch.device("cpu"))
        page = 2 * 5 * 4 * G * D * dtype.itemsize
        state = 6 * 8 + 6 * 8 + 6 * 16 * 4 + 10 * 4 + 8  # lengths, owned, page table, free pages, their count
        assert pool.nbytes == 10 * page + scales + state
    cache = new_cache("cpu", "hybrid")
    assert cache.nbytes == cache.block.nbytes + 5 * 3 * 64 * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@strategies
def test_a_graph_replays_over_pages_and_lanes(monkeypatch, backend, kv, base):
    """Captured at length 1 with eight lanes; replayed past two pages, with eight lanes and then with three."""
    prefer(monkeypatch, backend)
    sequences, depth = 8, 3
    g = torch.Generator().manual_seed(0)

    def steps():
        """What one tick of lanes at different recursions computes, by sequence; a list for each of 40 ticks."""
        rng = random.Random(1)
        at = [(0, 0)] * sequences  # recursion, position
        for tick in range(40):
            lanes = range(sequences) if tick < 25 else [1, 4, 6]
            yield [(s, *at[s]) for s in lanes]
            for s in lanes:
                recursion, position = at[s]
                on = recursion + 1 < depth and rng.random() < 0.6
                at[s] = (recursion + 1, position) if on else (0, position + 1)

    inputs = [torch.randn(3, sequences, 4, D, generator=g).cuda() for _ in range(40)]

    def run(replayed):
        cache = new_cache("cuda", kv, base, sequences=sequences, pages=128, page_size=4)
        lanes = torch.full((3, sequences), -1, device="cuda")
        q, k, v = inputs[0].clone()

        def tick():
            plan = cache.plan(lanes[0], lanes[1].clamp(min=0), lanes[2].clamp(min=0))
            projected = torch.cat((q, k[:, :G], v[:, :G]), 1)
            out = plan.attend(0, lambda keys=True: projected if keys else q, 4, lanes[2].clamp(min=0), 100.0)
            plan.commit()
            return out, plan.taken.refused

        graph, results = None, []
        for step, (active, values) in enumerate(zip(steps(), inputs)):
            lanes.fill_(-1)
            lanes[:, : len(active)] = torch.tensor(active, device="cuda").T
            for target, value in zip((q, k, v), values):
                target.copy_(value)
            if replayed and step:
                if graph is None:
                    graph = torch.cuda.CUDAGraph()
                    state = [t.clone() for t in (*cache.block.pages, cache.block.k)]
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph):
                        out, refused = tick()
                    assert all(torch.equal(a, b) for a, b in zip(state[:-1], cache.block.pages))
                graph.replay()
            else:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    out, refused = tick()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            assert refused == 0
            results.append(out[: len(active)].clone())
            assert not out[len(active) :].any()
        return results, cache

    (plain, one), (replayed, other) = run(False), run(True)
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(plain, replayed))
    assert all(torch.equal(a, b) for a, b in zip(one.block.pages, other.block.pages))
    assert one.block.pages.lengths.max() > 8
