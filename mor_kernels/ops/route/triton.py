"""Routing in Triton: one launch forward, in which each row comes from memory once, and one pass backward.

Forward, the work on a sequence is a number of items of each kind:

    score    a tile of candidates   logit = x . w / temperature
    refine   a chunk of logits      counts of the keys' next digit; only where a sequence has more than one chunk
    select   a chunk of logits      the threshold, then the kept positions in order, and their gates
    copy     a tile of kept rows    rows = x[indices]

Programs take items off a queue, in which all that an item waits for stands before it: nothing ever waits for what no
program works on. A sequence's rows are copied a few sequences after they were scored, when they are still in the L2
cache; meanwhile the other programs keep the memory busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton import inverse_of, place, tile

CHUNK = 2048  # logits that one program selects among; most training sequences are one chunk
PARTIALS = 512  # programs of the backward pass, each with its own sum of the router's gradient
IN_FLIGHT = 1024  # tiles to score before a sequence's rows are copied: about what an H100 works on at once

DIGITS = tl.constexpr(2048)  # bins of a histogram; a key's digits have 11, 11 and 10 bits
SIGN = tl.constexpr(1024)  # turned in the first digit, so that digits of negative keys rank below
LOWEST = tl.constexpr(-(2**31))  # key of what is never kept
FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
COUNTERS = tl.constexpr(4)  # items done of a sequence: scored, refined once, refined twice, selected


@triton.jit
def _bounded(value, largest):
    """Infinities as the largest finite number; NaN stays."""
    value = tl.where(value > largest, largest, value)
    return tl.where(value < -largest, -largest, value)


@triton.jit
def _activate(logit, ACTIVATION: tl.constexpr):
    """G(logit), to a few units in the last place."""
    if ACTIVATION == "sigmoid":
        return 1 / (1 + tl.exp(-logit))
    elif ACTIVATION == "tanh":
        e = tl.exp(-2 * tl.abs(logit))
        far = (1 - e) / (1 + e)
        square = logit * logit  # near 0, where 1 - e would cancel, the series
        near = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        return tl.where(tl.abs(logit) < 0.3, logit * near, tl.where(logit < 0, -far, far))
    else:
        return logit


@triton.jit
def _gate(logit, alpha, ACTIVATION: tl.constexpr):
    """alpha * G(logit); 0 where the logit is not a number."""
    return tl.where(logit == logit, _bounded(alpha * _activate(logit, ACTIVATION), FLOAT_MAX), 0.0)


@triton.jit
def _key(logit, valid, alpha, ACTIVATION: tl.constexpr, RANK: tl.constexpr, LARGEST: tl.constexpr):
    """An int32 that ranks as the logit does, or as its score in the dtype RANK, whose largest number is LARGEST."""
    if RANK is not None:
        logit = _bounded((alpha * _activate(logit, ACTIVATION)).to(RANK).to(tl.float32), LARGEST)
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # -0.0 ranks as 0.0
    return tl.where(valid & (logit == logit), bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


@triton.jit
def _candidates(candidates, seqlens, b, i, scored, length):
    """Positions of candidates i of a sequence, and whether they are real; all positions if ``candidates`` is None."""
    valid = i < scored
    position = i.to(tl.int64)
    if candidates is not None:
        position = tl.load(candidates + b * scored + i, mask=valid, other=-1)
        valid = valid & (position >= 0) & (position < length)
    if seqlens is not None:
        valid = valid & (position < tl.load(seqlens + b))
    return position, valid


@triton.jit
def _signal(counter):
    """Count an item as done, after all that its program has written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _wait(counter, count):
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass


@triton.jit
def _first_digit(key):
    return ((key >> 21) & (DIGITS - 1)) ^ SIGN


@triton.jit
def _second_digit(key):
    return (key >> 10) & (DIGITS - 1)


@triton.jit
def _largest_digit(histogram, want):
    """The largest digit that at least ``want`` keys reach, and how many of these must still be found among its own."""
    digit = tl.arange(0, DIGITS)
    count = tl.load(histogram + digit, cache_modifier=".cg")
    reach = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    found = tl.sum((reach >= want).to(tl.int32), 0) - 1
    return found, want - tl.sum(tl.where(digit == found, reach - count, 0), 0)


@triton.jit
def _to_keep(histogram, k):
    """min(k, keys that can be kept); all of them are in the first histogram."""
    return tl.minimum(k, tl.sum(tl.load(histogram + tl.arange(0, DIGITS), cache_modifier=".cg"), 0))


@triton.jit
def _threshold(key, want):
    """The largest number that at least ``want`` of the keys reach, or the first found that exactly so many reach."""
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= want, 0, LOWEST)
    bit = 30
    while bit >= 0:
        higher = threshold + (1 << bit)
        reach = tl.sum((key >= higher).to(tl.int32), 0)
        threshold = tl.where(reach >= want, higher, threshold)
        bit = tl.where(reach == want, -1, bit - 1)
    return threshold


@triton.jit
def _look_back(published, chunk, above, tied, PRIOR: tl.constexpr):
    """How many keys the chunks before this one have above and at the threshold; publishes how many this one has.

    A published word is 1 + 2 * tied + 2**13 * above: it says at once that it is there, and what.
    """
    tl.store(published + chunk, 1 + 2 * tl.sum(tied.to(tl.int32), 0) + 8192 * tl.sum(above.to(tl.int32), 0))
    prior = tl.arange(0, PRIOR)
    word = tl.load(published + prior, mask=prior < chunk, other=1, volatile=True)
    while tl.min(word, 0) == 0:
        word = tl.load(published + prior, mask=prior < chunk, other=1, volatile=True)
    return tl.sum(word >> 13, 0), tl.sum((word >> 1) & 4095, 0)


@triton.jit
def _score(
    x, weight, ready, candidates, seqlens, logits, histogram, b, item,
    stride_n, stride_d, length, scored, width, alpha, temperature,
    ACTIVATION: tl.constexpr, RANK: tl.constexpr, LARGEST: tl.constexpr, MANY: tl.constexpr,
    SCORES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    i = item * SCORES + tl.arange(0, SCORES)
    position, valid = _candidates(candidates, seqlens, b, i, scored, length)
    if weight is None:
        logit = tl.load(ready + b * scored + i, mask=valid, other=0.0)
    else:
        logit = tl.zeros((SCORES,), tl.float32)
        for start in range(0, width, WIDTH):
            d = start + tl.arange(0, WIDTH)
            w = tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
            source = x + position[:, None] * stride_n + d[None, :].to(tl.int64) * stride_d
            row = tl.load(source, mask=valid[:, None] & (d < width)[None, :], other=0.0).to(tl.float32)
            logit += tl.sum(row * w[None, :], 1)
    logit = tl.where(valid, _bounded(tl.div_rn(logit, temperature), FLOAT_MAX), 0.0)
    tl.store(logits + b * scored + i, logit, mask=i < scored)
    if MANY:
        key = _key(logit, valid, alpha, ACTIVATION, RANK, LARGEST)
        tl.atomic_add(histogram + _first_digit(key), 1, mask=key != LOWEST, sem="relaxed")


@triton.jit
def _refine(key, done, histogram, stage, k, chunks):
    """Count the next digit of the keys whose digits so far are those of the threshold."""
    first, want = _largest_digit(histogram, _to_keep(histogram, k))
    same = (key != LOWEST) & (_first_digit(key) == first)
    if stage == 0:
        tl.atomic_add(histogram + DIGITS + _second_digit(key), 1, mask=same, sem="relaxed")
    else:
        _wait(done + 1, chunks)
        second, want = _largest_digit(histogram + DIGITS, want)
        same = same & (_second_digit(key) == second)
        tl.atomic_add(histogram + 2 * DIGITS + (key & 1023), 1, mask=same, sem="relaxed")


@triton.jit
def _select(
    key, logit, position, indices, gates, counts, done, histogram, published, chunk, k, alpha, chunks,
    ACTIVATION: tl.constexpr, MANY: tl.constexpr, CHUNK: tl.constexpr, PRIOR: tl.constexpr,
):  # fmt: skip
    """Keep what is above the threshold, and as many of what is at it as are wanted, from the lowest position on."""
    if MANY:
        _wait(done + 2, chunks)
        kept = _to_keep(histogram, k)
        first, want = _largest_digit(histogram, kept)
        second, want = _largest_digit(histogram + DIGITS, want)
        third, want = _largest_digit(histogram + 2 * DIGITS, want)
        threshold = ((first ^ SIGN) << 21) | (second << 10) | third
        above = key > threshold
        tied = (key == threshold) & (key != LOWEST)
        before, tied_before = _look_back(published, chunk, above, tied, PRIOR)
        tie = tied_before + tl.cumsum(tied.to(tl.int32), 0)
        before += tl.minimum(tied_before, want)
    else:
        kept = tl.minimum(k, tl.sum((key != LOWEST).to(tl.int32), 0))
        threshold = _threshold(key, kept)
        above = key > threshold
        tied = key == threshold
        want = kept - tl.sum(above.to(tl.int32), 0)
        tie = tl.cumsum(tied.to(tl.int32), 0)
        before = 0
    keep = above | (tied & (tie <= want))
    j = before + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(indices + j, position, mask=keep)
    tl.store(gates + j, _gate(logit, alpha, ACTIVATION), mask=keep)
    tail = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(indices + tail, -1, mask=(tail >= kept) & (tail < k))
    tl.store(gates + tail, 0.0, mask=(tail >= kept) & (tail < k))
    if chunk == 0:
        tl.store(counts, kept)


@triton.jit
def _repeat(
    recorded, candidates, inverse, seqlens, indices, gates, logits, counts, done, b, chunk,
    length, scored, k, alpha, tiles, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of a recorded choice; what is no candidate counts as none."""
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    index = tl.load(recorded + b * k + j, mask=j < k, other=-1)
    there = (index >= 0) & (index < length)
    if seqlens is not None:
        there = there & (index < tl.load(seqlens + b))
    i = index
    if candidates is not None:
        i = place(candidates + b * scored, inverse + b * length, index, scored, there).to(tl.int64)
        there = i >= 0
    _wait(done, tiles)
    logit = tl.load(logits + b * scored + i, mask=there, other=0.0, cache_modifier=".cg")
    tl.store(indices + b * k + j, tl.where(there, index, -1), mask=j < k)
    tl.store(gates + b * k + j, tl.where(there, _gate(logit, alpha, ACTIVATION), 0.0), mask=j < k)
    tl.atomic_add(counts + b, tl.sum(there.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _copy(x, indices, rows, item, k, width, stride_n, stride_d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    j = item.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tl.load(indices + j, mask=j < k, other=-1, cache_modifier=".cg")
    for start in range(0, width, WIDTH):
        d = start + tl.arange(0, WIDTH)
        source = x + index[:, None] * stride_n + d[None, :].to(tl.int64) * stride_d
        row = tl.load(source, mask=(index >= 0)[:, None] & (d < width)[None, :], other=0.0)
        tl.store(rows + j[:, None] * width + d[None, :], row, mask=(j < k)[:, None] & (d < width)[None, :])


@triton.jit(do_not_specialize=["batch", "length", "scored", "k", "tiles", "chunks", "selects", "copies", "lag"])
def _route(
    x, weight, ready, candidates, seqlens, recorded, inverse, state, rows, indices, gates, logits, counts,
    stride_b, stride_n, stride_d, batch, length, scored, width, k, alpha, temperature,
    tiles, chunks, selects, copies, lag,
    ACTIVATION: tl.constexpr, RANK: tl.constexpr, LARGEST: tl.constexpr, MANY: tl.constexpr, CHUNK: tl.constexpr,
    PRIOR: tl.constexpr, SCORES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One item of the queue: of step s those of sequence s, but its rows are copied in step s + lag.

    state, all 0 at first: the next item; COUNTERS a sequence; and where a sequence has many chunks, three histograms of
    each sequence, and a word of each chunk, see :func:`_look_back`.
    """
    item = tl.atomic_add(state, 1, sem="relaxed")
    step = item // (tiles + selects + copies)
    item -= step * (tiles + selects + copies)
    b = step.to(tl.int64)
    if item >= tiles + selects:
        b -= lag
    done = state + 1 + b * COUNTERS
    histogram = state + 1 + batch * COUNTERS + b * (3 * DIGITS)
    published = state + 1 + batch * (COUNTERS + 3 * DIGITS) + b * chunks
    if (b >= 0) & (b < batch):
        if item < tiles:
            _score(
                x + b * stride_b, weight, ready, candidates, seqlens, logits, histogram, b, item,
                stride_n, stride_d, length, scored, width, alpha, temperature,
                ACTIVATION, RANK, LARGEST, MANY, SCORES, WIDTH,
            )  # fmt: skip
            _signal(done)
        elif item < tiles + selects:
            stage = (item - tiles) // chunks
            chunk = item - tiles - stage * chunks
            if recorded is not None:
                _repeat(
                    recorded, candidates, inverse, seqlens, indices, gates, logits, counts, done, b, chunk,
                    length, scored, k, alpha, tiles, ACTIVATION, CHUNK,
                )  # fmt: skip
                _signal(done + 3)
            else:
                i = chunk * CHUNK + tl.arange(0, CHUNK)
                position, valid = _candidates(candidates, seqlens, b, i, scored, length)
                _wait(done, tiles)
                logit = tl.load(logits + b * scored + i, mask=valid, other=0.0, cache_modifier=".cg")
                key = _key(logit, valid, alpha, ACTIVATION, RANK, LARGEST)
                if stage < selects // chunks - 1:
                    _refine(key, done, histogram, stage, k, chunks)
                    _signal(done + 1 + stage)
                else:
                    _select(
                        key, logit, position, indices + b * k, gates + b * k, counts + b, done, histogram, published,
                        chunk, k, alpha, chunks, ACTIVATION, MANY, CHUNK, PRIOR,
                    )  # fmt: skip
                    _signal(done + 3)
        else:
            _wait(done + 3, chunks)
            _copy(
                x + b * stride_b, indices + b * k, rows + b * k * width, item - tiles - selects, k, width,
                stride_n, stride_d, ROWS, WIDTH,
            )  # fmt: skip


def route(x, weight, logits, candidates, seqlens, indices, k, activation, alpha, temperature, rank):
    batch, length, width = x.shape
    scored = length if candidates is None else candidates.shape[1]
    recorded, ready = (t if t is None else t.contiguous() for t in (indices, logits))
    candidates, seqlens = (t if t is None else t.contiguous() for t in (candidates, seqlens))
    rows = x.new_empty(batch, k, width)
    indices = torch.empty(batch, k, dtype=torch.int64, device=x.device)
    gates, logits = (torch.empty(batch, n, dtype=torch.float32, device=x.device) for n in (k, scored))
    make_counts = torch.empty if recorded is None else torch.zeros  # a recorded choice is counted chunk by chunk
    counts = make_counts(batch, dtype=torch.int32, device=x.device)

    size = tile(width)
    scores = CHUNK // 2 if weight is None else size.rows
    tiles, copies = triton.cdiv(scored, scores), triton.cdiv(k, size.rows)
    many = recorded is None and scored > CHUNK
    chunks = triton.cdiv(scored if recorded is None else k, CHUNK) or 1
    selects = chunks * 3 if many else chunks
    lag = min(max(batch - 1, 0), triton.cdiv(IN_FLIGHT, tiles + 1))
    words = 1 + batch * (COUNTERS.value + many * (3 * DIGITS.value + chunks))
    _route[((batch + lag) * (tiles + selects + copies),)](
        x, None if weight is None else weight.contiguous(), ready, candidates, seqlens, recorded,
        inverse_of(candidates, length) if recorded is not None and candidates is not None else None,
        torch.zeros(words, dtype=torch.int32, device=x.device), rows, indices, gates, logits, counts,
        *x.stride(), batch, length, scored, width, k, alpha, temperature, tiles, chunks, selects, copies, lag,
        ACTIVATION=activation,
        RANK=None if rank == "logit" else getattr(tl, str(x.dtype).removeprefix("torch.")),
        LARGEST=torch.finfo(x.dtype).max, MANY=many, CHUNK=CHUNK,
        PRIOR=triton.next_power_of_2(chunks) if many else 1, SCORES=scores,
        ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
    )  # fmt: skip
    return rows, indices, gates, logits, counts


@triton.jit(do_not_specialize=["batch", "length", "scored", "k"])
def _route_backward(
    d_rows, d_gates, d_logits, x, weight, logits, candidates, of_candidates, seqlens, indices, of_indices,
    d_x, partial, d_ready,
    stride_b, stride_n, stride_d, batch, length, scored, width, k, alpha, temperature,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """With s the gradient of the loss for a row's logit before the division by the temperature:

        s   = (d_logits[i] + d_gates[j] * alpha * G'(logit)) / temperature     at candidate i, kept as j
        d_x = d_rows[j] + s * w          d_w = sum of s * x          d_ready[i] = s

    Each term where there is one. A program goes through every PARTIALS-th tile of positions and keeps its sum of d_w to
    the end: sums are made in an order that depends on shapes alone.
    """
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    columns = (d < width)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    if weight is not None:
        w = tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
    tiles = tl.cdiv(length, ROWS)
    for item in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = (item // tiles).to(tl.int64)
        n = (item % tiles) * ROWS + tl.arange(0, ROWS)
        real = n < length
        j = place(indices + b * k, of_indices + b * length, n, k, real).to(tl.int64)
        i = n.to(tl.int64)
        if seqlens is not None:
            real = real & (n < tl.load(seqlens + b))
        if candidates is not None:
            i = place(candidates + b * scored, of_candidates + b * length, n, scored, real).to(tl.int64)
            real = i >= 0
        through_gate = real & (j >= 0)
        value = _activate(tl.load(logits + b * scored + i, mask=through_gate, other=0.0), ACTIVATION)
        if ACTIVATION == "sigmoid":
            slope = value * (1 - value)
        elif ACTIVATION == "tanh":
            slope = 1 - value * value
        else:
            slope = tl.full((ROWS,), 1.0, tl.float32)
        through_gate = through_gate & (value == value)
        s = tl.load(d_logits + b * scored + i, mask=real, other=0.0)
        s += tl.where(through_gate, tl.load(d_gates + b * k + j, mask=through_gate, other=0.0) * alpha * slope, 0.0)
        s = tl.div_rn(s, temperature)

        row = tl.load(d_rows + (b * k + j)[:, None] * width + d[None, :], mask=(j >= 0)[:, None] & columns, other=0.0)
        row = row.to(tl.float32)
        if weight is not None:
            source = x + b * stride_b + n[:, None].to(tl.int64) * stride_n + d[None, :].to(tl.int64) * stride_d
            total += s[:, None] * tl.load(source, mask=real[:, None] & columns, other=0.0).to(tl.float32)
            row += s[:, None] * w[None, :]
        elif tl.program_id(1) == 0:
            if candidates is None:
                tl.store(d_ready + b * scored + i, s, mask=n < length)
            else:
                tl.store(d_ready + b * scored + i, s, mask=real)
        tl.store(d_x + (b * length + n)[:, None] * width + d[None, :], row, mask=(n < length)[:, None] & columns)
    if weight is not None:
        tl.store(partial + tl.program_id(0).to(tl.int64) * width + d, tl.sum(total, 0), mask=d < width)


def route_backward(
    d_rows, d_gates, d_logits, x, weight, logits, candidates, seqlens, indices, activation, alpha, temperature
):
    batch, length, width = x.shape
    k, scored = indices.shape[1], logits.shape[1]
    d_rows, d_gates, d_logits, logits, indices = (t.contiguous() for t in (d_rows, d_gates, d_logits, logits, indices))
    candidates, seqlens = (t if t is None else t.contiguous() for t in (candidates, seqlens))
    size = tile(width)
    programs = min(PARTIALS, batch * triton.cdiv(length, size.rows))
    d_x = torch.empty(batch, length, width, dtype=x.dtype, device=x.device)
    partial = d_ready = None
    if weight is None:  # candidates that are none are not visited
        d_ready = (torch.empty_like if candidates is None else torch.zeros_like)(d_logits)
    else:
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if programs and width:
        _route_backward[(programs, triton.cdiv(width, size.width))](
            d_rows, d_gates, d_logits, x, None if weight is None else weight.contiguous(), logits,
            candidates, None if candidates is None else inverse_of(candidates, length), seqlens,
            indices, inverse_of(indices, length), d_x, partial, d_ready,
            *x.stride(), batch, length, scored, width, k, alpha, temperature,
            ACTIVATION=activation, ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        )  # fmt: skip
    if weight is None:
        return d_x, x.new_empty(0), d_ready
    return d_x, partial.sum(0).to(weight.dtype), d_logits.new_empty(0)
