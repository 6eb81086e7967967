"""The operations of a Mixture-of-Recursions model, one sequence and one token at a time.

Symbols: B sequences, N positions, D model width, Nr recursions, H query heads, G key/value heads, d head width.
Lists of positions are padded at the end with -1. Arithmetic is float64 if the inputs are, and float32 otherwise; a
result described as "wide" comes back in that type, any other in the type of the input it was made from. Losses are
wide scalars, before their coefficients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """The type to compute in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


class Routed(NamedTuple):
    rows: Tensor  # (B, k, D), type of x: the kept rows; zeros where there is none
    indices: Tensor  # (B, k) int64: their positions, ascending, -1 at the end
    gates: Tensor  # (B, k) wide: alpha * G(logit); 0 where there is no row
    logits: Tensor  # (B, C), or (B, N) without candidates, wide; 0 where there is no candidate
    counts: Tensor  # (B,) int32: how many were kept


class DepthChoice(NamedTuple):
    depths: Tensor  # (B, N) int64 in 1..Nr; 0 at padding
    probs: Tensor  # (B, N, Nr) wide; 0 at padding
    gates: Tensor  # (B, N, Nr): alpha * probs
    logits: Tensor  # (B, N, Nr): after temperature, every entry finite; 0 at padding


class Packed(NamedTuple):
    indices: Tensor  # (Nr, B * N) int64: rows of the flattened (B * N) positions, ascending, -1 at the end
    cu_seqlens: Tensor  # (Nr, B + 1) int32: where each sequence's part begins and ends


def bounded(logits: Tensor) -> Tensor:
    """Infinite logits count as the largest finite ones. NaN stays NaN."""
    largest = torch.finfo(logits.dtype).max
    return logits.clamp(-largest, largest)


def activate(logits: Tensor, activation: str) -> Tensor:
    """G of the paper: sigmoid, tanh or none; softmax, over the last axis, is for token-choice."""
    if activation == "sigmoid":
        return torch.sigmoid(logits)
    if activation == "tanh":
        return torch.tanh(logits)
    if activation == "softmax":
        return torch.softmax(logits, dim=-1)
    if activation == "none":
        return logits
    raise ValueError(f"activation: expected sigmoid, tanh, softmax or none, got {activation!r}")


def gate(logit: Tensor, activation: str, alpha: float) -> Tensor:
    """alpha * G(logit), finite; 0 if the logit is NaN, so that such a token gets nothing added."""
    value = bounded(alpha * activate(logit, activation))
    return torch.where(value.isnan(), 0.0, value)


def strengths(logits: dict[int, Tensor], gates: dict[int, Tensor], rank: str, dtype: torch.dtype) -> dict[int, Tensor]:
    """What positions are ranked by: their logits, or for rank "score" their gates, rounded to ``dtype``. A logit that
    is NaN stays NaN, and its gate is 0."""
    if rank == "logit":
        return logits
    if rank == "score":
        return {p: logit if logit.isnan() else gates[p].to(dtype) for p, logit in logits.items()}
    raise ValueError(f"rank: expected logit or score, got {rank!r}")


def keep_best(strength_of: dict[int, Tensor], k: int) -> list[int]:
    """The k positions of greatest strength, ascending. Ties go to the lower position; NaN is never kept."""
    numbers = {position: strength.item() for position, strength in strength_of.items()}
    numbers = {position: number for position, number in numbers.items() if not math.isnan(number)}
    best_first = sorted(numbers, key=lambda position: (-numbers[position], position))
    return sorted(best_first[:k])


def route(
    x: Tensor,
    weight: Tensor | None,
    k: int,
    *,
    logits: Tensor | None = None,
    candidates: Tensor | None = None,
    seqlens: Tensor | None = None,
    indices: Tensor | None = None,
    activation: str = "sigmoid",
    alpha: float = 0.1,
    temperature: float = 1.0,
    rank: str = "logit",
) -> Routed:
    """Expert-choice routing at one recursion: of each sequence's candidates, keep the k best.

    x (B, N, D); weight (D,) of a linear router, or ``logits``, the outputs of any other router, in its place: (B, C)
    in the order of ``candidates``, (B, N) without them. Either is divided by ``temperature``.
    candidates (B, C): the positions that may be chosen (those kept one recursion earlier); all by default.
    seqlens (B,): positions from there on are padding, never chosen.
    indices (B, k): an earlier choice to repeat instead of choosing anew.
    rank: "logit" compares logits; "score" compares alpha * G(logit) rounded to x's type, as the authors do.
    """
    B, N, D = x.shape
    C = N if candidates is None else candidates.shape[1]
    router_outputs = None if logits is None else widen(logits)

    rows = x.new_zeros(B, k, D)
    kept_indices = torch.full((B, k), -1, dtype=torch.int64)
    gates = widen(x).new_zeros(B, k)
    logits = widen(x).new_zeros(B, C)
    counts = torch.zeros(B, dtype=torch.int32)

    for b in range(B):
        length = N if seqlens is None else int(seqlens[b])
        logit_of, gate_of = {}, {}
        for c in range(C):
            position = c if candidates is None else int(candidates[b, c])
            if not 0 <= position < length:
                continue
            if router_outputs is None:
                output = (widen(x[b, position]) * widen(weight)).sum()
            else:
                output = router_outputs[b, c]
            logit = bounded(output / temperature)
            logits[b, c] = logit_of[position] = logit
            gate_of[position] = gate(logit, activation, alpha)

        if indices is not None:
            kept = [position for position in indices[b].tolist() if position >= 0]
        else:
            kept = keep_best(strengths(logit_of, gate_of, rank, x.dtype), k)

        counts[b] = len(kept)
        for j, position in enumerate(kept):
            rows[b, j] = x[b, position]
            kept_indices[b, j] = position
            gates[b, j] = gate_of[position]
    return Routed(rows, kept_indices, gates, logits, counts)


def choose_depths(
    logits: Tensor,
    *,
    bias: Tensor | None = None,
    seqlens: Tensor | None = None,
    activation: str = "softmax",
    alpha: float = 1.0,
    temperature: float = 1.0,
) -> DepthChoice:
    """Token-choice routing: each token takes recursions 1..depth, where depth is its most probable expert.

    logits (B, N, Nr): outputs of the router on the state that enters recursion 1.
    bias (Nr,): added to the probabilities for the choice only (loss-free balancing), never to the gates.
    Ties go to the shallower depth. An expert whose logit is NaN is never chosen; if all are NaN, the depth is 1.
    """
    B, N, Nr = logits.shape
    logits = bounded(widen(logits) / temperature)
    lowest = -torch.finfo(logits.dtype).max
    finite = torch.zeros_like(logits)
    probs = torch.zeros_like(logits)
    depths = torch.zeros(B, N, dtype=torch.int64)
    for b in range(B):
        for t in range(N if seqlens is None else int(seqlens[b])):
            is_nan = logits[b, t].isnan()
            finite[b, t] = numbers = torch.where(is_nan, lowest, logits[b, t])
            probs[b, t] = p = activate(numbers, activation)
            # without a bias the logits decide: they rank as the probabilities do, and don't saturate
            preference = numbers if bias is None else p + bias.to(p.dtype)
            depths[b, t], best = 1, -math.inf
            for i in range(Nr):
                if not is_nan[i] and preference[i].item() > best:
                    depths[b, t], best = i + 1, preference[i].item()
    return DepthChoice(depths, probs, alpha * probs, finite)


def pack_depths(depths: Tensor, num_recursions: int) -> Packed:
    """For each recursion, the tokens that take it, one sequence after another.

    depths (B, N): number of recursions of each token, 0 for none.
    """
    B, N = depths.shape
    indices = torch.full((num_recursions, B * N), -1, dtype=torch.int64)
    cu_seqlens = torch.zeros(num_recursions, B + 1, dtype=torch.int32)
    for r in range(num_recursions):
        count = 0
        for b in range(B):
            for t in range(N):
                if depths[b, t] >= r + 1:
                    indices[r, count] = b * N + t
                    count += 1
            cu_seqlens[r, b + 1] = count
    return Packed(indices, cu_seqlens)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x (M, D) at indices (n,); zeros where the index is -1."""
    rows = x.new_zeros(len(indices), x.shape[1])
    for j, i in enumerate(indices.tolist()):
        if i >= 0:
            rows[j] = x[i]
    return rows


def scatter_back(
    x: Tensor, update: Tensor, indices: Tensor, gates: Tensor | None = None, *, residual: str = "block"
) -> Tensor:
    """Put what the block made of the kept rows back among all rows; the other rows stay as they are.

    Batched: x (B, N, D), update (B, k, D), indices (B, k), gates (B, k). Packed: x (M, D), update (n, D), indices
    (n,), gates (n,). Index -1 writes nowhere; no gates means gates of 1. With f a row of the update and g its gate,
    the new row is x + g f for residual "block", x + g (f - x) for "delta", and g f for "none".
    """
    if x.dim() == 3:
        return torch.stack(
            [
                scatter_back(x[b], update[b], indices[b], None if gates is None else gates[b], residual=residual)
                for b in range(len(x))
            ]
        )
    out = x.clone()
    for j, i in enumerate(indices.tolist()):
        if i >= 0:
            gate = 1.0 if gates is None else widen(gates[j])
            out[i] = combine(widen(x[i]), widen(update[j]), gate, residual).to(x.dtype)
    return out


def combine(x: Tensor, fx: Tensor, gate: Tensor | float, residual: str) -> Tensor:
    """The new state of one kept token, from its state x, the block's output fx and its gate."""
    if residual == "block":
        return x + gate * fx
    if residual == "delta":
        return x + gate * (fx - x)
    if residual == "none":
        return gate * fx
    raise ValueError(f"residual: expected block, delta or none, got {residual!r}")


def depth_step(
    x: Tensor,
    update: Tensor,
    logits: Tensor,
    recursions: Tensor,
    weight: Tensor,
    *,
    last: Tensor | None = None,
    replayed: Tensor | None = None,
    aux_weight: Tensor | None = None,
    activation: str = "sigmoid",
    alpha: float = 0.1,
    temperature: float = 1.0,
    residual: str = "block",
) -> tuple[Tensor, Tensor, Tensor]:
    """The end of a recursion of expert-choice when decoding -> new states (n, D), logits (n,), goes_on (n,) bool.

    x (n, D): the tokens' states that entered the recursions (n,), from 0; -1 for a row that stays as it is.
    logits (n,): scores of these states by the routers of those recursions. weight (Nr, D): the routers.
    A token goes on if it has taken fewer than ``last`` (n,) recursions and the next router's score of its new state is
    positive, or the auxiliary router's (if its own is a number), or if it was ``replayed``.
    """
    Nr = len(weight)
    x, logits = x.clone(), logits.clone()
    goes_on = torch.zeros(len(x), dtype=torch.bool)
    for i, r in enumerate(recursions.tolist()):
        if r < 0:
            continue
        g = gate(bounded(logits[i]), activation, alpha)
        x[i] = combine(widen(x[i]), widen(update[i]), g, residual).to(x.dtype)
        if r + 1 == Nr:
            continue
        logits[i] = (widen(x[i]) * widen(weight[r + 1])).sum() / temperature
        deciding = logits[i]
        if aux_weight is not None and not logits[i].isnan():
            deciding = (widen(x[i]) * widen(aux_weight[r + 1])).sum() / temperature
        wanted = bool(deciding > 0) or (replayed is not None and bool(replayed[i]))
        goes_on[i] = wanted and r + 1 < (Nr if last is None else int(last[i]))
    return x, logits, goes_on


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query (H, d) against the m keys and values (m, G, d) that it sees -> output (H, d), lse (H,), wide.

    Head h uses key/value head h // (H / G). A query that sees nothing gives zeros, with lse -inf.
    """
    query, keys, values = widen(query), widen(keys), widen(values)
    H, G = query.shape[0], keys.shape[1]
    if len(keys) == 0:
        return torch.zeros_like(query), query.new_full((H,), -math.inf)
    keys = keys.repeat_interleave(H // G, dim=1)
    values = values.repeat_interleave(H // G, dim=1)
    scores = scale * torch.einsum("hd,mhd->hm", query, keys)
    return torch.einsum("hm,mhd->hd", scores.softmax(dim=1), values), scores.logsumexp(dim=1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Tensor | None = None,
    q_lens: Tensor | None = None,
    k_lens: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each query sees the keys whose index is at most its position.

    q (B, Tq, H, d), k and v (B, Tk, G, d) -> (B, Tq, H, d) and, if asked for, lse (B, H, Tq), wide.
    q_positions (B, Tq): in units of key index; by default a query's position is its own index.
    q_lens, k_lens (B,): queries and keys from there on are padding. Queries at padding give zeros and lse -inf.
    """
    B, Tq, H, d = q.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(B, Tq, H, d, dtype=q.dtype)
    lse = torch.full((B, H, Tq), -math.inf, dtype=widen(q).dtype)
    for b in range(B):
        num_queries = Tq if q_lens is None else int(q_lens[b])
        num_keys = k.shape[1] if k_lens is None else int(k_lens[b])
        for t in range(num_queries):
            position = t if q_positions is None else int(q_positions[b, t])
            seen = min(max(position + 1, 0), num_keys)
            o, log_sum = attend(q[b, t], k[b, :seen], v[b, :seen], scale)
            out[b, t] = o.to(q.dtype)
            lse[b, :, t] = log_sum
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    q_positions: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` for sequences packed one after another.

    q (total_q, H, d), k and v (total_k, G, d); sequence b has queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and
    likewise for keys -> (total_q, H, d) and, if asked for, lse (H, total_q), wide.
    q_positions (total_q,): in units of key index inside the query's own sequence; by default the query's index there.
    Rows of q after the last sequence give zeros and lse -inf. The two maxima are not needed here.
    """
    total_q, H, d = q.shape
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = torch.zeros(total_q, H, d, dtype=q.dtype)
    lse = torch.full((H, total_q), -math.inf, dtype=widen(q).dtype)
    for b in range(len(q_bounds) - 1):
        first, last = q_bounds[b], q_bounds[b + 1]
        keys, values = k[k_bounds[b] : k_bounds[b + 1]], v[k_bounds[b] : k_bounds[b + 1]]
        positions = range(last - first) if q_positions is None else q_positions[first:last].tolist()
        o, log_sum = attention(
            q[first:last][None],
            keys[None],
            values[None],
            q_positions=torch.tensor([list(positions)]),
            softmax_scale=softmax_scale,
            return_lse=True,
        )
        out[first:last] = o[0]
        lse[:, first:last] = log_sum[0]
    return (out, lse) if return_lse else out


def rope(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary position embedding, NeoX style: entry i of a head is paired with entry i + d/2.

    x (..., H, d), positions (...) absolute. Pair i turns by the angle position * theta^(-2i/d).
    """
    half = x.shape[-1] // 2
    wide = widen(x)
    pair = torch.arange(half, dtype=wide.dtype)
    frequency = theta ** (-pair / half)
    angle = (positions.to(wide.dtype)[..., None] * frequency).unsqueeze(-2)  # the same for all heads
    first, second = wide[..., :half], wide[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """New caches in which row i of k and v (n, G, d) lies at slots[i]; the given caches stay as they are.

    Caches (num_pages, page_size, G, d); a slot is page * page_size + offset, and -1 writes nowhere.
    """
    page_size = k_cache.shape[1]
    new_k, new_v = k_cache.clone(), v_cache.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            new_k[page, offset] = k[i].to(k_cache.dtype)
            new_v[page, offset] = v[i].to(v_cache.dtype)
    return new_k, new_v


def kv_lookup(
    k_cache: Tensor, v_cache: Tensor, page_table: Tensor, cu_seqlens: Tensor, total: int
) -> tuple[Tensor, Tensor]:
    """The live keys and values of every row, packed one row after another: (total, G, d) each.

    page_table (R, max_pages): the pages of each row in order; cu_seqlens (R + 1,): where each row begins and ends in
    the result. Entries of the result after the last row are zeros.
    """
    page_size = k_cache.shape[1]
    bounds = cu_seqlens.tolist()
    k = k_cache.new_zeros(total, *k_cache.shape[2:])
    v = v_cache.new_zeros(total, *v_cache.shape[2:])
    for row in range(len(bounds) - 1):
        for i in range(bounds[row + 1] - bounds[row]):
            page, offset = int(page_table[row, i // page_size]), i % page_size
            k[bounds[row] + i] = k_cache[page, offset]
            v[bounds[row] + i] = v_cache[page, offset]
    return k, v


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    k_lens: Tensor,
    *,
    rows: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    q_positions: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Queries of R lanes, each over the first k_lens[lane] tokens of one row of a paged cache -> (n, H, d).

    q (n, H, d); lane i has the queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] (by default query i), and reads row
    rows[i] (by default i; -1: none). A query sees the keys up to its position, by default those up to its own token,
    the lane's queries being its newest tokens. Queries that see nothing, or belong to no lane, give zeros.
    """
    page_size, scale = k_cache.shape[1], q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    bounds = list(range(len(k_lens) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    out = torch.zeros(q.shape, dtype=q.dtype)
    for lane, length in enumerate(k_lens.tolist()):
        row = lane if rows is None else int(rows[lane])
        if row < 0:
            continue
        places = [divmod(i, page_size) for i in range(length)]
        k, v = (
            torch.stack([cache[int(page_table[row, p]), o] for p, o in places]) if places else cache[:0, 0]
            for cache in (k_cache, v_cache)
        )
        for i in range(bounds[lane], bounds[lane + 1]):
            position = length - bounds[lane + 1] + i if q_positions is None else int(q_positions[i])
            seen = min(max(position + 1, 0), length)
            out[i] = attend(q[i], k[:seen], v[:seen], scale)[0].to(q.dtype)
    return out


def mean_of(terms: list[Tensor], like: Tensor) -> Tensor:
    """The mean of scalar terms, 0 in the wide type of ``like`` if there are none."""
    return torch.stack(terms).mean() if terms else widen(like).new_zeros(())


def aux_loss(logits: Tensor, candidates: Tensor | None, kept: Tensor, seqlens: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of the logits against "was kept", averaged over all real candidates in the batch.

    logits (B, C) in the order of candidates (B, C), -1 at the end; without candidates, of positions 0..C-1, those
    from seqlens on being padding. kept (B, k): the positions that were kept, -1 at the end.
    """
    B, C = logits.shape
    terms = []
    for b in range(B):
        kept_here = set(kept[b].tolist())
        for c in range(C):
            position = c if candidates is None else int(candidates[b, c])
            if position < 0 or (seqlens is not None and position >= seqlens[b]):
                continue
            logit = bounded(widen(logits[b, c]))
            # -log sigmoid(logit) if it was kept, -log(1 - sigmoid(logit)) if not
            terms.append(-F.logsigmoid(logit if position in kept_here else -logit))
    return mean_of(terms, logits)


def z_loss(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean squared logsumexp over the experts, which keeps logits small.

    logits (B, N, Nr) of token-choice, or (B, C) of expert-choice, where a single logit is its own logsumexp.
    valid (B, N) or (B, C): which entries count; all by default.
    """
    logits = bounded(widen(logits))
    log_sums = logits.logsumexp(dim=-1) if logits.dim() == 3 else logits
    B, N = log_sums.shape
    terms = [log_sums[b, t] ** 2 for b in range(B) for t in range(N) if valid is None or valid[b, t]]
    return mean_of(terms, logits)


def balance_loss(probs: Tensor, depths: Tensor, scope: str = "sequence") -> Tensor:
    """Sum over experts i of f_i P_i: f_i is Nr times the share of tokens that chose i, P_i their mean probability.

    probs (B, N, Nr), depths (B, N) with 0 at padding. scope "sequence": computed for each sequence that has a real
    token, then averaged over these; "batch": once over all real tokens.
    """
    B, N, Nr = probs.shape
    probs = widen(probs)
    sequences = [[(b, t) for t in range(N) if depths[b, t] > 0] for b in range(B)]
    if scope == "sequence":
        groups = [tokens for tokens in sequences if tokens]
    elif scope == "batch":
        everything = [token for tokens in sequences for token in tokens]
        groups = [everything] if everything else []
    else:
        raise ValueError(f"scope: expected sequence or batch, got {scope!r}")

    terms = []
    for tokens in groups:
        total = 0
        for i in range(Nr):
            chosen = sum(1 for b, t in tokens if depths[b, t] == i + 1)
            f_i = Nr * chosen / len(tokens)
            P_i = torch.stack([probs[b, t, i] for b, t in tokens]).mean()
            total = total + f_i * P_i
        terms.append(total)
    return mean_of(terms, probs)


def router_bias_update(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Loss-free balancing: raise the bias of experts chosen less often than average, lower that of the others.

    bias (Nr,), counts (Nr,): how many tokens chose each expert -> the new bias (Nr,).
    """
    counts = counts.double()
    return bias + (rate * torch.sign(counts.mean() - counts)).to(bias.dtype)


def dead_token_ratio(kept_last: Tensor, valid: Tensor | None = None) -> float:
    """kept_last (B, N) bool: kept at the last recursion. The share of positions kept in no sequence of the batch, of
    those at which some sequence has a token (valid (B, N) bool, False at padding; all by default)."""
    B, N = kept_last.shape
    there = [t for t in range(N) if valid is None or any(valid[b, t] for b in range(B))]
    dead = [t for t in there if not any(kept_last[b, t] for b in range(B))]
    return len(dead) / max(len(there), 1)


def sampling_accuracy(predicted: Tensor, kept: Tensor, valid: Tensor | None = None) -> float:
    """How often the inference decision agrees with the top-k choice, over the entries that are valid."""
    entries = range(kept.numel()) if valid is None else [i for i, ok in enumerate(valid.flatten().tolist()) if ok]
    predicted, kept = predicted.flatten().tolist(), kept.flatten().tolist()
    return sum(bool(predicted[i]) == bool(kept[i]) for i in entries) / max(len(entries), 1)


def max_vio(counts: Tensor) -> float:
    """counts (Nr,): tokens per expert. How far the busiest exceeds the mean, relative to the mean; 0 is balanced."""
    loads = counts.tolist()
    mean = sum(loads) / len(loads)
    return (max(loads) - mean) / mean if mean > 0 else 0.0


def routing_entropy(probs: Tensor) -> Tensor:
    """Entropy of the average probabilities. probs (tokens, Nr) -> wide scalar; log(Nr) is balanced."""
    average = widen(probs).mean(dim=0)
    return -torch.special.xlogy(average, average).sum()
