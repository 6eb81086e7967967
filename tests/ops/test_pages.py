"""Taking, counting and giving back pages against accounts kept in Python's lists."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from tests import strategies as s


class Accounts:
    """The same in plain Python."""

    def __init__(self, rows, num_pages, max_pages, page_size):
        self.lengths, self.pages = [0] * rows, [[] for _ in range(rows)]
        self.free, self.max_pages, self.page_size = list(range(num_pages - 1, -1, -1)), max_pages, page_size

    def take(self, rows, counts):
        """Slots of each lane's new tokens; or why there are none."""
        needs = [-(-(self.lengths[r] + n) // self.page_size) - len(self.pages[r]) for r, n in zip(rows, counts)]
        needs = [max(need, 0) if r >= 0 else 0 for r, need in zip(rows, needs)]
        if any(r >= 0 and len(self.pages[r]) + need > self.max_pages for r, need in zip(rows, needs)):
            return None, -1
        if sum(needs) > len(self.free):
            return None, sum(needs) - len(self.free)
        slots = []
        for r, need, n in zip(rows, needs, counts):
            self.pages[r] += [self.free.pop() for _ in range(need)]
            for i in range(n):
                page, offset = divmod(self.lengths[r] + i, self.page_size) if r >= 0 else (0, 0)
                slots.append(self.pages[r][page] * self.page_size + offset if r >= 0 else -1)
        return slots, 0

    def give_back(self, rows):
        for r in rows:
            if r >= 0:
                self.free += self.pages[r]
                self.lengths[r], self.pages[r] = 0, []

    def check(self, state):
        assert state.lengths.tolist() == self.lengths
        assert state.owned.tolist() == [len(pages) for pages in self.pages]
        for line, pages in zip(state.page_table.tolist(), self.pages):
            assert line == pages + [-1] * (len(line) - len(pages))
        assert state.free_pages[: int(state.free_count)].tolist() == self.free


@s.targets("take_pages_")
@given(seed=s.seeds, rows=st.integers(0, 3) | st.integers(0, 150), page_size=st.integers(1, 5),
       most=st.sampled_from([1, 3, 200]), slack=st.integers(0, 3))  # fmt: skip
def test_equals_plain_accounts(device, backend, seed, rows, page_size, most, slack):
    """More lanes than are looked at together, rows of more pages than move together, padding, and refusals."""
    rng = random.Random(seed)
    num_pages = rng.choice([0, 3, rows * (most // page_size + 2)])
    max_pages = rng.choice([1, 2, 2 * most // page_size + 2])
    plain = Accounts(rows, num_pages, max_pages, page_size)
    state = ops.Pages.new(rows, num_pages, max_pages, device)
    for _ in range(3):
        chosen = rng.sample(range(rows), rng.randint(0, min(rows, 130)))
        chosen = [-1 if rng.random() < 0.2 else r for r in chosen]
        counts = [rng.randint(0, most) for _ in chosen]
        lanes, cu = torch.tensor(chosen, dtype=torch.int64, device=device), s.cu_seqlens(torch.tensor(counts).long())
        taken = ops.take_pages_(state, lanes, cu.to(device), sum(counts) + slack, page_size, backend=backend)
        slots, refused = plain.take(chosen, counts)
        plain.check(state)
        assert int(taken.refused) == refused
        assert taken.slots.tolist() == (slots or [-1] * sum(counts)) + [-1] * slack
        granted = chosen if slots is not None else [-1] * len(chosen)
        assert taken.rows.tolist() == granted
        assert taken.k_lens.tolist() == [plain.lengths[r] + n if r >= 0 else 0 for r, n in zip(granted, counts)]
        ops.commit_pages_(state, taken.rows, cu.to(device), backend=backend)
        for r, n in zip(granted, counts):
            if r >= 0:
                plain.lengths[r] += n
        plain.check(state)
        leaving = [-1 if rng.random() < 0.2 else r for r in rng.sample(range(rows), rows // 3)]
        ops.free_pages_(state, torch.tensor(leaving, dtype=torch.int64, device=device), backend=backend)
        plain.give_back(leaving)
        plain.check(state)
