"""Offsets that 32 bits don't hold. Of tensors of more than 2**31 elements the ends must get what they get alone; and
numbers of one axis may lie as far apart.

The former takes a GPU of 100 GB, which a test has for itself; elsewhere the same code runs on a few rows.
"""

from __future__ import annotations

import fcntl
import os
import tempfile

import pytest
import torch

from mor_kernels import ops
from mor_kernels.ops._dispatch import BACKENDS, unavailable
from tests import strategies as s

ROOM = torch.cuda.is_available() and torch.cuda.mem_get_info()[1] > 10**11
DEVICE = "cuda" if ROOM else "cpu"
BF16 = torch.bfloat16
ROWS, TOKENS, PAGES, PAGE = 2**20 + 4, 2**17 + 4, 2**16 + 4, 16
WIDTH, HEADS, HEAD, GROUPS = (2**11, 128, 128, 16) if ROOM else (16, 8, 4, 2)
FAR = 2**30 + 8  # elements between numbers of an axis of three or four
assert not ROOM or min(ROWS * WIDTH, TOKENS * HEADS * HEAD, PAGES * PAGE * GROUPS * HEAD, 2 * FAR) > 2**31


def normal(*shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def whole(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, device=DEVICE, dtype=dtype)


def served(op, *specialists):
    """Parametrize a test over the backends that have kernels for ``op``, or, where there is no room, eager."""
    found = [b for b in (*BACKENDS[1:], *specialists) if unavailable(b, op, DEVICE) is None]
    return pytest.mark.parametrize("backend", found if ROOM else ["eager"])


@pytest.fixture(autouse=True)
def _alone():
    with open(os.path.join(tempfile.gettempdir(), f"mor-kernels-{os.getuid()}.lock"), "w") as file:
        if ROOM:
            fcntl.flock(file, fcntl.LOCK_EX)  # other workers have these tests, too
        yield
        if ROOM:
            torch.cuda.empty_cache()


def spread(few, n):
    """The first two rows, zeros, and the last two: n rows."""
    many = few.new_zeros(n, *few.shape[1:])
    many[:2], many[-2:] = few[:2], few[2:]
    return many


def same(many, few, rounded):
    """Of tensors with a row for each of the four and for all; of others, in which these meet, the whole. Sums may have
    another order, since tiles have other rows beside them; four terms of them, at the most as large as ``rounded``, may
    be rounded otherwise, of which the signs differ."""
    bounds = {}  # what PyTorch allows each dtype
    if rounded:
        bounds = {"rtol": 1.6e-2, "atol": 2 * torch.finfo(few.dtype).eps / 2 * rounded}
    if many.shape == few.shape:
        torch.testing.assert_close(many, few, **bounds)
        return
    torch.testing.assert_close(many[:2], few[:2], **bounds)
    torch.testing.assert_close(many[-2:], few[2:], **bounds)
    others = many[2:-2]  # written, and not by what belongs to the ends; NaN is neither
    assert -1e-20 < others.amin().item() and others.amax().item() < 1e-20


def check(function, n, rows, others=(), differentiable=True, rounded=()):
    """``function(place, *rows, *others)`` of four rows, and of n: those at the ends, and zeros; place(i) is where row i
    of the four is. Outputs and gradients are compared."""
    n = n if ROOM else 12
    upstream, few = None, None
    for many in (False, True):
        inputs = [spread(t, n) if many else t.clone() for t in rows] + [t.clone() for t in others]
        wanted = [t.requires_grad_() for t in inputs if differentiable and t.is_floating_point()]
        outputs = function(lambda i, end=n - 4 if many else 0: torch.where(i < 2, i, i + end), *inputs)
        if wanted:
            floating = [t for t in outputs if t.requires_grad]
            upstream = upstream or [torch.randn_like(t) for t in floating]
            pairs = zip(upstream, floating, strict=True)
            shaped = [d if d.shape == t.shape else spread(d, n) for d, t in pairs]
            outputs = [*(t.detach() for t in outputs), *torch.autograd.grad(floating, wanted, shaped)]
            del floating, shaped, pairs
        del inputs, wanted
        few = few or outputs
    for i, (got, want) in enumerate(zip(outputs, few, strict=True)):
        same(got, want, rounded[i] if rounded else 0)


@served("rope")
def test_rope(backend):
    x, positions = normal(4, HEADS, HEAD), whole(1, 0, 77, 5)
    check(lambda _, x, p: [ops.rope(x, p, backend=backend)], TOKENS, [x, positions])


@served("rope_split")
def test_rope_qkv(backend):
    qkv, positions = normal(4, HEADS + 2 * GROUPS, HEAD), whole(1, 0, 77, 5)
    check(lambda _, x, p: ops.rope_qkv(x, HEADS, p, backend=backend), TOKENS, [qkv, positions])


@served("add_rms_norm")
def test_rms_norm(backend):
    x, add, weight = normal(4, WIDTH), normal(4, WIDTH), normal(WIDTH)
    check(lambda _, x, a, w: ops.rms_norm(x, w, add=a, backend=backend), ROWS, [x, add], [weight])


@served("swiglu")
def test_swiglu(backend):
    def run(_, gate_up, d_h):
        h = torch.ops.mor_kernels.swiglu(gate_up, backend)
        return h, torch.ops.mor_kernels.swiglu_backward_(d_h, gate_up, backend), d_h

    check(run, ROWS, [normal(4, 2 * WIDTH), normal(4, WIDTH)], differentiable=False)


@served("cross_entropy_")
def test_linear_cross_entropy(backend):
    """Its kernels; its own chunks of logits are smaller. Rows without a target get zeros."""

    def run(_, logits, targets, factor):
        losses = torch.ops.mor_kernels.cross_entropy_(logits, targets - 100, True, backend)
        return losses, logits, torch.ops.mor_kernels.scaled(logits, factor, BF16, backend)

    targets = whole(100, 16 * WIDTH + 99, 107, 0)
    check(run, 2**16 + 4, [normal(4, 16 * WIDTH), targets], [normal(dtype=torch.float32)], differentiable=False)


@served("route")
def test_route(backend):
    """And its gradients; that it chooses what it should is in test_more_than_two_to_the_31_elements."""

    def run(place, x, weight):
        routed = ops.route(x[None], weight, 2, indices=place(whole(0, 3))[None], backend=backend)
        return routed.rows, routed.gates, routed.logits[0]

    check(run, ROWS, [normal(4, WIDTH)], [normal(WIDTH)])


@served("scatter_back")
@pytest.mark.parametrize("residual", ["block", "delta", "none"])
def test_scatter_back(backend, residual):
    def run(place, x, update, gates):
        indices = place(whole(1, 3))[None]
        out = ops.scatter_back(x[None], update, indices, gates, residual=residual, backend=backend)
        with torch.no_grad():
            written = ops.scatter_back_(x.clone()[None], update, indices, gates, residual=residual, backend=backend)
        return out[0], written[0]

    check(run, ROWS, [normal(4, WIDTH)], [normal(1, 2, WIDTH), normal(1, 2, dtype=torch.float32)])


@served("gather")
def test_gather(backend):
    check(lambda place, x: [ops.gather(x, place(whole(3, 0, 1)), backend=backend)], ROWS, [normal(4, WIDTH)])


@served("gather")
def test_gather_of_many(backend):
    """-1 between the ends."""
    x, after = normal(4, WIDTH), whole(3, 1, 4, 2)
    check(lambda _, i, x: [ops.gather(x, i - 1, backend=backend)], ROWS, [after], [x])


@served("z_loss")
def test_z_loss(backend):
    def run(_, logits, valid):
        return [ops.z_loss(logits[None], valid=valid[None], backend=backend)]

    check(run, 2**29 + 4, [normal(4, 4), whole(1, 0, 1, 1, dtype=torch.bool)])


@served("aux_loss")
def test_aux_loss(backend):
    n = 2**31 + 4 if ROOM else 12
    logits = torch.zeros(1, n, device=DEVICE, dtype=BF16, requires_grad=True)
    loss = ops.aux_loss(logits, whole(0, n - 1)[None], backend=backend)
    loss.backward()
    torch.testing.assert_close(loss.item(), torch.tensor(2.0).log().item(), rtol=1e-5, atol=0)
    upwards = torch.full((2,), 0.5 / n, device=DEVICE).to(BF16)
    assert torch.equal(logits.grad[0, [0, -1]], -upwards) and torch.equal(logits.grad[0, [1, -2]], upwards)
    assert (logits.grad[0, 1:-1] == upwards[0]).all()


@served("balance_loss")
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_balance_loss(backend, scope):
    def run(_, probs, depths):
        return [ops.balance_loss(probs[None], depths[None], scope=scope, backend=backend)]

    check(run, 2**29 + 4, [normal(4, 4).abs(), whole(1, 4, 2, 4)])


@served("balance_loss")
def test_more_than_two_to_the_31_tokens_of_an_expert(backend):
    shape = (1, 2**31 + 1024 if ROOM else 12)
    probs, depths = (torch.ones(*shape, device=DEVICE, dtype=t) for t in (BF16, torch.int64))
    loss = ops.balance_loss(probs[..., None], depths, scope="batch", backend=backend)
    assert abs(loss.item() - 1) < 1e-4  # fp32 sums of 2**31 ones


@served("pack_depths")
def test_pack_depths(backend):
    """Three recursions of a third of 2**31 tokens, of which the first two and the last two take some."""
    n = 2**31 // 6 + 100 if ROOM else 6
    depths = torch.zeros(2, n, device=DEVICE, dtype=torch.int32)
    depths[0, :2], depths[1, -2:] = whole(1, 3, dtype=torch.int32), whole(2, 3, dtype=torch.int32)
    packed = ops.pack_depths(depths, 3, backend=backend)
    assert packed.cu_seqlens.tolist() == [[0, 2, 4], [0, 1, 3], [0, 1, 2]]
    for indices, kept in zip(packed.indices, ([0, 1, 2 * n - 2, 2 * n - 1], [1, 2 * n - 2, 2 * n - 1], [1, 2 * n - 1])):
        assert indices[: len(kept)].tolist() == kept
        assert indices[len(kept) :].amin() == indices[len(kept) :].amax() == -1


def test_pack_depths_refuses_what_cu_seqlens_cannot_count():
    with pytest.raises(ValueError, match=r"depths: expected fewer than 2\*\*31 tokens"):
        ops.pack_depths(torch.empty(2, 2**30, dtype=torch.int64, device="meta"), 3)


@served("choose_depths")
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_choose_depths(backend, activation):
    def run(_, logits, valid):
        depths, probs = ops.choose_depths(logits[None], activation=activation, valid=valid[None], backend=backend)
        zero = 0.25 if activation == "softmax" else 0.5
        return depths[0], probs[0] - zero

    check(run, 2**29 + 4, [normal(4, 4), whole(1, 0, 1, 1, dtype=torch.bool)])


@served("sample")
def test_sample(backend):
    """Zeros at temperature 0 are token 0."""
    if backend == "triton":
        pytest.skip("its is PyTorch's")

    def run(_, logits, temperature, top_k, seed):
        ones, none = torch.ones_like(temperature), torch.zeros_like(temperature)
        return [ops.sample(logits, temperature, top_k, ones, none, seed, seed, backend=backend)]

    numbers = whole(1.0, 0.5, 1.0, 0.0, dtype=torch.float32), whole(0, 50, 9, 0), whole(1, 2, 3, 4)
    check(run, 2**15 + 4, [normal(4, 32 * WIDTH), *numbers], differentiable=False)


@served("depth_step_")
def test_depth_step(backend):
    def run(_, x, update, logits, recursions, weight):
        on = ops.depth_step_(x, update, logits, recursions, weight, backend=backend)
        return x, logits, on

    rows = [normal(4, WIDTH), normal(4, WIDTH), normal(4, dtype=torch.float32), whole(1, 0, 0, 2)]
    check(run, ROWS, rows, [normal(3, WIDTH)], differentiable=False)


@served("decode_linear")
@pytest.mark.parametrize("gated", [False, True])
def test_decode_linear(backend, gated):
    """A weight of which the first rows and the last aren't zeros; gated, they are of gates and of values."""
    n, width = (2**18 + 8 if ROOM else 24), 4 * WIDTH
    x, weight, ends = normal(4, width), torch.zeros(n, width, device=DEVICE, dtype=BF16), normal(8, width) / width**0.5
    weight[:4], weight[-4:] = ends[:4], ends[4:]
    if gated:
        weight[n // 2 - 4 : n // 2] = weight[n // 2 : n // 2 + 4] = ends[:4]
    got = ops.decode_linear(x, weight, gated=gated, prefetch=True, backend=backend)
    first, last = (x.double() @ e.double().T for e in ends.split(4))
    if gated:
        first, last = first.sigmoid() * first * first, first.sigmoid() * first * last
    s.assert_close(got[:, :4], first, BF16, 4)  # products of halves are rounded before they are gated
    s.assert_close(got[:, -4:], last, BF16, 4)
    if not gated:
        assert got[:, 4:-4].count_nonzero() == 0


def caches(page=4):
    return [normal(page, PAGE, GROUPS, HEAD) for _ in "kv"]


def slots_of(place):
    """Of pages 3, 0, and 2, each in the end."""
    return place(whole(3, 0, 2)) * PAGE + PAGE - 1


@served("decode_qkv_")
def test_decode_qkv(backend):
    def run(place, k, v, x, weight, gain):
        options = {"heads": 2 * GROUPS, "positions": whole(5, 0, 70), "norm_weight": gain, "backend": backend}
        return ops.decode_qkv_(x, weight, k, v, slots_of(place), **options), k, v

    others = normal(3, WIDTH), normal(4 * GROUPS * HEAD, WIDTH) / WIDTH**0.5, normal(WIDTH)
    check(run, PAGES, caches(), others, differentiable=False)


@served("kv_append_")
def test_kv_append_into_many(backend):
    def run(place, k_cache, v_cache, k, v, q):
        options = {"positions": whole(5, 0, 70), "q": q, "backend": backend}
        return ops.kv_append_(k, v, k_cache, v_cache, slots_of(place), **options), k_cache, v_cache

    others = normal(3, GROUPS, HEAD), normal(3, GROUPS, HEAD), normal(3, 2 * GROUPS, HEAD)
    check(run, PAGES, caches(), others, differentiable=False)


@served("kv_append_")
def test_kv_append_of_many(backend):
    """Those between the ends have no slot."""

    def run(_, q, k, v, positions, after, k_cache, v_cache):
        options = {"positions": positions, "q": q, "backend": backend}
        return ops.kv_append_(k, v, k_cache, v_cache, after - 1, **options), k_cache, v_cache

    rows = [normal(4, HEADS, HEAD) for _ in "qkv"] + [whole(1, 0, 77, 5), whole(9, 1, 0, 4)]
    check(run, TOKENS, rows, [normal(1, PAGE, HEADS, HEAD) for _ in "kv"], differentiable=False)


@served("kv_append")
def test_kv_append(backend):
    def run(place, k_cache, v_cache, k, v):
        return ops.kv_append(k, v, k_cache, v_cache, slots_of(place), backend=backend)

    check(run, PAGES, caches(), [normal(3, GROUPS, HEAD) for _ in "kv"])


@served("kv_lookup")
def test_kv_lookup(backend):
    def run(place, k_cache, v_cache):
        table, cu_seqlens = place(whole([3, 0], [2, 1])).int(), whole(0, 20, 50, dtype=torch.int32)
        return ops.kv_lookup(k_cache, v_cache, table, cu_seqlens, 52, backend=backend)

    check(run, PAGES, caches())


@served("paged_attention")
def test_paged_attention_in_many(backend):
    def run(place, k_cache, v_cache, q):
        table, lens = place(whole([3, 0], [2, 1])).int(), whole(20, 32, dtype=torch.int32)
        return [ops.paged_attention(q, k_cache, v_cache, table, lens, backend=backend)]

    check(run, PAGES, caches(), [normal(2, 2 * GROUPS, HEAD)], differentiable=False)


@served("paged_attention")
@pytest.mark.parametrize("turned", [False, True], ids=["tokens outside", "heads outside"])
def test_paged_attention_of_many(backend, turned):
    """Those between the ends see nothing."""

    def run(_, q, after, k_cache, v_cache):
        q = q.transpose(0, 1).contiguous().transpose(0, 1) if turned else q
        table, lens = whole([1, 0, 3, 2], dtype=torch.int32), whole(4 * PAGE, dtype=torch.int32)
        options = {"cu_seqlens_q": whole(0, len(q), dtype=torch.int32), "q_positions": after - 1, "backend": backend}
        return [ops.paged_attention(q, k_cache, v_cache, table, lens, **options)]

    check(run, TOKENS, [normal(4, HEADS, HEAD), whole(1, 50, 0, 64)], caches(), differentiable=False)


every_head = pytest.mark.parametrize(("heads", "width"), [(HEADS, HEAD), (2 * HEADS, HEAD // 2)])


@served("attention", "hopper")
@every_head
@pytest.mark.parametrize("turned", [False, True], ids=["tokens outside", "heads outside"])
@pytest.mark.parametrize("fresh", [False, True])
def test_attention_of_many(backend, heads, width, turned, fresh):
    """Queries between the ends see nothing."""
    if fresh and backend == "hopper":
        pytest.skip("it takes no fresh keys and values")

    def run(_, q, after, *rest):
        *of_queries, k, v = (t[None] for t in rest)
        q = q.transpose(0, 1).contiguous().transpose(0, 1) if turned else q
        options = dict(zip(("k_fresh", "v_fresh"), of_queries)) | {"q_positions": after[None] - 1, "backend": backend}
        out, lse = ops.attention(q[None], k, v, return_lse=True, **options)
        return out[0], lse[0].T.exp()

    rows = [normal(4, heads, width), whole(100, 17, 1, 255)]
    rows += [normal(4, GROUPS, width) for _ in "kv" if fresh]
    check(run, TOKENS, rows, [normal(256, GROUPS, width) for _ in "kv"])


@served("attention_varlen", "hopper")
@every_head
def test_attention_varlen_of_many(backend, heads, width):
    """Two queries of the first sequence and all others of another."""

    def run(_, q, after, k, v):
        cu_seqlens_q, cu_seqlens_k = (whole(*ends, dtype=torch.int32) for ends in ((0, 2, len(q)), (0, 100, 256)))
        out, lse = ops.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, len(q), 156, q_positions=after - 1, return_lse=True, backend=backend
        )
        return out, lse.T.exp()

    rows = [normal(4, heads, width), whole(100, 17, 1, 155)]
    check(run, TOKENS, rows, [normal(256, GROUPS, width) for _ in "kv"])


@served("attention", "hopper")
@every_head
@pytest.mark.parametrize("packed", [False, True])
def test_attention_over_many(backend, heads, width, packed):
    """Scores at the ends are near 128, so that zeros between them get next to no weight."""

    def run(place, k, v, q):
        options = {
            "q_positions": place(torch.arange(4, device=DEVICE)),
            "softmax_scale": 128 / width,
            "backend": backend,
        }
        if packed:
            ends = (whole(0, len(t), dtype=torch.int32) for t in (q, k))
            return [ops.attention_varlen(q, k, v, *ends, 4, len(k), **options)]
        options["q_positions"] = options["q_positions"][None]
        return [ops.attention(q[None], k[None], v[None], **options)]

    k, q = (1 + normal(4, heads, width) / 16 for _ in "kq")
    # p, and with it d_s, is rounded relative to another maximum where the keys are not in one tile. Numbers are below
    # 4.5, d_p is below 3.5 * width**0.5, and p * (d_p - delta) a quarter of two such ones' difference.
    d_s = 1.75 * width**0.5 * 128 / width
    check(run, TOKENS, [k, normal(4, heads, width)], [q], rounded=(4.5, d_s, 4.5, d_s))


def append(q, k, v, k_cache, v_cache):
    slots, positions = (torch.tensor(i, device=q.device) for i in ([3, 0], [7, 1]))
    return lambda b: (
        ops.kv_append_(k, v, k_cache, v_cache, slots, positions=positions, q=q, backend=b),
        k_cache,
        v_cache,
    )


def attend_paged(q, k_cache, v_cache):
    table, lens = (torch.tensor(i, device=q.device, dtype=torch.int32) for i in ([[1, 0], [0, 1]], [4, 3]))
    return lambda b: [ops.paged_attention(q, k_cache, v_cache, table, lens, backend=b)]


def attend(q, k, v):
    return lambda b: [ops.attention(q, k, v, backend=b)]


def turn(x):
    return lambda b: [ops.rope(x, torch.tensor([7, 1], device=x.device), backend=b)]


def route(x, weight):
    return lambda b: ops.route(x, weight, 1, backend=b)


def scatter(x, update):
    indices = torch.tensor([[1], [0]], device=x.device)
    return lambda b: (ops.scatter_back(x, update, indices, backend=b), ops.scatter_back_(x, update, indices, backend=b))


def gather(x):
    return lambda b: [ops.gather(x, torch.tensor([1, -1, 0], device=x.device), backend=b)]


def end_step(x, update):
    logits, routers, recursions = x[:, 0].float(), x.new_ones(2, x.shape[1]), torch.tensor([1, 0], device=x.device)
    return lambda b: (ops.depth_step_(x, update, logits, recursions, routers, backend=b), x, logits)


# function of tensors of these shapes, with these axes far apart -> its op
FAR_APART = {
    append: ("kv_append_", [(2, 3, 4)] * 3 + [(2, 2, 3, 4)] * 2, (-1, -2, -1, -2, -1)),
    attend_paged: ("paged_attention", [(2, 3, 4)] + [(2, 2, 3, 4)] * 2, (-2, -2, -2)),
    attend: ("attention", [(1, 2, 3, 4)] * 3, (-2, -2, -2)),
    turn: ("rope", [(2, 3, 4)], (-2,)),
    route: ("route", [(2, 2, 4), (4,)], (-1, -1)),
    scatter: ("scatter_back", [(2, 2, 4), (2, 1, 4)], (-1, -1)),
    gather: ("gather", [(2, 4)], (-1,)),
    end_step: ("depth_step_", [(2, 4), (2, 4)], (-1, -1)),
}


# interpreted, each takes a second: the two whose strides are of any axis
@pytest.mark.parametrize("make", FAR_APART if ROOM else (append, attend_paged), ids=lambda make: make.__name__)
@pytest.mark.parametrize("device", s.DEVICES if ROOM else ["cpu"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "eager"])
def test_numbers_that_lie_far_apart(make, device, backend, tmp_path):
    op, shapes, axes = FAR_APART[make]
    if reason := unavailable(backend, op, device):
        pytest.skip(reason)
    near = [s.normal(shape, i, torch.float16).to(device) for i, shape in enumerate(shapes)]
    apart = [far(t, axis, tmp_path / str(i)) for i, (t, axis) in enumerate(zip(near, axes))]
    for got, want in zip(make(*apart)(backend), make(*near)(backend), strict=True):
        assert torch.equal(got, want)


def far(values, axis, path):
    """The same numbers, with others far away; on a CPU of a file with holes, which takes no memory."""
    size = values.shape[axis] * FAR
    if values.is_cuda:
        memory = values.new_empty(size)
    else:
        memory = torch.from_file(str(path), shared=True, size=size, dtype=values.dtype)
    first = values.movedim(axis, 0)
    return memory.as_strided(first.shape, (FAR, *first[0].contiguous().stride())).movedim(0, axis).copy_(values)


@pytest.mark.skipif(not ROOM, reason="needs a GPU")
@pytest.mark.parametrize("by_keys", [False, True])
def test_more_sequences_than_a_grid_is_high(by_keys):
    from mor_kernels.ops.attention._triton import block_lists

    counts, lists, none, _ = block_lists(torch.zeros(2**16, 1, device="cuda", dtype=torch.int32), 1, by_keys)
    assert (counts == 1).all() and (lists == 0).all() and not none.any()
