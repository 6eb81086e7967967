"""The three key/value strategies of one forward pass (paper, section "KV Caching Strategies").

recursion_wise: kept tokens attend to the kept tokens of the same recursion.
shared:         kept tokens attend to the first recursion's keys/values of all tokens.
hybrid:         as shared, with the kept tokens' own fresh keys/values in place of the first recursion's.

A recursion is an object of its own, whose ``attend`` the layers call; ``slot`` is a layer's place within the recursion,
where keys/values are shared. Called once more in the backward pass (activation checkpointing), it gives the same.
"""

from __future__ import annotations

from torch import Tensor

from .. import ops
from ..ops._indices import flat_rows
from .layers import Project


class KeyValues:
    """One recursion; the two layouts below say how tokens are laid out.

    ``before`` is the recursion that came before this one, None at the first.
    """

    def __init__(self, strategy: str, hybrid_base: str, before: KeyValues | None) -> None:
        self.strategy, self.hybrid_base, self.first = strategy, hybrid_base, before is None
        self.base: dict[int, tuple[Tensor, Tensor]] = {}  # by slot, what later recursions build on
        self.given = before.base if before else {}  # what this one builds on
        if before and (strategy == "shared" or hybrid_base == "first"):
            self.base = before.base

    def attend(self, slot: int, project: Project, heads: int, positions: Tensor, theta: float) -> Tensor:
        if self.strategy == "shared" and not self.first:
            return self.over_all(ops.rope(project(keys=False), positions, theta), *self.given[slot])
        q, k, v = ops.rope_qkv(project(), heads, positions, theta)
        if self.first or self.strategy == "recursion_wise":
            if self.strategy != "recursion_wise":
                self.base.setdefault(slot, (k, v))
            return self.among_kept(q, k, v)
        if self.hybrid_base == "first":
            return self.over_all(q, *self.given[slot], k, v)
        base = self.replace(k, v, *self.given[slot])
        self.base.setdefault(slot, base)
        return self.over_all(q, *base)

    def among_kept(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to the tokens of this recursion."""
        raise NotImplementedError

    def over_all(
        self, q: Tensor, k: Tensor, v: Tensor, k_fresh: Tensor | None = None, v_fresh: Tensor | None = None
    ) -> Tensor:
        """Attention to the first recursion's tokens, or to the fresh keys and values in place of their own."""
        raise NotImplementedError

    def replace(self, k: Tensor, v: Tensor, k_base: Tensor, v_base: Tensor) -> tuple[Tensor, Tensor]:
        """The first recursion's keys and values with these in their places."""
        raise NotImplementedError


class BatchedKeyValues(KeyValues):
    """Tokens as (B, k) rows; all N positions at the first recursion, real ones first."""

    def __init__(
        self,
        strategy: str = "recursion_wise",
        hybrid_base: str = "first",
        before: KeyValues | None = None,
        *,
        seqlens: Tensor | None = None,
        indices: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """indices (B, k) kept positions, -1 past counts (B,); None for all positions. seqlens (B,) where there is
        padding."""
        super().__init__(strategy, hybrid_base, before)
        self.indices, self.seqlens = indices, seqlens
        # without padding every row is full, and plain causal attention needs no lengths
        self.counts = counts if indices is not None and seqlens is not None else seqlens

    def among_kept(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, q_lens=self.counts, k_lens=self.counts)

    def over_all(
        self, q: Tensor, k: Tensor, v: Tensor, k_fresh: Tensor | None = None, v_fresh: Tensor | None = None
    ) -> Tensor:
        if self.indices is None:  # all positions are kept
            return self.among_kept(q, k if k_fresh is None else k_fresh, v if v_fresh is None else v_fresh)
        return ops.attention(
            q,
            k,
            v,
            q_positions=self.indices,
            k_fresh=k_fresh,
            v_fresh=v_fresh,
            q_lens=self.counts,
            k_lens=self.seqlens,
        )

    def replace(self, k: Tensor, v: Tensor, k_base: Tensor, v_base: Tensor) -> tuple[Tensor, Tensor]:
        if self.indices is None:
            return k, v
        slots = flat_rows(self.indices, k_base.shape[1])  # a page a sequence
        return ops.kv_append(k.flatten(0, 1), v.flatten(0, 1), k_base, v_base, slots)


class PackedKeyValues(KeyValues):
    """Tokens packed (n,), sequence after sequence; all real tokens at the first recursion."""

    def __init__(
        self,
        strategy: str,
        hybrid_base: str,
        before: PackedKeyValues | None,
        *,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        places: Tensor,
    ) -> None:
        """positions (n,) in each token's sequence; places (n,) among the first recursion's tokens, -1 for none."""
        super().__init__(strategy, hybrid_base, before)
        self.positions, self.places = positions, places
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen
        self.cu_all: Tensor = before.cu_all if before else cu_seqlens
        self.max_all: int = before.max_all if before else max_seqlen

    def among_kept(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention_varlen(q, k, v, self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)

    def over_all(
        self, q: Tensor, k: Tensor, v: Tensor, k_fresh: Tensor | None = None, v_fresh: Tensor | None = None
    ) -> Tensor:
        rows = self.cu_seqlens, self.cu_all, self.max_seqlen, self.max_all
        return ops.attention_varlen(q, k, v, *rows, q_positions=self.positions, k_fresh=k_fresh, v_fresh=v_fresh)

    def replace(self, k: Tensor, v: Tensor, k_base: Tensor, v_base: Tensor) -> tuple[Tensor, Tensor]:
        # pages of one token
        k_all, v_all = ops.kv_append(k, v, k_base[:, None], v_base[:, None], self.places)
        return k_all[:, 0], v_all[:, 0]
