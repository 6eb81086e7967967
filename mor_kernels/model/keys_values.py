"""The three key/value strategies of one forward pass (paper, section "KV Caching Strategies").

recursion_wise: kept tokens attend to the kept tokens of the same recursion.
shared:         kept tokens attend to the first recursion's keys/values of all tokens.
hybrid:         as shared, with the kept tokens' own fresh keys/values in place of the first recursion's.

A recursion is an object of its own, whose ``attend`` the layers call; ``slot`` is a layer's place within the recursion,
where keys/values are shared. Called once more in the backward pass (activation checkpointing), it gives the same.
"""

from __future__ import annotations

import torch

from .. import ops
from ..ops._indices import flat_rows


class KeyValues:
    """One recursion; the two layouts below say how tokens are laid out.

    ``before`` is the recursion that came before this one, None at the first.
    """

    def __init__(self, strategy: str, hybrid_base: str, before: KeyValues | None):
        self.strategy, self.hybrid_base, self.first = strategy, hybrid_base, before is None
        self.base: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by slot, what later recursions build on
        self.given = before.base if before else {}
        if before and (strategy == "shared" or hybrid_base == "first"):
            self.base = before.base

    def attend(self, slot, project, positions, theta):
        if self.strategy == "shared" and not self.first:
            (q,) = project(keys=False)
            return self.over_all(ops.rope(q, positions, theta), *self.given[slot])
        q, k, v = project()
        q, k = ops.rope((q, k), positions, theta)
        if self.first or self.strategy == "recursion_wise":
            if self.strategy != "recursion_wise":
                self.base.setdefault(slot, (k, v))
            return self.among_kept(q, k, v)
        if self.hybrid_base == "first":
            return self.over_all(q, *self.given[slot], k, v)
        base = self.replace(k, v, *self.given[slot])
        self.base.setdefault(slot, base)
        return self.over_all(q, *base)


class BatchedKeyValues(KeyValues):
    """Tokens as (B, k) rows; all N positions at the first recursion, real ones first."""

    def __init__(self, strategy="recursion_wise", hybrid_base="first", before=None, *, seqlens=None, indices=None,
                 counts=None):  # fmt: skip
        """indices (B, k) kept positions, -1 past counts (B,); None for all positions. seqlens (B,) where there is
        padding."""
        super().__init__(strategy, hybrid_base, before)
        self.indices, self.seqlens = indices, seqlens
        # without padding every row is full, and plain causal attention needs no lengths
        self.counts = counts if indices is not None and seqlens is not None else seqlens

    def among_kept(self, q, k, v):
        return ops.attention(q, k, v, q_lens=self.counts, k_lens=self.counts)

    def over_all(self, q, k, v, k_fresh=None, v_fresh=None):
        if self.indices is None:  # all positions are kept
            return self.among_kept(q, *((k, v) if k_fresh is None else (k_fresh, v_fresh)))
        lengths = {"q_lens": self.counts, "k_lens": self.seqlens}
        return ops.attention(q, k, v, q_positions=self.indices, k_fresh=k_fresh, v_fresh=v_fresh, **lengths)

    def replace(self, k, v, k_base, v_base):
        if self.indices is None:
            return k, v
        slots = flat_rows(self.indices, k_base.shape[1])  # a page a sequence
        return ops.kv_append(k.flatten(0, 1), v.flatten(0, 1), k_base, v_base, slots)


class PackedKeyValues(KeyValues):
    """Tokens packed (n,), sequence after sequence; all real tokens at the first recursion."""

    def __init__(self, strategy, hybrid_base, before, *, positions, cu_seqlens, max_seqlen, places):
        """positions (n,) in each token's sequence; places (n,) among the first recursion's tokens, -1 for none."""
        super().__init__(strategy, hybrid_base, before)
        self.positions, self.places = positions, places
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen
        self.cu_all, self.max_all = (before.cu_all, before.max_all) if before else (cu_seqlens, max_seqlen)

    def among_kept(self, q, k, v):
        return ops.attention_varlen(q, k, v, self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)

    def over_all(self, q, k, v, k_fresh=None, v_fresh=None):
        rows = self.cu_seqlens, self.cu_all, self.max_seqlen, self.max_all
        return ops.attention_varlen(q, k, v, *rows, q_positions=self.positions, k_fresh=k_fresh, v_fresh=v_fresh)

    def replace(self, k, v, k_base, v_base):
        k_base, v_base = (t[:, None] for t in (k_base, v_base))  # pages of one token
        return tuple(t[:, 0] for t in ops.kv_append(k, v, k_base, v_base, self.places))
