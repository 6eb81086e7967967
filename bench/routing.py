"""Routing, scatter-back and token-choice packing against plain PyTorch, eager and compiled.

    python bench/routing.py [--quick] [--only "route B32"] [--out DIR]

Inputs are random normal bf16; the linear router has a sigmoid gate with alpha 0.1. A rival has several forms where
several are natural; the fastest one counts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from bench.harness import COMPILE, ROUNDOFF, Case, Implementation, close, main, our_backends, require
from mor_kernels import ops

ALPHA = 0.1
ROUTE = ((32, 2048, 960, 1365), (32, 2048, 960, 682), (16, 2048, 2048, 1024), (16, 4096, 960, 2048),
         (4, 16384, 960, 5461), (1, 131072, 2048, 43690))  # fmt: skip
SCATTER = ROUTE[:3]
SELECT = ((32, 2048, 1365), (4, 16384, 5461), (1, 131072, 43690))
PACK = (32, 2048, 3)
AUX = (32, 2048, 1365)
BF16, FP32, INT64 = 2, 4, 8  # bytes
EXACT = 1e-5  # of the sum of magnitudes: sums in fp32, whatever their order


def select(logits, k):
    return logits.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values


def flat_rows(indices, length):
    first = torch.arange(indices.shape[0], device=indices.device)[:, None] * length
    return (indices + first).view(-1)


def take_gather(x, indices):
    return x.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))


def take_index_select(x, indices):
    rows = x.flatten(0, 1).index_select(0, flat_rows(indices, x.shape[1]))
    return rows.view(*indices.shape, x.shape[-1])


def route_by(take, x, weight, k):
    logits = (x @ weight).float()
    indices = select(logits, k)
    gates = ALPHA * torch.sigmoid(logits.gather(1, indices))
    return take(x, indices), indices, gates, logits


def change(x, update, indices, gates, residual):
    """What is added at the kept rows."""
    f = update if residual == "block" else update - take_gather(x, indices)
    return gates[..., None].to(update.dtype) * f


def by_index_add(x, update, indices, gates, residual="block", in_place=False):
    rows, flat = flat_rows(indices, x.shape[1]), x.view(-1, x.shape[-1])
    add = flat.index_add_ if in_place else flat.index_add
    return add(0, rows, change(x, update, indices, gates, residual).flatten(0, 1)).view_as(x)


def by_scatter_add(x, update, indices, gates, residual="block", in_place=False):
    add = x.scatter_add_ if in_place else x.scatter_add
    return add(1, indices[..., None].expand_as(update), change(x, update, indices, gates, residual))


def by_index_put(x, update, indices, gates, residual="block", in_place=False):
    kept = take_gather(x, indices) + change(x, update, indices, gates, residual)
    put = x.index_put_ if in_place else x.index_put
    return put((torch.arange(len(x), device=x.device)[:, None], indices), kept)


def pack_plain(depths, num_recursions):
    """Static sizes, as a compiled or captured model needs them."""
    recursions = torch.arange(1, num_recursions + 1, device=depths.device)
    taken = depths.view(1, -1) >= recursions[:, None]
    total = taken.shape[1]
    place = torch.where(taken, taken.cumsum(1) - 1, total)
    tokens = torch.arange(total, device=depths.device).expand_as(place)
    indices = place.new_full((num_recursions, total + 1), -1).scatter(1, place, tokens)[:, :total]
    ends = taken.view(num_recursions, *depths.shape).sum(-1).cumsum(-1)
    return indices, F.pad(ends, (1, 0)).to(torch.int32)


def aux_plain(logits, kept):
    target = torch.zeros_like(logits).scatter(1, kept, 1.0)
    return F.binary_cross_entropy_with_logits(logits, target)


def check_choice(logits, indices, k, slack: torch.Tensor | float | None = None):
    """k ascending positions with the largest logits; ties to the lower position, unless there is ``slack``: then a kept
    logit may be so much below a dropped one."""
    batch, length = logits.shape
    require(indices.shape == (batch, k), f"indices: shape {tuple(indices.shape)}, expected {(batch, k)}")
    require(indices.dtype == torch.int64, f"indices: {indices.dtype}")
    require(((indices >= 0) & (indices < length)).all(), "indices: out of range")
    require((indices.diff(dim=1) > 0).all(), "indices: not ascending, or not unique")
    if k in (0, length):
        return
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    least = logits.where(kept, torch.inf).amin(1, keepdim=True)
    if slack is not None:
        require(
            (logits - slack).where(~kept, -torch.inf).le(least + slack).all(), "a dropped logit is larger than kept"
        )
        return
    require((logits.where(~kept, -torch.inf) <= least).all(), "a dropped logit is larger than a kept one")
    position = torch.arange(length, device=logits.device)
    tied = logits == least
    last_kept = position.where(tied & kept, -1).amax(1)
    first_dropped = position.where(tied & ~kept, length).amin(1)
    require((last_kept < first_dropped).all(), "a tie did not go to the lower position")


def check_rows(x, rows, indices):
    sequence = torch.arange(len(x), device=x.device)[:, None]
    require(torch.equal(rows, x[sequence, indices]), "rows: not bit-equal to x at their indices")


def check_route(k, inputs, outputs, ours):
    rows, indices, gates, logits = outputs[:4]
    x, weight = inputs.x.double(), inputs.weight.double()
    true = x @ weight
    allowed = EXACT * (x.abs() @ weight.abs())
    if ours:
        check_choice(logits, indices, k)
    else:
        allowed = allowed + 4 * ROUNDOFF * (1 + true.abs())
        check_choice(true, indices, k, slack=allowed)
    worst = close("logits", logits, true, allowed)
    kept = logits.gather(1, indices).double()
    worst = max(worst, close("gates", gates, ALPHA * kept.sigmoid(), 1e-6))
    check_rows(inputs.x, rows, indices)
    return worst


def check_route_backward(inputs, outputs, ours):
    indices, d_x, d_weight = outputs
    x, weight, d_rows = inputs.x.double(), inputs.weight.double(), inputs.d_rows.double()
    gate = (x @ weight).gather(1, indices).sigmoid()
    through_gate = inputs.d_gates.double() * ALPHA * gate * (1 - gate)
    d_score = inputs.d_logits.double().scatter_add(1, indices, through_gate)
    magnitude = inputs.d_logits.double().abs().scatter_add(1, indices, through_gate.abs())
    where = indices[..., None].expand_as(d_rows)
    want = (d_score[..., None] * weight).scatter_add(1, where, d_rows)
    magnitude = (magnitude[..., None] * weight.abs()).scatter_add(1, where, d_rows.abs())
    allowed = ROUNDOFF * want.abs() + EXACT * magnitude if ours else 4 * ROUNDOFF * magnitude
    worst = close("d_x", d_x, want, allowed)
    want = torch.einsum("bnd,bn->d", x, d_score)
    spread = want.square().mean().sqrt()
    return max(worst, close("d_weight", d_weight, want, (1 if ours else 4) * ROUNDOFF * (want.abs() + 4 * spread)))


def check_select(k, inputs, indices, ours):
    check_choice(inputs.logits, indices, k, slack=None if ours else 0.0)
    return 0.0


def check_unchanged(what, got, want, indices):
    dropped = torch.ones(want.shape[:2], dtype=torch.bool, device=want.device).scatter(1, indices, False)
    require(torch.equal(got[dropped], want[dropped]), f"{what}: a row that is not kept is not a copy")


def check_scatter(inputs, out, ours):
    check_unchanged("out", out, inputs.x, inputs.indices)
    kept = take_gather(inputs.x, inputs.indices).double()
    added = inputs.gates.double()[..., None] * inputs.update.double()
    want = kept + added
    magnitude = kept.abs() + added.abs()
    allowed = ROUNDOFF * want.abs() + (EXACT if ours else 4 * ROUNDOFF) * magnitude
    return close("out at kept rows", take_gather(out, inputs.indices), want, allowed)


def check_scatter_backward(residual, inputs, outputs, ours):
    d_x, d_update, d_gates = outputs
    check_unchanged("d_x", d_x, inputs.d_out, inputs.indices)
    dy, f = take_gather(inputs.d_out, inputs.indices).double(), inputs.update.double()
    gates = inputs.gates.double()[..., None]
    want = dy if residual == "block" else (1 - gates) * dy
    if residual == "delta":
        f = f - take_gather(inputs.x, inputs.indices).double()
    looser = 1 + EXACT if ours else 4
    worst = close("d_x at kept rows", take_gather(d_x, inputs.indices), want, looser * ROUNDOFF * dy.abs())
    worst = max(worst, close("d_update", d_update, gates * dy, looser * ROUNDOFF * (gates * dy).abs()))
    want, products = (dy * f).sum(-1), dy * f
    allowed = EXACT * products.abs().sum(-1)
    if not ours:
        allowed = allowed + 8 * ROUNDOFF * (want.abs() + products.norm(dim=-1))
    return max(worst, close("d_gates", d_gates, want, allowed))


def check_pack(num_recursions, inputs, outputs, ours):
    indices, cu_seqlens = outputs
    for r in range(num_recursions):
        taken = inputs.depths > r
        tokens = taken.view(-1).nonzero()[:, 0]
        want = F.pad(tokens, (0, taken.numel() - len(tokens)), value=-1)
        require(torch.equal(indices[r], want), f"indices of recursion {r + 1}")
        require(cu_seqlens[r].tolist() == [0, *taken.sum(1).cumsum(0).tolist()], f"cu_seqlens of recursion {r + 1}")
    return 0.0


def check_aux(inputs, outputs, ours):
    loss, d_logits = outputs
    logits = inputs.logits.double()
    kept = torch.zeros_like(logits).scatter(1, inputs.kept, 1.0)
    each = logits.clamp(min=0) - logits * kept + torch.log1p(torch.exp(-logits.abs()))
    worst = close("loss", loss, each.mean(), 1e-5 * each.mean())
    return max(worst, close("d_logits", d_logits, (logits.sigmoid() - kept) / logits.numel(), 1e-5 / logits.numel()))


class Cases:
    """The cases on ``device``; ``compiled`` makes the compiled rivals."""

    def __init__(self, device: str, compiled: Callable):
        self.device, self.compiled = device, compiled

    def _random(self, seed):
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*shape, dtype=torch.bfloat16):
            return torch.randn(shape, generator=generator, device=self.device, dtype=dtype)

        return normal

    def _implementations(self, op, prepare, own, rivals):
        """``prepare(function, inputs)`` for each function, ours last."""
        ours = {
            label: functools.partial(own, backend=backend) for label, backend in our_backends(op, self.device).items()
        }
        return tuple(
            Implementation(name, functools.partial(prepare, function), ours=name in ours)
            for name, function in {**rivals, **ours}.items()
        )

    def _route_rivals(self):
        return {
            "eager gather": functools.partial(route_by, take_gather),
            "eager index_select": functools.partial(route_by, take_index_select),
            "compile": functools.partial(self.compiled(route_by), take_gather),
        }

    def route(self, batch, length, width, k):
        def make(seed):
            normal = self._random(seed)
            return SimpleNamespace(x=normal(batch, length, width), weight=normal(width) * width**-0.5)

        # x and the router read; kept rows, indices, gates, logits and counts written
        moved = BF16 * (batch * length * width + width) + BF16 * batch * k * width
        moved += (INT64 + FP32) * batch * k + FP32 * batch * length + FP32 * batch
        return Case(
            "route",
            f"B{batch} N{length} D{width} k{k}",
            moved,
            make,
            functools.partial(check_route, k),
            self._implementations(
                "route",
                lambda function, s: functools.partial(function, s.x, s.weight, k),
                functools.partial(ops.route, alpha=ALPHA),
                self._route_rivals(),
            ),
        )

    def route_backward(self, batch, length, width, k):
        def make(seed):
            normal = self._random(seed)
            return SimpleNamespace(
                x=normal(batch, length, width),
                weight=normal(width) * width**-0.5,
                d_rows=normal(batch, k, width),
                d_gates=normal(batch, k, dtype=torch.float32),
                d_logits=normal(batch, length, dtype=torch.float32),
            )

        def prepare(function, s):
            x, weight = s.x.requires_grad_(), s.weight.requires_grad_()
            rows, indices, gates, logits, *_ = function(x, weight, k)
            outputs, grads = (rows, gates, logits), (s.d_rows, s.d_gates, s.d_logits)
            return lambda: (indices, *torch.autograd.grad(outputs, (x, weight), grads, retain_graph=True))

        # d_rows, x, router, indices, d_gates, logits and d_logits read; d_x and d_weight written
        moved = BF16 * (batch * k * width + 2 * batch * length * width + 2 * width)
        moved += (INT64 + FP32) * batch * k + 2 * FP32 * batch * length
        return Case(
            "route backward",
            f"B{batch} N{length} D{width} k{k}",
            moved,
            make,
            check_route_backward,
            self._implementations("route", prepare, functools.partial(ops.route, alpha=ALPHA), self._route_rivals()),
        )

    def select(self, batch, length, k):
        """The choice alone, from ready logits; ours also gathers rows of 8 numbers and gates them."""

        def make(seed):
            normal = self._random(seed)
            return SimpleNamespace(x=normal(batch, length, 8), logits=normal(batch, length, dtype=torch.float32))

        def own(s, backend):
            return ops.route(s.x, None, k, logits=s.logits, backend=backend).indices

        def plain(s):
            return select(s.logits, k)

        moved = FP32 * batch * length + INT64 * batch * k  # logits read, indices written
        return Case(
            "top-k",
            f"B{batch} N{length} k{k}",
            moved,
            make,
            functools.partial(check_select, k),
            self._implementations(
                "route", functools.partial, own, {"eager topk, sort": plain, "compile": self._compiled_select(k)}
            ),
        )

    def _compiled_select(self, k):
        function = self.compiled(select)
        return lambda s: function(s.logits, k)

    def _scatter_inputs(self, batch, length, width, k, seed):
        normal = self._random(seed)
        return SimpleNamespace(
            x=normal(batch, length, width),
            update=normal(batch, k, width),
            indices=select(normal(batch, length, dtype=torch.float32), k),
            gates=ALPHA * normal(batch, k, dtype=torch.float32).sigmoid(),
            d_out=normal(batch, length, width),
        )

    def _scatter_rivals(self, to_compile, **options):
        forms = {
            "eager index_add": by_index_add,
            "eager scatter_add": by_scatter_add,
            "eager index_put": by_index_put,
            "compile": self.compiled(to_compile),
        }
        return {name: functools.partial(form, **options) for name, form in forms.items()}

    def scatter_back(self, batch, length, width, k):
        # x and f read, the new stream written; indices and gates read
        moved = BF16 * (2 * batch * length * width + batch * k * width) + (INT64 + FP32) * batch * k
        return Case(
            "scatter_back",
            f"B{batch} N{length} D{width} k{k}",
            moved,
            functools.partial(self._scatter_inputs, batch, length, width, k),
            check_scatter,
            self._implementations("scatter_back", _scatter_call, ops.scatter_back, self._scatter_rivals(by_index_put)),
        )

    def scatter_in_place(self, batch, length, width, k):
        # kept rows of x read and written, f read; indices and gates read
        moved = BF16 * 3 * batch * k * width + (INT64 + FP32) * batch * k
        return Case(
            "scatter_back_",
            f"B{batch} N{length} D{width} k{k}",
            moved,
            functools.partial(self._scatter_inputs, batch, length, width, k),
            check_scatter,
            self._implementations(
                "scatter_back", _in_place, _own_in_place, self._scatter_rivals(by_index_put, in_place=True)
            ),
        )

    def scatter_backward(self, batch, length, width, k, residual):
        def prepare(function, s):
            inputs = (s.x.requires_grad_(), s.update.requires_grad_(), s.gates.requires_grad_())
            out = function(inputs[0], inputs[1], s.indices, inputs[2])
            return lambda: torch.autograd.grad(out, inputs, s.d_out, retain_graph=True)

        rows = BF16 * batch * k * width
        small = (INT64 + 2 * FP32) * batch * k  # indices and gates read, d_gates written
        if residual == "block":
            moved = 3 * rows + small  # d_out's kept rows and f read, d_f written; d_x is d_out itself
        else:
            moved = 2 * BF16 * batch * length * width + 3 * rows + small  # d_out, f, x's kept rows; d_x, d_f written
        return Case(
            f"scatter bwd {residual}",
            f"B{batch} N{length} D{width} k{k}",
            moved,
            functools.partial(self._scatter_inputs, batch, length, width, k),
            functools.partial(check_scatter_backward, residual),
            self._implementations(
                "scatter_back",
                prepare,
                functools.partial(ops.scatter_back, residual=residual),
                self._scatter_rivals(by_index_add, residual=residual),
            ),
        )

    def pack(self, batch, length, num_recursions):
        def make(seed):
            generator = torch.Generator(self.device).manual_seed(seed)
            depths = torch.randint(1, num_recursions + 1, (batch, length), generator=generator, device=self.device)
            return SimpleNamespace(depths=depths)

        # depths read; indices and cu_seqlens of every recursion written
        moved = INT64 * batch * length * (1 + num_recursions) + 4 * num_recursions * (batch + 1)
        return Case(
            "pack_depths",
            f"B{batch} N{length} Nr{num_recursions}",
            moved,
            make,
            functools.partial(check_pack, num_recursions),
            self._implementations(
                "pack_depths",
                lambda function, s: functools.partial(function, s.depths, num_recursions),
                ops.pack_depths,
                {"eager cumsum, scatter": pack_plain, "compile": self.compiled(pack_plain)},
            ),
        )

    def aux(self, batch, length, k):
        def make(seed):
            logits = self._random(seed)(batch, length, dtype=torch.float32)
            return SimpleNamespace(logits=logits, kept=select(logits, k))

        def prepare(function, s):
            logits = s.logits.requires_grad_()

            def call():
                loss = function(logits, s.kept)
                return loss.detach(), *torch.autograd.grad(loss, logits)

            return call

        moved = 2 * FP32 * batch * length + INT64 * batch * k  # logits and indices read, d_logits written
        return Case(
            "aux_loss fwd+bwd",
            f"B{batch} N{length} k{k}",
            moved,
            make,
            check_aux,
            self._implementations(
                "aux_loss", prepare, ops.aux_loss, {"eager bce": aux_plain, "compile": self.compiled(aux_plain)}
            ),
        )


def _scatter_call(function, s):
    return functools.partial(function, s.x, s.update, s.indices, s.gates)


@torch.no_grad()
def _own_in_place(x, update, indices, gates, backend):
    ops.scatter_back_(x, update, indices, gates, backend=backend)


def _in_place(function, s):
    def call():
        function(s.x, s.update, s.indices, s.gates)
        return s.x

    return call


def make_cases(
    device: str = "cuda",
    compiled: Callable = COMPILE,
    *,
    route=ROUTE,
    scatter=SCATTER,
    selection=SELECT,
    pack=PACK,
    aux=AUX,
) -> list[Case]:
    cases = Cases(device, compiled)
    return [
        *[cases.route(*shape) for shape in route],
        *[cases.route_backward(*shape) for shape in route],
        *[cases.scatter_back(*shape) for shape in scatter],
        *[cases.scatter_in_place(*shape) for shape in scatter],
        *[cases.scatter_backward(*shape, residual) for residual in ("block", "delta") for shape in scatter],
        *[cases.select(*shape) for shape in selection],
        cases.pack(*pack),
        cases.aux(*aux),
    ]


if __name__ == "__main__":
    sys.exit(main("routing", __doc__, make_cases))
