"""Mixture-of-Recursions: nano_gpt.py's middle blocks are one shared block, which each token takes one to three times.

The first and the last block stay as they are ("Middle-Cycle" in the paper). A router at each recursion keeps some of
the tokens that the recursion before kept (expert-choice), and these attend to one another alone ("recursion-wise"
keys and values), which is what nano_gpt.py's own block does when it is given their rows.
"""

import torch
from nano_gpt import GPT, main
from torch import nn

from mor_kernels import ops


class MixtureOfRecursions(GPT):
    def __init__(self, vocab_size, recursions=3, **sizes):
        super().__init__(vocab_size, **sizes)
        self.routers = nn.ParameterList(torch.randn(self.width) / self.width**0.5 for _ in range(recursions))

    def layers(self, x):
        first, *shared, last = self.blocks
        x = first(x)
        candidates, self.aux, self.kept = None, 0.0, []
        for r, router in enumerate(self.routers):
            routed = self.route(x, r, router, candidates)
            update = routed.rows  # (B, k, D), in ascending order of position; zeros at the end of a shorter row
            for block in shared:
                update = block(update)
            if self.training:  # teaches the routers to say by a logit above 0 what was kept
                self.aux = self.aux + ops.aux_loss(routed.logits, routed.indices, candidates=candidates)
            x = ops.scatter_back(x, update, routed.indices, routed.gates)  # x + gate * update (equation 1)
            candidates = routed.indices  # the next recursion chooses among these (hierarchical filtering)
            self.kept.append((routed.indices >= 0).sum() / x[..., 0].numel())
        return last(x)

    def route(self, x, r, router, candidates):
        length, recursions = x.shape[1], len(self.routers)
        if self.training or r == 0:  # the first recursion keeps all
            return ops.route(x, router, length * (recursions - r) // recursions, candidates=candidates)
        # Causally, as text is written: a token goes on while its logit is above 0, whatever follows it. What is no
        # number is never kept.
        logits = ops.route(x, router, 0, candidates=candidates).logits  # keeps none: the scores alone
        most = max(int((logits > 0).sum(1).max()), 1)
        logits = logits.where(logits > 0, torch.nan)
        return ops.route(x, None, most, logits=logits, candidates=candidates)

    def loss(self, ids, targets):
        loss = super().loss(ids, targets)
        return loss + 0.1 * self.aux  # 0.001 in the paper, where training is long

    def report(self):
        return "; tokens at each recursion, by the sign of their logit: " + ", ".join(f"{k:.0%}" for k in self.kept)


if __name__ == "__main__":
    main(MixtureOfRecursions)
