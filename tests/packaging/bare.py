"""Run as a script: call every operator, forward and backward, where the packages named below don't exist."""

from importlib.machinery import PathFinder

ABSENT = {"triton", "matplotlib", "datasets", "tqdm", "tokenizers"}
find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *where: None if name.partition(".")[0] in ABSENT else find_spec(name, *where)
)

import sys  # noqa: E402

import torch  # noqa: E402

from mor_kernels import model, ops  # noqa: E402, F401

assert not ABSENT & set(sys.modules)

B, N, K, D, H, G, NR = 2, 6, 3, 4, 2, 1, 2


def floats(*shape):
    return torch.randn(*shape, requires_grad=True)


x, weight, logits = floats(B, N, D), floats(D), floats(B, N, NR)
q, k, v = floats(B, N, H, D), floats(B, N, G, D), floats(B, N, G, D)
cache = floats(B, N, G, D)
cu_seqlens = torch.tensor([0, N, 2 * N], dtype=torch.int32)
pages = torch.arange(B, dtype=torch.int32)[:, None]
rows = torch.tensor([4, -1, 2])
kept = torch.tensor([[True, False, True], [False, False, True]])
counts = torch.tensor([3.0, 1.0])
ones, order = torch.ones(N), torch.arange(N)
routed = ops.route(x, weight, K)
depths = ops.choose_depths(logits).depths


def append_in_place():
    with torch.no_grad():
        new, old = k.flatten(0, 1)[:3].detach(), torch.zeros(B, N, G, D)
        ops.kv_append_(new, new, old, old.clone(), rows)
        return old


def pages_in_place(call):
    """Lengths after a row took pages for three tokens, then what else was called."""
    state = ops.Pages.new(1, 2, 2, "cpu")
    lanes, starts = torch.tensor([0]), torch.tensor([0, 3], dtype=torch.int32)
    taken = ops.take_pages_(state, lanes, starts, 3, 2)
    call(state, taken, starts)
    return state.lengths + taken.k_lens


def advanced():
    """Places of two lanes, of which one begins."""
    lanes, block, ends = ops.Lanes.new(2, 1, "cpu"), ops.Pages.new(4, 4, 2, "cpu"), ops.Pages.new(2, 2, 2, "cpu")
    lanes.row("feed")[1] = 3
    record, none = torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    at = ops.leave(none > 0, lanes, x[0, :2].detach(), 2).at
    return ops.advance_(none, none > 0, at, lanes, record, block, ends, 2, 4).slots + lanes.row("slot")


def entered():
    with torch.no_grad():
        state, scores = x[0].clone(), torch.zeros(N)
        ops.enter_(state, x[1].clone(), torch.where(torch.arange(N) < 3, torch.arange(N), -1), scores, weight)
        return state + scores[:, None]


def scatter_in_place():
    with torch.no_grad():
        return ops.scatter_back_(x.clone(), routed.rows, routed.indices, routed.gates)


def step_in_place():
    with torch.no_grad():
        state, scores = x[0].clone(), torch.zeros(N)
        ops.depth_step_(state, x[1], scores, torch.zeros(N, dtype=torch.int64), weight.expand(NR, D))
        return state + scores[:, None]


def project_in_place():
    with torch.no_grad():
        keys, values = torch.zeros(2, B, N, G, D)
        projection, gain = torch.randn((H + 2 * G) * D, D), torch.ones(D)
        q = ops.decode_qkv_(x[0, :3], projection, keys, values, rows, heads=H, positions=rows, norm_weight=gain)
        return q + keys[0, 0]


def linear_of_few_rows():
    with torch.no_grad():
        weight, gain = torch.randn(2 * D, D), torch.ones(D)
        y = ops.decode_linear(x[0], weight, norm_weight=gain, residual=x[1], gated=True)
        _, scaled, squares = ops.decode_linear(y, weight[:D], next_norm_weight=gain)
        return ops.decode_linear(scaled, weight, squares=squares)


CALLS = {
    "advance_": advanced,
    "attention": lambda: ops.attention(q, k, v),
    "attention_schedule": lambda: ops.attention_schedule(cu_seqlens[1:], H, G, 2),
    "attention_varlen": lambda: ops.attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, cu_seqlens, N, N
    ),
    "aux_loss": lambda: ops.aux_loss(routed.logits, routed.indices),
    "balance_loss": lambda: ops.balance_loss(logits.softmax(-1), depths),
    "choose_depths": lambda: ops.choose_depths(logits).probs,
    "commit_pages_": lambda: pages_in_place(lambda s, taken, starts: ops.commit_pages_(s, taken.rows, starts)),
    "dead_token_ratio": lambda: ops.dead_token_ratio(kept),
    "decode_linear": linear_of_few_rows,
    "decode_qkv_": project_in_place,
    "depth_step_": step_in_place,
    "enter_": entered,
    "free_pages_": lambda: pages_in_place(lambda s, taken, starts: ops.free_pages_(s, taken.rows)),
    "gather": lambda: ops.gather(x.flatten(0, 1), rows),
    "kv_append": lambda: ops.kv_append(k.flatten(0, 1)[:3], v.flatten(0, 1)[:3], cache, cache, rows)[0],
    "kv_append_": append_in_place,
    "kv_lookup": lambda: ops.kv_lookup(cache, cache, pages, cu_seqlens, 2 * N)[0],
    "leave": lambda: ops.leave(torch.zeros(2) > 0, ops.Lanes.new(2, 1, "cpu"), x[0, :2].detach(), 1).columns,
    "linear_cross_entropy": lambda: ops.linear_cross_entropy(x, floats(NR, D), depths - 1),
    "max_vio": lambda: ops.max_vio(counts),
    "pack_depths": lambda: ops.pack_depths(depths, NR).indices,
    "paged_attention": lambda: ops.paged_attention(
        q[:, 0].detach(), cache.detach(), cache.detach(), pages, cu_seqlens.diff()
    ),
    "rope": lambda: ops.rope(q, torch.arange(N).expand(B, N)),
    "rope_qkv": lambda: torch.cat(ops.rope_qkv(torch.cat((q, k, v), -2), H, torch.arange(N).expand(B, N)), -2),
    "route": lambda: ops.route(x, weight, K).rows,
    "router_bias_update": lambda: ops.router_bias_update(torch.zeros(NR), counts),
    "routing_entropy": lambda: ops.routing_entropy(logits.softmax(-1).flatten(0, 1)),
    "rms_norm": lambda: ops.rms_norm(x, floats(D))[1],
    "rms_norm_linear": lambda: ops.rms_norm_linear(x, floats(D), floats(N, D))[1],
    "sample": lambda: ops.sample(x[0], ones, order, ones, ones, order, order),
    "sampling_accuracy": lambda: ops.sampling_accuracy(~kept, kept),
    "scatter_back": lambda: ops.scatter_back(x, routed.rows, routed.indices, routed.gates),
    "scatter_back_": scatter_in_place,
    "swiglu_linear": lambda: ops.swiglu_linear(x, floats(N, D // 2)),
    "take_pages_": lambda: pages_in_place(lambda *_: None),
    "z_loss": lambda: ops.z_loss(logits),
}

functions = {name for name in ops.__all__ if not isinstance(getattr(ops, name), type)}
assert functions == set(CALLS), f"no call here, or no such operator: {functions ^ set(CALLS)}"
for name, call in CALLS.items():
    result = call()
    assert torch.isfinite(result).all(), name
    if result.requires_grad:
        result.sum().backward(retain_graph=True)
