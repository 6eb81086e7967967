"""The end of a tick against accounts kept lane by lane in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops.advance._fields import FIELDS
from tests import strategies as s
from tests.ops.calls import Recorder
from tests.ops.test_pages import Accounts

STOPS = 2


class Pool(Accounts):
    def place(self, row):
        page, offset = divmod(self.lengths[row], self.page_size)
        if page >= self.max_pages:
            return -1
        if page == len(self.pages[row]):
            if not self.free:
                return -1
            self.pages[row].append(self.free.pop())
        return self.pages[row][page] * self.page_size + offset


class Plain:
    def __init__(self, slots, recursions, shared, block, ends):
        self.recursions, self.shared, self.block, self.ends = recursions, shared, block, ends
        idle = dict.fromkeys(("recursion", "feed", "row", "slot", "line", "place", "waits", "end"), -1)
        idle |= {"position": 0, "stops": [-1] * STOPS, "keys": 0, "end_keys": 0}
        self.lanes = [dict(idle) for _ in range(slots)]

    def at_ends(self, goes_on, size):
        """The lanes at the places of last and first layer."""
        through = [i for i, lane in enumerate(self.lanes[: len(goes_on)]) if lane["line"] >= 0 and not goes_on[i]]
        fed = [i for i, lane in enumerate(self.lanes[: len(goes_on)]) if lane["feed"] >= 0]
        waited = [i for i in through if self.lanes[i]["waits"] >= 0]
        return (waited + sorted(set(through + fed) - set(waited)))[:size]

    def advance(self, chosen, goes_on, at_ends):
        """Records, and tokens that enter, by lane; chosen by place."""
        records, entering, n, given = [], {}, len(goes_on), []
        for i, (lane, on) in enumerate(zip(self.lanes, goes_on)):
            passed, there = lane["recursion"] >= 0, i in at_ends
            token = chosen[at_ends.index(i)] if there else None
            through = lane["line"] >= 0 and not on
            leaves = through and there
            taken = lane["recursion"] + 1 if passed else lane["waits"]
            lane["waits"] = taken if through and not there else -1
            ended = leaves and (token < 0 or token in lane["stops"] or lane["position"] + 2 >= lane["end"])
            records.append([token if leaves else -2, taken if passed or leaves else 0])
            if ended:
                given.append(i)
            elif passed and lane["slot"] >= 0:
                self.block.lengths[lane["row"]] += 1
            if leaves and not ended and lane["place"] >= 0:
                self.ends.lengths[i] += 1
            if there and lane["feed"] >= 0:
                entering[i] = lane["feed"]
                lane["feed"] = -1
            elif leaves and not ended:
                entering[i] = token
                lane["position"] += 1
            passes = i in entering or (passed and on)
            lane["recursion"] = 0 if i in entering else lane["recursion"] + 1 if passes else -1
            lane["line"] = i if passes or lane["waits"] >= 0 else -1
            records[-1].append(lane["recursion"])
        each = 1 if self.shared else self.recursions
        self.block.give_back([i * each + r for i in given for r in range(each)])
        if self.ends:
            self.ends.give_back(given)
        for i, lane in enumerate(self.lanes[:n]):  # each pool's pages are taken in the order of the lanes
            at_work, passes, first = lane["line"] >= 0, lane["recursion"] >= 0, lane["recursion"] == 0
            if self.ends:
                if i in entering:
                    lane["place"] = self.ends.place(i)
                elif not at_work:
                    lane["place"] = -1
                lane["end_keys"] = lane["position"] + 1 if at_work else 0
            own = i if self.shared else i * self.recursions + lane["recursion"]
            lane["row"] = own if passes and (first or not self.shared) else -1
            lane["slot"] = self.block.place(lane["row"]) if lane["row"] >= 0 else -1
            lane["keys"] = self.block.lengths[own] + (lane["slot"] >= 0) if passes else 0
        return records, entering

    def check(self, lanes):
        for name in ("recursion", "feed", "row", "slot", "line", "place", "waits", "position", "end"):
            assert lanes.row(name).tolist() == [lane[name] for lane in self.lanes], name
        assert lanes.k_lens.tolist() == [[lane[name] for lane in self.lanes] for name in ("keys", "end_keys")]


def begin(lanes, plain, slot, token, position, end, stops):
    column = [-1, token, -1, -1, -1, -1, -1, position, end, *stops]
    lanes.table[:, slot] = torch.tensor(column, device=lanes.table.device)
    plain.lanes[slot] |= {"recursion": -1, "feed": token, "row": -1, "slot": -1, "line": -1, "place": -1,
                          "waits": -1, "position": position, "end": end, "stops": stops}  # fmt: skip


@s.targets("advance_")
@given(seed=s.seeds, slots=st.sampled_from([1, 2, 7]), recursions=st.integers(1, 3), shared=st.booleans(),
       with_ends=st.booleans(), page_size=st.integers(1, 4))  # fmt: skip
def test_equals_plain_accounts(device, backend, seed, slots, recursions, shared, with_ends, page_size):
    """Lanes that go on, leave, wait, end, begin and are freed; pages that run out, and full page tables."""
    check(device, backend, seed, slots, recursions, shared, with_ends, page_size, ticks=6)


@s.targets("advance_")
@pytest.mark.parametrize("shared", [False, True])
def test_more_lanes_than_are_looked_at_together(device, backend, shared):
    check(device, backend, 3, 530, 2, shared, True, 2, ticks=3)


def check(device, backend, seed, slots, recursions, shared, with_ends, page_size, ticks):
    rng = random.Random(seed)
    rows, max_pages = slots * (1 if shared else recursions), rng.choice([1, 6])
    sizes = ((rows, rng.choice([1, rows * max_pages]), max_pages), (slots, slots * max_pages, max_pages))
    block, ends = (ops.Pages.new(*size, device) for size in sizes)
    plain = Plain(
        slots, recursions, shared, Pool(*sizes[0], page_size), Pool(*sizes[1], page_size) if with_ends else None
    )
    lanes, record = ops.Lanes.new(slots, STOPS, device), torch.full((2, slots, 3), -9, device=device)
    for tick in range(ticks):
        n = rng.choice([slots, rng.randint(0, slots)])
        for slot in range(n):
            if plain.lanes[slot]["line"] < 0 and plain.lanes[slot]["feed"] < 0 and rng.random() < 0.6:
                plain.block.give_back([slot] if shared else range(slot * recursions, (slot + 1) * recursions))
                freed = torch.tensor([slot], device=device)
                each = 1 if shared else recursions
                ops.free_pages_(block, freed * each + torch.arange(each, device=device), backend=backend)
                if with_ends:
                    plain.ends.give_back([slot])
                    ops.free_pages_(ends, freed, backend=backend)
                begin(lanes, plain, slot, rng.randrange(5), 0, rng.randint(2, 9), [rng.randint(-1, 4), -1])
        goes_on = [lane["recursion"] >= 0 and lane["recursion"] + 1 < recursions and rng.random() < 0.5
                   for lane in plain.lanes[:n]]  # fmt: skip
        size, going = rng.choice([None, rng.randint(0, n)]), torch.tensor(goes_on, device=device).bool()
        at, places = None, list(range(n))
        if size is not None:
            x = s.normal((n, 10), tick, rng.choice([torch.float32, torch.bfloat16])).to(device)
            x = x[:, ::2] if tick % 2 else x[:, :5]
            leaving = ops.leave(going, lanes, x, size, backend=backend)
            places, at = plain.at_ends(goes_on, size), leaving.at
            assert at.tolist() == [places.index(i) if i in places else -1 for i in range(n)]
            padding = torch.zeros(STOPS + len(FIELDS), size - len(places), dtype=torch.int64)
            padding[: len(FIELDS)] = -1
            assert torch.equal(leaving.columns.cpu(), torch.cat((lanes.table[:, places].cpu(), padding), 1))
            assert torch.equal(leaving.x, torch.cat((x[places], x.new_zeros(size - len(places), 5))))
            assert leaving.k_lens.tolist() == lanes.k_lens[1, places].tolist() + [0] * (size - len(places))
        chosen = [rng.randint(-1, 4) for _ in range(n if size is None else size)]
        got = ops.advance_(
            torch.tensor(chosen, device=device).long(), going, at, lanes, record, block, ends if with_ends else None,
            recursions, page_size, shared=shared, backend=backend,
        )  # fmt: skip
        records, entering = plain.advance(chosen, goes_on, places)
        assert record[tick % 2, :n].tolist() == records and lanes.ticks == tick + 1
        places += [None] * (len(chosen) - len(places))  # padding
        idle, own = {"position": 0, "place": -1}, [plain.lanes[i] if i in entering else None for i in places]
        assert got.lanes.tolist() == [-1 if lane is None else i for i, lane in zip(places, own)]
        assert got.positions.tolist() == [(lane or idle)["position"] for lane in own]
        assert got.k_lens.tolist() == [lane["position"] + 1 if lane else 0 for lane in own]
        assert got.slots.tolist() == [(lane or idle)["place"] for lane in own]
        assert all(token >= 0 for token in got.ids.tolist())
        ids = [token for token, lane in zip(got.ids.tolist(), own) if lane]
        assert ids == [entering[i] for i, lane in zip(places, own) if lane]
        plain.check(lanes)
        plain.block.check(block)
        if with_ends:
            plain.ends.check(ends)


@s.targets("advance_")
def test_where_no_page_is_free(device, backend):
    """The later lanes get no place, and nothing is written past what there is."""
    lanes, block = ops.Lanes.new(3, STOPS, device), ops.Pages.new(3, 2, 2, device)
    plain = Plain(3, 1, False, Pool(3, 2, 2, 4), None)
    for slot in range(3):
        begin(lanes, plain, slot, slot, 0, 9, [-1, -1])
    none, record = (torch.zeros(*shape, dtype=torch.int64, device=device) for shape in [(3,), (1, 3, 3)])
    ops.advance_(none, none > 0, None, lanes, record, block, None, 1, 4, backend=backend)
    plain.advance([0] * 3, [False] * 3, [0, 1, 2])
    plain.check(lanes)
    plain.block.check(block)
    assert lanes.row("slot").tolist() == [0, 4, -1]


def state(device):
    lanes = ops.Lanes.new(4, STOPS, device)
    lanes.table[:, 1] = torch.tensor([-1, 3, -1, -1, -1, -1, -1, 0, 5, -1, -1], device=device)
    lanes.table[:, 2] = torch.tensor([0, -1, 4, 8, 2, 4, -1, 6, 9, 1, -1], device=device)
    return (
        lanes,
        torch.zeros(2, 4, 3, dtype=torch.int64, device=device),
        ops.Pages.new(8, 9, 3, device),
        ops.Pages.new(4, 9, 3, device),
    )


@s.targets("advance_")
def test_opcheck_and_compiled(device, backend):
    chosen, goes_on = torch.tensor([0, 2], device=device), torch.tensor([False, False, False], device=device)
    x = torch.ones(3, 4, device=device)

    def step(chosen, goes_on, lanes, record, block, ends):
        left = ops.leave(goes_on, lanes, x, 2, backend=backend)
        chosen = chosen + left.x[:, 0].long() - 1
        return ops.advance_(chosen, goes_on, left.at, lanes, record, block, ends, 2, 4, backend=backend).ids + 1

    with Recorder() as recorder:
        step(chosen, goes_on, *state(device))
    assert len(recorder.calls) == 2
    for op, args in recorder.calls:
        torch.library.opcheck(op, [a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    runs = []
    torch._dynamo.reset()
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        own = state(device)
        ids = function(chosen, goes_on, *own)
        runs.append([ids, *(t for part in own for t in (part if isinstance(part, tuple) else (part,)))])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert runs[0][0].tolist() == [4, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@s.targets("advance_")
def test_in_a_cuda_graph(device, backend):
    """Waits for nothing, and replays right whatever the lanes have become."""
    if device != "cuda":
        pytest.skip("a graph needs a GPU")
    chosen, goes_on = torch.tensor([0, 2], device=device), torch.tensor([False, False, False], device=device)
    x, runs = torch.ones(3, 4, device=device), []

    def step(lanes, *rest):
        at = ops.leave(goes_on, lanes, x, 2, backend=backend).at
        ops.advance_(chosen, goes_on, at, lanes, *rest, 2, 4, backend=backend)

    for captured in (False, True):
        own = state(device)
        graph = torch.cuda.CUDAGraph()
        for tick in range(6):
            if tick == 0 or not captured:
                torch.cuda.set_sync_debug_mode("error")
                step(*own)
                torch.cuda.set_sync_debug_mode("default")
            elif tick == 1:
                with torch.cuda.graph(graph):
                    step(*own)
                graph.replay()
            else:
                graph.replay()
        runs.append([t for part in own for t in (part if isinstance(part, tuple) else (part,))])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@s.targets("enter_")
@given(n=s.sizes_or_none, width=st.integers(1, 40), seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
       scored=st.booleans())  # fmt: skip
def test_states_enter(device, backend, n, width, seed, dtype, strided, scored):
    """Copies are exact, a score is the router's own; lanes that nothing enters stay, and what isn't theirs is NaN."""
    s.assume_served(device, backend, dtype)
    n, width = s.larger(device, seed, n), s.wider(device, seed, width)
    x, new, weight = (
        s.normal(shape, seed + i, dtype).to(device) for i, shape in enumerate([(n, width)] * 2 + [(width,)])
    )
    memory = torch.full((n, width + 3), torch.nan, dtype=dtype, device=device)
    memory[:, :width] = x
    new = new.mT.contiguous().mT if strided else new
    generator = torch.Generator().manual_seed(seed)
    lanes = torch.randperm(n, generator=generator)  # some of them, in any order
    lanes = torch.where(torch.rand(n, generator=generator) < 0.5, lanes, -1)[: n - n // 3].to(device)
    new, theirs, there = new[: len(lanes)], x.clone(), lanes >= 0
    theirs[lanes[there]] = new[there]
    logits = torch.full((n,), 7.0, dtype=torch.promote_types(dtype, torch.float32), device=device)
    router = (logits, weight, 0.5) if scored else ()
    ops.enter_(memory[:, :width], new, lanes, *router, backend=backend)
    assert torch.equal(memory[:, :width], theirs) and memory[:, width:].isnan().all()
    expected = torch.full((n,), 7.0, dtype=torch.float64, device=device)
    if scored:
        expected[lanes[there]] = (new[there].double() @ weight.double()) / 0.5
    # products of fp32 or wider, added up in any order
    slack = 2 * width * torch.finfo(logits.dtype).eps * (theirs.double().abs() @ weight.double().abs())
    assert ((logits - expected).abs() <= slack).all()
