"""Mixture-of-Depths: every other block of nano_gpt.py is taken by half of the tokens only.

The block is nano_gpt.py's own. Around it there are two operators: `ops.route` scores the tokens, keeps the best and
gathers their rows; `ops.scatter_back` adds what the block made of them to the stream, weighted by the router's gate,
so that the router learns from the model's loss. The other tokens pass by.
"""

import torch
from nano_gpt import GPT, main
from torch import nn

from mor_kernels import ops


class RoutedBlock(nn.Module):
    def __init__(self, block, width, capacity):
        super().__init__()
        self.block, self.capacity = block, capacity
        self.router = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self, x):
        routed = self.route(x)
        # The kept rows come in ascending order, so that causal attention among them is right; where each of them stands
        # in the text it knows from the position embedding, which was added before. Rows past a sequence's own are
        # zeros at the end, which no other row sees, and the index -1 keeps them out of the stream.
        update = self.block(routed.rows)
        self.kept = (routed.indices >= 0).sum() / x[..., 0].numel()
        # The block's output has its input in it: "delta" adds gate * (output - input).
        return ops.scatter_back(x, update, routed.indices, routed.gates, residual="delta")

    def route(self, x):
        gate = {"activation": "sigmoid", "alpha": 2.0}  # about 1 at first, as if there were no router
        if self.training:
            routed = ops.route(x, self.router, round(self.capacity * x.shape[1]), **gate)
            # Which tokens are the best depends on later ones, which aren't there when text is written. So the router
            # also learns to give the tokens that are kept, and no others, a logit above 0.
            self.aux = ops.aux_loss(routed.logits, routed.indices)
            return routed
        logits = ops.route(x, self.router, 0, **gate).logits  # keeps none: the scores alone
        most = max(int((logits > 0).sum(1).max()), 1)
        # A logit that is no number is never kept, so that these are the tokens above 0, however many.
        return ops.route(x, None, most, logits=logits.where(logits > 0, torch.nan), **gate)


class MixtureOfDepths(GPT):
    def __init__(self, vocab_size, capacity=0.5, **sizes):
        super().__init__(vocab_size, **sizes)
        for i in range(1, len(self.blocks), 2):
            self.blocks[i] = RoutedBlock(self.blocks[i], self.width, capacity)

    def loss(self, ids, targets):
        loss = super().loss(ids, targets)
        return loss + 0.1 * sum(block.aux for block in self.blocks[1::2])  # 0.001 in the paper, where training is long

    def report(self):
        shares = ", ".join(f"{block.kept:.0%}" for block in self.blocks[1::2])
        return f"; tokens that took the routed blocks, by the sign of their logit: {shares}"


if __name__ == "__main__":
    main(MixtureOfDepths)
