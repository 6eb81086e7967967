"""A plain GPT that learns to write Python's language reference, letter by letter.

mixture_of_depths.py and mixture_of_recursions.py, beside this file, make its depth depend on the token.
"""

import argparse
from pydoc_data.topics import topics  # text that every Python has

import torch
import torch.nn.functional as F
from torch import nn

TEXT = "".join(topics.values())
LETTERS = sorted(set(TEXT))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), for x (B, N, D)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def attention(self, h):
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, N, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocab_size, width=96, heads=3, layers=4, length=128):
        super().__init__()
        self.width, self.length = width, length
        self.token, self.position = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.token.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, ids):
        """ids (B, N) -> logits (B, N, V)."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.layers(x)))

    def layers(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, ids, targets):
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def report(self):
        return ""


def train(model, steps, batch_size=8):
    """Train on all but the last tenth of the text; returns the loss of that tenth's beginning before and after."""
    device = next(model.parameters()).device
    place = {letter: i for i, letter in enumerate(LETTERS)}
    ids = torch.tensor([place[letter] for letter in TEXT], device=device)
    seen = len(ids) * 9 // 10
    held_out = ids[seen:][: 16 * (model.length + 1)].view(16, -1)

    def evaluate():
        model.eval()
        with torch.no_grad():
            return F.cross_entropy(model(held_out[:, :-1]).flatten(0, 1), held_out[:, 1:].flatten()).item()

    before = evaluate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        starts = torch.randint(seen - model.length, (batch_size, 1), device=device)
        window = ids[starts + torch.arange(model.length + 1, device=device)]
        model.loss(window[:, :-1], window[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, evaluate()


def main(kind):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = kind(len(LETTERS)).to("cuda" if torch.cuda.is_available() else "cpu")
    before, after = train(model, options.steps)
    print(f"held-out loss {before:.3f} before, {after:.3f} after {options.steps} steps{model.report()}")


if __name__ == "__main__":
    main(GPT)
