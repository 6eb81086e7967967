"""Routing in Triton: one launch forward, in which each row comes from memory once, and one pass backward.

Forward, the work on a sequence is a number of items of each kind:

    score    a tile of candidates   logit = x . w / temperature
    refine   a chunk of logits      a digit of the threshold; only where a sequence has more than one chunk
    select   a chunk of logits      the threshold, then the slots of the kept candidates, in order
    copy     a tile of kept rows    rows = x[indices], indices and gates

A sequence's rows are copied a few sequences after they were scored, when they are still in the L2 cache; meanwhile
other programs keep the memory busy. An item is a program, numbered so that all that it waits for has a lower number.
Programs are started in the order of their numbers (CUB's scans rely on it, too): nothing ever waits for what no program
works on.

Scores and kept candidates are handed on as words of memory that are EMPTY until they are written: who needs one reads
it until it is there. So they need neither fences nor counters, which would cost as much as the tiles themselves; only a
histogram, which many programs add to, has a counter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._layout import contiguous
from .._triton import FLOAT_MAX, activate, bounded, find, gate, inverse_of, place, quotient, sum_rows, tile

WHOLE = 2048  # logits that one program can select among: all of most training sequences
CHUNK = 1024  # of a longer sequence: what is wanted at once takes fewer registers
REPEATED = 512  # of a recorded choice
IN_FLIGHT = 36 * 2**20  # bytes of rows scored and copied before a sequence's own are copied: what L2 holds
BLOCK = 256  # positions that a program of the backward pass looks up at once
PARTIALS = 512  # programs of the backward pass, each with its own sum of the router's gradient

EMPTY = tl.constexpr(-1)  # as fp32 a NaN that no logit is
NONE = tl.constexpr(-2)  # for a slot without a candidate
NAN = tl.constexpr(0x7FC00000)
LOWEST = tl.constexpr(-(2**31))  # key of what is never kept
ALL = tl.constexpr(2**31 - 1)  # a number of keys that no sequence has
DIGITS = tl.constexpr(2048)  # bins of a histogram; a key's digits have 11 bits
SIGN = tl.constexpr(1024)  # turned in the first digit, so that digits of negative keys rank below

# Where the words lie that a sequence's chunks share, and how many of each: chunks that have counted a digit; the
# threshold and what is wanted at it, as far as known after each digit; how many are kept; histograms of the digits; and
# from PUBLISHED on a word of each chunk, see _look_back.
COUNTER = tl.constexpr(0)  # 3
THRESHOLD = tl.constexpr(3)  # 3
WANT = tl.constexpr(6)  # 3
KEPT = tl.constexpr(9)  # 1
HISTOGRAM = tl.constexpr(10)  # 3 * DIGITS
PUBLISHED = tl.constexpr(10 + 3 * DIGITS.value)


@triton.jit
def _key(logit, valid, alpha, ACTIVATION: tl.constexpr, RANK: tl.constexpr, LARGEST: tl.constexpr):
    """An int32 that ranks as the logit does, or as its score in the dtype RANK, whose largest number is LARGEST."""
    if RANK is not None:
        logit = bounded((alpha * activate(logit, ACTIVATION)).to(RANK).to(tl.float32), LARGEST)
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # -0.0 ranks as 0.0
    return tl.where(valid & (logit == logit), bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


@triton.jit
def _candidates(candidates, seqlens, b, i, scored, length):
    """Positions of candidates i of a sequence, and whether they are real; all positions if ``candidates`` is None."""
    valid = i < scored
    position = i
    if candidates is not None:
        position = tl.load(candidates + b * scored + i, mask=valid, other=-1)
        valid = valid & (position >= 0) & (position < length)
        position = position.to(tl.int32)
    if seqlens is not None:
        valid = valid & (position < tl.load(seqlens + b))
    return position, valid


@triton.jit
def _written(words, mask):
    """The words, once they are written; 0 where masked."""
    word = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((word == EMPTY).to(tl.int32), 0) > 0:
        word = tl.load(words, mask=mask, other=0, volatile=True)
    return word


@triton.jit
def _await(word):
    """The word, once it is written."""
    value = tl.load(word, volatile=True)
    while value == EMPTY:
        value = tl.load(word, volatile=True)
    return value


@triton.jit
def _threshold(key, want):
    """The largest number that at least ``want`` of the keys reach, or one that exactly so many reach if found earlier.

    Two bits at a time: how many keys reach each of the three higher numbers is counted in one int64, 21 bits for each.
    """
    threshold = tl.full((), LOWEST, tl.int32)
    shift = 30
    while shift >= 0:
        one = threshold + (1 << shift)
        two = one + (1 << shift)
        three = two + (1 << shift)
        reach = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 21) + ((key >= three).to(tl.int64) << 42)
        reach = tl.sum(reach, 0)
        reach_three, reach_two, reach_one = reach >> 42, (reach >> 21) & 0x1FFFFF, reach & 0x1FFFFF
        threshold = tl.where(reach_one >= want, one, threshold)
        threshold = tl.where(reach_two >= want, two, threshold)
        threshold = tl.where(reach_three >= want, three, threshold)
        exact = (reach_one == want) | (reach_two == want) | (reach_three == want)
        shift = tl.where(exact, -1, shift - 2)
    return threshold


@triton.jit
def _look_back(published, chunk, above, tied, PRIOR: tl.constexpr):
    """How many keys the chunks before this one have above and at the threshold; publishes how many this one has, as the
    word tied + 2**12 * above."""
    tl.store(published + chunk, tl.sum(tied.to(tl.int32), 0) + 4096 * tl.sum(above.to(tl.int32), 0))
    prior = tl.arange(0, PRIOR)
    word = _written(published + prior, prior < chunk)
    return tl.sum(word >> 12, 0), tl.sum(word & 4095, 0)


@triton.jit
def _score(
    x, weight, ready, candidates, seqlens, words, b, item, stride_n, stride_d, length, scored, temperature,
    D: tl.constexpr, SCORES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    i = item * SCORES + tl.arange(0, SCORES)
    position, valid = _candidates(candidates, seqlens, b, i, scored, length)
    if weight is None:
        logit = tl.load(ready + b * scored + i, mask=valid, other=0.0)
    else:
        logit = tl.zeros((SCORES,), tl.float32)
        for start in range(0, D, WIDTH):
            d = start + tl.arange(0, WIDTH)
            w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
            source = x + (position.to(tl.int64) * stride_n)[:, None] + d[None, :].to(tl.int64) * stride_d
            mask = valid[:, None] & (d < D)[None, :]
            # it stays in the L2 cache until it is copied
            row = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            logit += tl.sum(row * w[None, :], 1)
    logit = tl.where(valid, bounded(tl.div_rn(logit, temperature), FLOAT_MAX), 0.0)
    word = tl.where(logit == logit, logit.to(tl.int32, bitcast=True), NAN)
    tl.store(words + b * scored + i, word, mask=i < scored)


@triton.jit
def _refine(key, shared, stage, k, chunks):
    """Count a digit of the keys whose digits before it are the threshold's; the last chunk to do so finds that digit.

    It publishes the threshold so far, the digits that are still unknown as 0, and how many of the keys that agree with
    it are wanted: ALL as soon as that is each of them, which settles the threshold for the stages to come.
    """
    shift = tl.maximum(21 - 11 * stage, 0)  # the last digit has one bit of the one before, the same in all keys counted
    sign = tl.where(stage == 0, SIGN, 0)
    same = key != LOWEST
    threshold = 0
    want = k
    if stage > 0:
        threshold = _await(shared + THRESHOLD + stage - 1)
        want = _await(shared + WANT + stage - 1)
        same = same & ((key ^ threshold) >> (32 - 11 * stage) == 0)
    if want != ALL:
        histogram = shared + HISTOGRAM + stage * DIGITS
        tl.atomic_add(histogram + (((key >> shift) & (DIGITS - 1)) ^ sign), 1, mask=same, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(shared + COUNTER + stage, 1, sem="acq_rel") - EMPTY == chunks - 1:
            digit = tl.arange(0, DIGITS)
            count = tl.load(histogram + digit, cache_modifier=".cg") - EMPTY
            total = tl.sum(count, 0)
            want = tl.minimum(want, total)  # in the first stage fewer may be there to keep
            reach = total - tl.cumsum(count, 0) + count  # keys with at least this digit
            enough = (reach >= want).to(tl.int32) + ((reach == want).to(tl.int32) << 16)
            enough = tl.sum(enough, 0)
            found = (enough & 0xFFFF) - 1
            above = tl.max(tl.where(reach < want, reach, 0), 0)
            if stage == 0:
                tl.store(shared + KEPT, want)
            settled = enough >= 1 << 16
            later = tl.arange(0, 4)
            publish = (later >= stage) & (later < tl.where(settled, 3, stage + 1))
            tl.store(shared + WANT + later, tl.where(settled, ALL, want - above), mask=publish)
            tl.store(shared + THRESHOLD + later, threshold | ((found ^ sign) << shift), mask=publish)


@triton.jit
def _select(key, slots, counts, shared, chunk, i, k, MANY: tl.constexpr, PRIOR: tl.constexpr):
    """Keep what is above the threshold, and as many of what is at it as are wanted, from the lowest position on."""
    if MANY:
        kept = _await(shared + KEPT)
        threshold = _await(shared + THRESHOLD + 2)
        want = _await(shared + WANT + 2)
        above = key > threshold
        tied = key == threshold
        above_before, tied_before = _look_back(shared + PUBLISHED, chunk, above, tied, PRIOR)
    else:
        kept = tl.minimum(k, tl.sum((key != LOWEST).to(tl.int32), 0))
        threshold = _threshold(key, kept)
        above = key > threshold
        tied = key == threshold
        want = kept - tl.sum(above.to(tl.int32), 0)
        above_before = 0
        tied_before = 0
    count = tl.cumsum(above.to(tl.int32) + (tied.to(tl.int32) << 16), 0)  # of both at once
    tie = tied_before + (count >> 16)
    keep = above | (tied & (tie <= want))
    j = above_before + (count & 0xFFFF) + tl.minimum(tie, want) - 1
    tl.store(slots + j, i, mask=keep)
    tl.store(slots + i, NONE, mask=(i >= kept) & (i < k))
    if chunk == 0:
        tl.store(counts, kept)


@triton.jit
def _repeat(recorded, candidates, seqlens, slots, counts, b, j, length, scored, k):
    """A chunk of a recorded choice; what is no candidate counts as none."""
    index = tl.load(recorded + b * k + j, mask=j < k, other=-1)
    there = (index >= 0) & (index < length)
    if seqlens is not None:
        there = there & (index < tl.load(seqlens + b))
    i = index
    if candidates is not None:
        i = find(candidates + b * scored, index, scored, there)
        there = i >= 0
    tl.store(slots + b * k + j, tl.where(there, i.to(tl.int32), NONE), mask=j < k)
    tl.atomic_add(counts + b, tl.sum(there.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _copy(
    x, candidates, words, slots, rows, indices, gates, item, k, alpha, stride_n, stride_d,
    D: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    j = item.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = j < k
    i = _written(slots + j, inside)
    there = inside & (i >= 0)
    position = i.to(tl.int64) if candidates is None else tl.load(candidates + i, mask=there, other=0)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)
        source = x + (position * stride_n)[:, None] + d[None, :].to(tl.int64) * stride_d
        # read and written for the last time here: the rows still to be copied keep their place in the cache
        columns = (d < D)[None, :]
        row = tl.load(source, mask=there[:, None] & columns, other=0.0, eviction_policy="evict_first")
        target = rows + (j * D)[:, None] + d[None, :]
        tl.store(target, row, mask=inside[:, None] & columns, eviction_policy="evict_first")
    logit = _written(words + i, there).to(tl.float32, bitcast=True)
    tl.store(gates + j, tl.where(there, gate(logit, alpha, ACTIVATION), 0.0), mask=inside)
    tl.store(indices + j, tl.where(there, position, -1), mask=inside)


@triton.jit(do_not_specialize=["batch", "length", "scored", "k", "scoring", "choosing", "copies", "chunks", "lag"])
def _route(
    x, weight, ready, candidates, seqlens, recorded, words, slots, shared, rows, indices, gates, counts,
    stride_b, stride_n, stride_d, batch, length, scored, k, alpha, temperature,
    scoring, choosing, copies, chunks, lag,
    D: tl.constexpr, ACTIVATION: tl.constexpr, RANK: tl.constexpr, LARGEST: tl.constexpr, MANY: tl.constexpr,
    CHUNK: tl.constexpr, PRIOR: tl.constexpr, SCORES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One item: those of step s are of sequence s, but its rows are copied in step s + lag.

    ``scoring`` items of a step score, and if there are many chunks, count each one's first digit after its last tile:
    spread out, since most keys meet in a few bins. Then ``choosing`` items refine and select, and ``copies`` copy.

    words, slots, shared are EMPTY at first: bits of the logits (B, C); the kept candidates (B, k), or NONE; and where
    sequences have many chunks, what those of each sequence share.
    """
    item = tl.program_id(0)
    step = item // (scoring + choosing + copies)
    item -= step * (scoring + choosing + copies)
    b = step.to(tl.int64)
    if item >= scoring + choosing:
        b -= lag
    if (b >= 0) & (b < batch):
        tile = item
        to_score = item < scoring
        chunk = item - scoring
        stage = 3
        if MANY:
            TILES: tl.constexpr = CHUNK // SCORES
            group = item // (TILES + 1)
            to_score = to_score & (item != group * (TILES + 1) + TILES)
            tile = item - group
            stage = tl.where(item < scoring, 0, chunk // chunks + 1)
            chunk = tl.where(item < scoring, group, chunk % chunks)
        if to_score:
            _score(
                x + b * stride_b, weight, ready, candidates, seqlens, words, b, tile,
                stride_n, stride_d, length, scored, temperature, D, SCORES, WIDTH,
            )  # fmt: skip
        elif item < scoring + choosing:
            i = chunk * CHUNK + tl.arange(0, CHUNK)
            if recorded is not None:
                _repeat(recorded, candidates, seqlens, slots, counts, b, i, length, scored, k)
            else:
                if MANY:
                    shared += b * (PUBLISHED + chunks)
                _, valid = _candidates(candidates, seqlens, b, i, scored, length)
                logit = _written(words + b * scored + i, valid).to(tl.float32, bitcast=True)
                key = _key(logit, valid, alpha, ACTIVATION, RANK, LARGEST)
                if stage < 3:
                    _refine(key, shared, stage, k, chunks)
                else:
                    _select(key, slots + b * k, counts + b, shared, chunk, i, k, MANY, PRIOR)
        else:
            if candidates is not None:
                candidates += b * scored
            _copy(
                x + b * stride_b, candidates, words + b * scored, slots + b * k, rows + b * k * D,
                indices + b * k, gates + b * k, item - scoring - choosing, k, alpha, stride_n, stride_d,
                D, ACTIVATION, ROWS, WIDTH,
            )  # fmt: skip


def route(x, weight, logits, candidates, seqlens, indices, k, activation, alpha, temperature, rank):
    batch, length, width = x.shape
    scored = length if candidates is None else candidates.shape[1]
    recorded, ready, weight, candidates, seqlens = contiguous(indices, logits, weight, candidates, seqlens)
    rows = x.new_empty(batch, k, width)
    indices = torch.empty(batch, k, dtype=torch.int64, device=x.device)
    gates = torch.empty(batch, k, dtype=torch.float32, device=x.device)
    make_counts = torch.empty if recorded is None else torch.zeros  # a recorded choice is counted chunk by chunk
    counts = make_counts(batch, dtype=torch.int32, device=x.device)

    many = recorded is None and scored > WHOLE
    chunk = REPEATED if recorded is not None else CHUNK if many else WHOLE
    size = tile(width, 16384 // x.element_size(), 4)
    scores = chunk if weight is None else size.rows
    chunks = triton.cdiv(scored if recorded is None else k, chunk) or 1
    scoring = chunks * (chunk // scores + 1) if many else triton.cdiv(scored, scores)
    choosing = chunks * 3 if many else chunks
    copies = triton.cdiv(k, size.rows)
    # of many chunks, too, the threshold is known when the copies get to it
    lag = max(IN_FLIGHT // max((scored + k) * width * x.element_size(), 1), 3 if many else 1)
    lag = min(lag, max(batch - 1, 0))
    sizes = (batch * scored, batch * k, many * batch * (PUBLISHED.value + chunks))
    sizes = [(n + 3) // 4 * 4 for n in sizes]  # each begins at 16 bytes, or the kernel would be compiled anew
    words, slots, shared = torch.full((sum(sizes),), EMPTY.value, dtype=torch.int32, device=x.device).split(sizes)
    _route[((batch + lag) * (scoring + choosing + copies),)](
        x, weight, ready, candidates, seqlens, recorded,
        words, slots, shared, rows, indices, gates, counts,
        *x.stride(), batch, length, scored, k, alpha, temperature, scoring, choosing, copies, chunks, lag,
        D=width, ACTIVATION=activation, LARGEST=torch.finfo(x.dtype).max,
        RANK=None if rank == "logit" else getattr(tl, str(x.dtype).removeprefix("torch.")),
        MANY=many, CHUNK=chunk, PRIOR=triton.next_power_of_2(chunks) if many else 1,
        SCORES=scores, ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        maxnreg=96,  # so that at least five programs fit a multiprocessor
    )  # fmt: skip
    logits = words[: batch * scored].view(torch.float32).view(batch, scored)
    return rows, indices, gates, logits, counts


@triton.jit(do_not_specialize=["length", "scored", "k"])
def _logit_gradients(
    d_gates, d_logits, logits, candidates, of_candidates, seqlens, indices, of_indices, slots, gradients, d_ready,
    length, scored, k, alpha, temperature, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of position n, kept as j and candidate i: slots[n] = j, -1 if not kept; and the gradient of x . w, 0 if neither,

    gradients[n] = d_ready[i] = (d_logits[i] + d_gates[j] * alpha * G'(logit)) / temperature.
    """
    blocks = tl.cdiv(length, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = n < length
    j = place(indices + b * k, of_indices + b * length, n, k, inside)
    tl.store(slots + b * length + n, j, mask=inside)
    real = inside
    if seqlens is not None:
        real = real & (n < tl.load(seqlens + b))
    i = n
    if candidates is not None:
        i = place(candidates + b * scored, of_candidates + b * length, n, scored, real)
        real = i >= 0
    through_gate = real & (j >= 0)
    value = activate(tl.load(logits + b * scored + i, mask=through_gate, other=0.0), ACTIVATION)
    if ACTIVATION == "sigmoid":
        slope = value * (1 - value)
    elif ACTIVATION == "tanh":
        slope = 1 - value * value
    else:
        slope = tl.full((BLOCK,), 1.0, tl.float32)
    d_gate = tl.load(d_gates + b * k + j, mask=through_gate, other=0.0)
    gradient = tl.load(d_logits + b * scored + i, mask=real, other=0.0)
    gradient = tl.div_rn(gradient + tl.where(value == value, d_gate * alpha * slope, 0.0), temperature)
    tl.store(gradients + b * length + n, gradient, mask=inside)
    if d_ready is not None:
        tl.store(d_ready + b * scored + i, gradient, mask=real)


@triton.jit(do_not_specialize=["rows", "length", "k"])
def _route_backward(
    d_rows, x, weight, slots, gradients, d_x, partial, rows, length, width, k, stride_b, stride_n, stride_d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """d_x[n] = d_rows[slots[n]] + gradients[n] * w, and partial = sum of gradients[n] * x[n] over a program's rows.

    A program takes every so many-th tile of the batch's rows and keeps its sum to the end: the order of every sum
    depends on shapes alone.
    """
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    columns = (d < width)[None, :]
    if weight is not None:
        w = tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        total = tl.zeros((ROWS, WIDTH), tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    gradient = tl.load(gradients + row, mask=row < rows, other=0.0)
    for _ in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        b = quotient(row, length, rows)
        source = d_rows + ((b * k + slot) * width)[:, None] + d[None, :]
        value = tl.load(source, mask=(slot >= 0)[:, None] & columns, other=0.0).to(tl.float32)
        if weight is not None:
            source = x + (b * stride_b + (row - b * length) * stride_n)[:, None] + d[None, :].to(tl.int64) * stride_d
            x_row = tl.load(source, mask=(gradient != 0)[:, None] & columns, other=0.0).to(tl.float32)
            total += gradient[:, None] * x_row
            value += gradient[:, None] * w
        tl.store(d_x + (row * width)[:, None] + d[None, :], value, mask=(row < rows)[:, None] & columns)
        row += tl.num_programs(0) * ROWS
        slot = tl.load(slots + row, mask=row < rows, other=-1)
        gradient = tl.load(gradients + row, mask=row < rows, other=0.0)
    if weight is not None:
        tl.store(partial + tl.program_id(0).to(tl.int64) * width + d, tl.sum(total, 0), mask=d < width)


def route_backward(
    d_rows, d_gates, d_logits, x, weight, logits, candidates, seqlens, indices, activation, alpha, temperature
):
    batch, length, width = x.shape
    k, scored = indices.shape[1], logits.shape[1]
    d_rows, d_gates, d_logits, logits, indices = contiguous(d_rows, d_gates, d_logits, logits, indices)
    weight, candidates, seqlens = contiguous(weight, candidates, seqlens)
    d_x = torch.empty(batch, length, width, dtype=x.dtype, device=x.device)
    slots, gradients = (torch.empty(batch, length, dtype=t, device=x.device) for t in (torch.int32, torch.float32))
    d_ready = torch.zeros_like(d_logits) if weight is None else None  # what is no candidate is not visited
    if slots.numel():
        _logit_gradients[(batch * triton.cdiv(length, BLOCK),)](
            d_gates, d_logits, logits, candidates, None if candidates is None else inverse_of(candidates, length),
            seqlens, indices, inverse_of(indices, length), slots, gradients, d_ready,
            length, scored, k, alpha, temperature, ACTIVATION=activation, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    size = tile(width, 8192 // x.element_size(), 4)
    programs = min(PARTIALS, triton.cdiv(batch * length, size.rows))
    partial = None
    if weight is not None:
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if d_x.numel():
        _route_backward[(programs, triton.cdiv(width, size.width))](
            d_rows, x, weight, slots, gradients, d_x, partial, batch * length, length, width, k, *x.stride(),
            ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        )  # fmt: skip
    if weight is None:
        return d_x, x.new_empty(0), d_ready
    return d_x, sum_rows(partial, weight.dtype), d_logits.new_empty(0)
