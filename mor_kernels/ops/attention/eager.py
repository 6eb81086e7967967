"""Attention in plain PyTorch, over blocks of queries so that the scores of a long sequence never exist at once.

With s = scale * q k^T where the query sees the key and -inf elsewhere:
    lse = logsumexp(s),  p = exp(s - lse),  out = p v
    d_v = p^T d_out,  d_s = p * (d_out v^T - sum(d_out * out) + d_lse),  d_q = scale * d_s k,  d_k = scale * d_s^T q
"""

from __future__ import annotations

import torch

from .. import _checks
from .._numeric import wide

_SCORES_AT_ONCE = 2**26


def _blocks(batch, heads, queries, keys):
    """Slices of the queries with at most ``_SCORES_AT_ONCE`` scores each."""
    size = max(1, _SCORES_AT_ONCE // max(1, batch * heads * keys))
    return [slice(i, min(i + size, queries)) for i in range(0, queries, size)]


def _valid(length, lens, like):
    index = torch.arange(length, device=like.device)
    return None if lens is None else index < lens[:, None]


def _heads_first(t, dtype, valid=None):
    """(B, T, H, d) -> (B, H, T, d) in the dtype that sums are made in; padding, which may hold anything, is zeroed."""
    t = t if valid is None else torch.where(valid[:, :, None, None], t, 0)
    return t.to(dtype).transpose(1, 2)


def _setup(q, k, v, q_positions, q_lens, k_lens):
    dtype = wide(q.dtype)
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    if q_positions is None:
        q_positions = torch.arange(queries, device=q.device).expand(batch, queries)
    q_valid = _valid(queries, q_lens, q)
    q_positions = q_positions if q_valid is None else torch.where(q_valid, q_positions, -1)
    q_positions = q_positions.clamp(max=keys)  # as good as any larger one, and safe to add to
    last = q_positions.amax(1) + 1 if queries else torch.zeros(batch, dtype=torch.int64, device=q.device)
    k_valid = _valid(keys, last if k_lens is None else torch.minimum(last, k_lens), k)
    q5 = _heads_first(q, dtype, q_valid).reshape(batch, groups, heads // groups, queries, width)
    k5, v5 = (_heads_first(t, dtype, k_valid)[:, :, None] for t in (k, v))
    some = ((q_positions >= 0) & k_valid.any(1, keepdim=True))[:, None, None, :, None]
    return q5, k5, v5, q_positions, k_valid, some


def _scores(q5, k5, q_positions, k_valid, rows, scale):
    s = (q5[:, :, :, rows] @ k5.transpose(-1, -2)) * scale
    index = torch.arange(s.shape[-1], device=s.device)
    seen = (index <= q_positions[:, rows, None]) & k_valid[:, None]
    return s.masked_fill(~seen[:, None, None], -torch.inf)


def _slots(k, q_positions, q_lens):
    """Where (B, Tq) fresh keys go; one past the end for those of padding and of positions that aren't there."""
    valid = (q_positions >= 0) & (q_positions < k.shape[1])
    if q_lens is not None:
        valid &= _valid(q_positions.shape[1], q_lens, k)
    return torch.where(valid, q_positions, k.shape[1]).to(torch.int64)


def _replace(x, fresh, slots):
    """A copy of x with ``fresh`` (a tensor or a number) at the slots."""
    longer = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))
    where = slots[..., None, None].expand(*slots.shape, *x.shape[2:])
    return longer.scatter(1, where, fresh)[:, :-1]


def _pick(x, slots):
    longer = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))
    return longer.gather(1, slots[..., None, None].expand(*slots.shape, *x.shape[2:]))


def check(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale):
    if k_fresh is not None:
        slots = _slots(k, q_positions, q_lens)
        _checks.distinct("attention", "q_positions", torch.where(slots < k.shape[1], slots, -1), "position")


def attention(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale):
    if k_fresh is not None:
        slots = _slots(k, q_positions, q_lens)
        k, v = _replace(k, k_fresh, slots), _replace(v, v_fresh, slots)
    batch, queries, heads, width = q.shape
    q5, k5, v5, q_positions, k_valid, some = _setup(q, k, v, q_positions, q_lens, k_lens)
    out, lse = torch.zeros_like(q5), q5.new_full(q5.shape[:-1], -torch.inf)
    for rows in _blocks(batch, heads, queries, k.shape[1]):
        s = _scores(q5, k5, q_positions, k_valid, rows, scale)
        block_lse = s.logsumexp(-1) if s.shape[-1] else lse[:, :, :, rows]
        lse[:, :, :, rows] = block_lse
        p = torch.exp(s - block_lse[..., None])
        out[:, :, :, rows] = torch.where(some[:, :, :, rows], p @ v5, 0)  # of what sees nothing p is NaN
    out = out.reshape(batch, heads, queries, width).transpose(1, 2).to(q.dtype)
    return out, lse.reshape(batch, heads, queries)


def attention_backward(d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse, q_positions, q_lens, k_lens, scale):
    if k_fresh is not None:
        slots = _slots(k, q_positions, q_lens)
        merged = _replace(k, k_fresh, slots), _replace(v, v_fresh, slots)
        rest = out, lse, q_positions, q_lens, k_lens, scale
        d_q, d_k, d_v, *_ = attention_backward(d_out, d_lse, q, *merged, None, None, *rest)
        return d_q, *(_replace(t, 0, slots) for t in (d_k, d_v)), *(_pick(t, slots) for t in (d_k, d_v))
    batch, queries, heads, width = q.shape
    q5, k5, v5, q_positions, k_valid, some = _setup(q, k, v, q_positions, q_lens, k_lens)
    q_valid = _valid(queries, q_lens, q)
    do5, out5 = (_heads_first(t, q5.dtype, q_valid).reshape(q5.shape) for t in (d_out, out))
    lse5 = torch.where(some[..., 0], lse.reshape(q5.shape[:-1]), torch.inf)  # so that p is 0 where nothing is seen
    through_norm = -(do5 * out5).sum(-1)
    if d_lse is not None:
        d_lse = d_lse if q_valid is None else torch.where(q_valid[:, None], d_lse, 0)
        through_norm += d_lse.reshape(lse5.shape)
    dq5, dk5, dv5 = torch.zeros_like(q5), torch.zeros_like(k5), torch.zeros_like(v5)
    for rows in _blocks(batch, heads, queries, k.shape[1]):
        p = torch.exp(_scores(q5, k5, q_positions, k_valid, rows, scale) - lse5[:, :, :, rows, None])
        do = do5[:, :, :, rows]
        ds = p * (do @ v5.transpose(-1, -2) + through_norm[:, :, :, rows, None]) * scale
        dq5[:, :, :, rows] = torch.where(some[:, :, :, rows], ds @ k5, 0)
        dk5 += (ds.transpose(-1, -2) @ q5[:, :, :, rows]).sum(2, keepdim=True)
        dv5 += (p.transpose(-1, -2) @ do).sum(2, keepdim=True)
    d_q = dq5.reshape(batch, heads, queries, width).transpose(1, 2)
    d_k, d_v = (torch.where(k_valid[..., None, None], t.squeeze(2).transpose(1, 2), 0) for t in (dk5, dv5))
    return *(t.to(q.dtype) for t in (d_q, d_k, d_v)), q.new_empty(0), q.new_empty(0)


def check_varlen(q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale):
    op = "attention_varlen"
    for name, t, cu_seqlens, longest in (("q", q, cu_seqlens_q, max_seqlen_q), ("k", k, cu_seqlens_k, max_seqlen_k)):
        _checks.offsets(op, f"cu_seqlens_{name}", cu_seqlens, t.shape[0])
        lens = cu_seqlens.diff()
        if len(lens) and int(lens.max()) > longest:
            _checks.fail(op, f"max_seqlen_{name}", f"at least {int(lens.max())}", longest)
    if k_fresh is not None and len(lens):
        position = q_positions[: int(cu_seqlens_q[-1])]
        sequence = torch.repeat_interleave(cu_seqlens_q.diff())
        there = (position >= 0) & (position < lens[sequence])
        _checks.distinct(op, "q_positions", torch.where(there, cu_seqlens_k[sequence] + position, -1), "position")


def _pad(packed, cu_seqlens, max_seqlen):
    """(total, ...) -> (B, max_seqlen, ...); what lies past a sequence's end is left to the lengths to hide."""
    index = cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=packed.device)
    if packed.shape[0] == 0:
        return packed.new_zeros(*index.shape, *packed.shape[1:])
    return packed[index.clamp(max=packed.shape[0] - 1)]


def _unpad(padded, cu_seqlens, total):
    """(B, max_seqlen, ...) -> (total, ...); zeros past the last sequence's end."""
    batch, longest = padded.shape[:2]
    if batch * longest == 0:
        return padded.new_zeros(total, *padded.shape[2:])
    index = torch.arange(total, device=padded.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True).clamp(max=batch - 1)
    column = (index - cu_seqlens[row]).clamp(max=longest - 1)
    inside = (index < cu_seqlens[-1]).view(-1, *[1] * (padded.dim() - 2))
    return torch.where(inside, padded[row, column], 0)


def _unpad_lse(lse, cu_seqlens, total):
    packed = _unpad(lse.transpose(1, 2), cu_seqlens, total)
    inside = torch.arange(total, device=lse.device) < cu_seqlens[-1]
    return torch.where(inside[:, None], packed, -torch.inf).T


def _batched(q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions):
    q_lens, k_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    if q_positions is not None:
        q_positions = _pad(q_positions, cu_seqlens_q, max_seqlen_q)
    k, v = (_pad(t, cu_seqlens_k, max_seqlen_k) for t in (k, v))
    if k_fresh is not None:
        k_fresh, v_fresh = (_pad(t, cu_seqlens_q, max_seqlen_q) for t in (k_fresh, v_fresh))
    return _pad(q, cu_seqlens_q, max_seqlen_q), k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens


def attention_varlen(
    q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale
):
    padded = _batched(q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions)
    out, lse = attention(*padded, scale)
    return _unpad(out, cu_seqlens_q, q.shape[0]), _unpad_lse(lse, cu_seqlens_q, q.shape[0])


def attention_varlen_backward(
    d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale,
):  # fmt: skip
    total_q, total_k = q.shape[0], k.shape[0]
    padded = _batched(q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions)
    d_out, out, lse = (_pad(t, cu_seqlens_q, max_seqlen_q) for t in (d_out, out, lse.T))
    if d_lse is not None:
        d_lse = _pad(d_lse.T, cu_seqlens_q, max_seqlen_q).transpose(1, 2)
    *inputs, q_positions, q_lens, k_lens = padded
    d_q, d_k, d_v, *d_fresh = attention_backward(
        d_out, d_lse, *inputs, out, lse.transpose(1, 2), q_positions, q_lens, k_lens, scale
    )
    d_k, d_v = (_unpad(t, cu_seqlens_k, total_k) for t in (d_k, d_v))
    if k_fresh is not None:
        d_fresh = [_unpad(t, cu_seqlens_q, total_q) for t in d_fresh]
    return _unpad(d_q, cu_seqlens_q, total_q), d_k, d_v, *d_fresh
