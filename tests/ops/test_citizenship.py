"""What every op owes PyTorch: registration, gradients, derivatives that it refuses, compilation, autocast, graphs."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.autograd.forward_ad
import torch.utils.checkpoint

from mor_kernels import ops
from mor_kernels.ops import _dispatch
from mor_kernels.ops._dispatch import BACKENDS
from tests.ops.calls import CASES, INDEX, Recorder, every_case, floating, in_flight, make, results
from tests.strategies import DEVICES, normal, prefer, targets


@every_case
def test_gradcheck(name):
    function, inputs, others = make(name)
    if inputs:
        assert torch.autograd.gradcheck(lambda *tensors: tuple(floating(function(*tensors, *others))), inputs)


@every_case
def test_activation_checkpointing(name):
    """Computed anew in the backward pass, the gradients are the same. What was saved may then be read only once."""
    function, inputs, others = make(name)
    again = functools.partial(torch.utils.checkpoint.checkpoint, function, use_reentrant=False)
    for want, got in zip(results(function, inputs, others), results(again, inputs, others), strict=True):
        assert torch.equal(want, got)


LINEAR = ("gather", "scatter_none", "kv_append", "kv_lookup", "kv_append_turned", "rope", "rope_qkv", "rope_pair")
REFUSED = "expected (neither a transform of torch.func nor forward-mode|no argument that needs a gradient)"


@every_case
def test_second_derivatives_are_right_or_refused(name):
    """Gradients of gradients that came in need none, too, and for named inputs: there PyTorch's once_differentiable
    would leave out the op's share."""
    function, inputs, others = make(name)
    if not inputs:
        return
    weights = [normal(t.shape, 9 + i) for i, t in enumerate(floating(function(*inputs, *others)))]
    gradients = torch.autograd.grad(floating(function(*inputs, *others)), inputs, weights, create_graph=True)
    penalty = sum(t.square().sum() for t in (*gradients, *inputs))
    if any(t.requires_grad for t in gradients):
        with pytest.raises(RuntimeError, match="there are no second derivatives") as raised:
            torch.autograd.grad(penalty, inputs)
        assert all(op in ops.__all__ for op in str(raised.value).partition(":")[0].split(" and "))
    else:  # the gradients depend on nothing but what came in
        assert name in LINEAR
        for second, t in zip(torch.autograd.grad(penalty, inputs), inputs, strict=True):
            assert torch.equal(second, 2 * t)
    weights = [t.requires_grad_() for t in weights]
    gradients = torch.autograd.grad(floating(function(*inputs, *others)), inputs, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="there are no second derivatives"):
        torch.autograd.grad(sum(t.square().sum() for t in gradients), weights)


@every_case
def test_transforms_are_refused(name):
    """Some would be 0 without a word, others name no op of ours."""
    function, inputs, others = make(name, dtype=torch.float32)
    tensors = [t.detach() for t in (*inputs, *others)]
    floats = [i for i, t in enumerate(tensors) if t.is_floating_point()]
    refused = pytest.raises(RuntimeError, match=rf"^\w+: {REFUSED}")

    def of_floats(*given):
        given = iter(given)
        outputs = function(*(next(given) if t.is_floating_point() else t for t in tensors))
        return sum(t.sum() for t in (outputs if isinstance(outputs, tuple) else (outputs,)))

    given = [tensors[i] for i in floats]
    with refused:
        torch.func.vmap(function)(*(torch.stack([t, t]) for t in tensors))
    if given:
        with refused:
            torch.func.jvp(of_floats, tuple(given), tuple(map(torch.ones_like, given)))
        with refused:
            torch.func.grad(of_floats)(*given)
        with torch.autograd.forward_ad.dual_level(), refused:
            of_floats(*(torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in given))


@pytest.mark.parametrize("name", ["decode_residual", "rope", "route"])
def test_transforms_are_refused_in_a_compiled_function(name):
    function, inputs, others = make(name, dtype=torch.float32)
    x, *rest = (t.detach() for t in (*inputs, *others))

    def total(x):
        outputs = function(x, *rest)
        return (outputs if isinstance(outputs, tuple) else (outputs,))[0].sum()

    for transform in (lambda x: torch.func.jvp(total, (x,), (x,)), torch.func.grad(total)):
        with pytest.raises(Exception, match=REFUSED):
            torch.compile(transform, backend="aot_eager")(x)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_opcheck(name, dtype, strided):
    function, inputs, others = make(name, dtype=dtype)
    with Recorder() as recorder:
        results(function, inputs, others)
    assert recorder.calls
    for op, args in recorder.calls:
        args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        if strided:  # the same values with the axes in memory the other way round
            args = [
                a.permute(*reversed(range(a.dim()))).contiguous().permute(*reversed(range(a.dim())))
                if isinstance(a, torch.Tensor) and a.dim() > 1
                else a
                for a in args
            ]
        torch.library.opcheck(op, args)


def serve(q, k, v, k_cache, v_cache, pages, rows, positions):
    """What a pass of one layer does with a cache; a lane of padding is -1."""
    cu = torch.arange(len(rows) + 1, device=q.device, dtype=torch.int32)
    taken = ops.take_pages_(pages, rows, cu, len(rows), 4)
    q = ops.kv_append_(k, v, k_cache, v_cache, taken.slots, positions=positions, q=q)
    schedule = ops.attention_schedule(taken.k_lens, q.shape[1], k.shape[1], len(rows), rows=taken.rows)
    lanes = {"rows": taken.rows, "schedule": schedule}
    out = ops.paged_attention(q, k_cache, v_cache, pages.page_table, taken.k_lens, **lanes)
    ops.commit_pages_(pages, taken.rows, cu)
    return out, taken.refused


def served(device):
    q, k, v = (normal((3, h, 4), i, torch.float32).to(device) for i, h in enumerate((6, 2, 2)))
    caches = torch.full((2, 4, 4, 2, 4), torch.nan, device=device)
    return [q, k, v, *caches, ops.Pages.new(3, 4, 3, device)]


@targets("take_pages_")
def test_opcheck_of_serving(monkeypatch, device, backend):
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    inputs, rows = served(device), torch.tensor([1, -1, 0], device=device)
    with Recorder() as recorder:
        serve(*inputs, rows, rows + 1)
        ops.free_pages_(inputs[-1], rows)
    names = [op._schema.name.removeprefix("mor_kernels::") for op, _ in recorder.calls]
    assert names == [
        "take_pages_",
        "kv_append_",
        "attention_schedule",
        "paged_attention",
        "commit_pages_",
        "free_pages_",
    ]
    for op, args in recorder.calls:
        assert args[-1] == backend
        torch.library.opcheck(op, [a.clone() if isinstance(a, torch.Tensor) else a for a in args])


@targets("take_pages_")
def test_writes_are_counted(monkeypatch, device, backend):
    """Or autograd wouldn't know that what it saved has changed."""
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    inputs, rows = served(device), torch.tensor([1, -1, 0], device=device)
    written = [*inputs[3:5], *inputs[-1]]
    before = [t._version for t in written]
    serve(*inputs, rows, rows + 1)
    ops.free_pages_(inputs[-1], rows)
    assert all(t._version > version for t, version in zip(written, before))


@targets("take_pages_")
def test_serving_compiles_whole_and_once(monkeypatch, device, backend):
    """Ten passes of any lanes, over the ends of pages and until there are none left."""
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    torch._dynamo.reset()
    compiled = torch.compile(serve, fullgraph=True, backend="aot_eager")
    ours, others = served(device), served(device)
    refusals = 0
    for step in range(10):
        rows = torch.tensor([[1, -1, 0], [2, 1, 0], [-1, -1, 1]][step % 3], device=device)
        with torch._dynamo.config.patch(error_on_recompile=step > 0), torch.no_grad():
            (out, refused), (want, _) = compiled(*ours, rows, rows + step + 1), serve(*others, rows, rows + step + 1)
        assert torch.equal(out, want) and not out.isnan().any()
        assert all(torch.equal(a, b) for a, b in zip(ours[-1], others[-1]))
        refusals += int(refused) != 0
    assert 0 < refusals < 10


@targets("sample")
def test_opcheck_sample_of_each_backend(device, backend):
    function, _, others = make("sample", device=device)
    with Recorder() as recorder:
        function(*others)
    ((op, args),) = recorder.calls
    torch.library.opcheck(op, [*args[:-1], backend])
    torch.library.opcheck(op, [args[0].mT.contiguous().mT, *args[1:-1], backend])


@targets("choose_depths")
@pytest.mark.parametrize(
    "name", [n for n in CASES if n.startswith(("pack_depths", "choose_depths", "aux_loss", "z_loss", "balance_loss"))]
)
def test_small_ops_of_each_backend(monkeypatch, device, backend, name):
    """Registered as they should be, and compiled: kernels as well."""
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    function, inputs, others = make(name, dtype=torch.float32, device=device)
    with Recorder() as recorder:
        plain = results(function, inputs, others)
    for op, args in recorder.calls:
        assert args[-1] == backend
        torch.library.opcheck(op, [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
    torch._dynamo.reset()
    compiled = results(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs, others)
    for one, other in zip(plain, compiled, strict=True):
        assert torch.equal(one, other)


@targets("scatter_back")
@pytest.mark.parametrize("residual", ["block", "delta", "none"])
def test_opcheck_scatter_of_each_backend(device, backend, residual):
    x, update, gates = (
        normal(shape, 0, torch.float32).to(device).requires_grad_() for shape in [(2, 5, 4), (2, 3, 4), (2, 3)]
    )
    with Recorder() as recorder:
        out = ops.scatter_back(x, update, INDEX.to(device), gates, residual=residual, backend=backend)
        torch.autograd.grad(out.sum(), (x, update, gates))
        with torch.no_grad():
            ops.scatter_back_(x.clone(), update, INDEX.to(device), gates, residual=residual, backend=backend)
    for op, args in recorder.calls:
        torch.library.opcheck(op, [a.detach() if isinstance(a, torch.Tensor) else a for a in args])
    assert len(recorder.calls) == 3


@targets("depth_step_")
@pytest.mark.parametrize("residual", ["block", "delta", "none"])
def test_opcheck_depth_step_of_each_backend(device, backend, residual):
    with Recorder() as recorder:
        for strided in (False, True):
            tensors, options = in_flight(device)
            if strided:
                tensors = [t.mT.contiguous().mT if t.dim() == 2 else t for t in tensors]
            ops.depth_step_(*tensors, **options, residual=residual, backend=backend)
            ops.depth_step_(*tensors, residual=residual, backend=backend)
    for op, args in recorder.calls:
        assert args[-1] == backend
        torch.library.opcheck(op, args)
    assert len(recorder.calls) == 4


@targets("depth_step_")
def test_depth_step_compiles_whole_and_once(device, backend):
    def step(x, update, logits, recursions, weight, options):
        on = ops.depth_step_(x, update, logits, recursions, weight, **options, backend=backend)
        return on, x * 2, logits + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in (0, 7):
        runs = []
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            for run in (compiled, step):
                tensors, options = in_flight(device, seed)
                runs.append([*run(*tensors, options), *tensors])
        for got, want in zip(*runs, strict=True):
            assert torch.equal(got, want)


@targets("depth_step_")
def test_depth_step_keeps_its_precision_under_autocast(device, backend):
    runs = []
    for enabled in (False, True):
        tensors, options = in_flight(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            runs.append([ops.depth_step_(*tensors, **options, backend=backend), *tensors])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@targets("depth_step_")
def test_depth_step_in_a_cuda_graph(device, backend):
    """Waits for nothing; a graph goes on from the state that the call before left."""
    if device == "cpu":
        pytest.skip("a graph is of a GPU")
    ours, options = in_flight(device)
    others = [t.clone() for t in ours]
    step = lambda tensors: ops.depth_step_(*tensors, **options, backend=backend)  # noqa: E731
    torch.cuda.set_sync_debug_mode("error")
    try:
        step([t.clone() for t in ours])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on = step(ours)
    for _ in range(3):
        graph.replay()
        assert torch.equal(on, step(others))
        assert all(torch.equal(a, b) for a, b in zip(ours, others))


def projections(x, weight, gain, down, k_cache, v_cache, slots, positions, backend):
    """The linear layers of a decoding step; queries, and the last one's result."""
    q = ops.decode_qkv_(
        x, weight, k_cache, v_cache, slots, heads=1, positions=positions, norm_weight=gain, prefetch=True,
        backend=backend,
    )  # fmt: skip
    h = ops.decode_linear(x, weight, norm_weight=gain, gated=True, backend=backend)
    _, scaled, squares = ops.decode_linear(h, down, residual=x, next_norm_weight=gain, backend=backend)
    h = ops.decode_linear(scaled, weight, squares=squares, gated=True, backend=backend)
    return q, ops.decode_linear(h, down, residual=x, backend=backend)


def to_project(device, backend, seed=0):
    dtype = torch.bfloat16 if backend == "cuda" else torch.float32
    shapes = (5, 24), (3 * 64, 24), (24,), (24, 96)
    tensors = [normal(shape, seed + i, dtype).to(device) for i, shape in enumerate(shapes)]
    caches = torch.full((2, 2, 4, 1, 64), 7.0, device=device, dtype=dtype)
    return [*tensors, *caches, torch.tensor([3, -1, 0, 7, 4], device=device), torch.arange(5, device=device) + seed]


@targets("decode_linear")
def test_opcheck_decode_linear_of_each_backend(device, backend):
    with Recorder() as recorder:
        projections(*to_project(device, backend), backend)
    for op, args in recorder.calls:
        assert args[-1] == backend
        torch.library.opcheck(op, args)
    assert len(recorder.calls) == 5


@targets("decode_linear")
def test_decode_linear_compiles_whole_and_once(device, backend):
    torch._dynamo.reset()
    compiled = torch.compile(projections, fullgraph=True, backend="aot_eager")
    for seed in (0, 7):
        runs = []
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            for run in (compiled, projections):
                tensors = to_project(device, backend, seed)
                runs.append([*run(*tensors, backend), *tensors])
        for got, want in zip(*runs, strict=True):
            assert torch.equal(got, want)


@every_case
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_whole_and_once(name, device):
    torch._dynamo.reset()
    function, inputs, others = make(name, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for seed in (0, 7):  # the second time with other data, so another routing
        function, inputs, others = make(name, seed, device=device)
        if seed and name == "pack_depths":
            others = [t.flip(0) for t in others]
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got = results(compiled, inputs, others)
        for a, b in zip(got, results(function, inputs, others), strict=True):
            assert torch.equal(a, b)


def test_k_and_length_compile_once_more_at_most():
    """The first change of k or N makes them symbolic; later ones recompile nothing."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x, w, k: ops.route(x, w, k).rows, fullgraph=True, backend=backend)
    for length, k in [(9, 4), (8, 3), (11, 5), (12, 7), (20, 6)]:
        x, w = normal((2, length, 4), 0), normal((4,), 1)
        assert torch.equal(compiled(x, w, k), ops.route(x, w, k).rows)
    assert len(graphs) <= 3  # static; k symbolic; k and N symbolic


@pytest.mark.parametrize("name", [name for name in CASES if "rms_norm_linear" not in name])  # half of it follows
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(name, device):
    """Runs under autocast; attention and what has a linear layer in it follow it, everything else keeps its own
    precision."""
    function, inputs, others = make(name, dtype=torch.float32, device=device)
    follows = "attention" in name or "linear" in name
    same = [t.detach().bfloat16().requires_grad_() for t in inputs] if follows else inputs
    plain = results(function, same, others)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = results(function, inputs, others)
    for i, (a, b) in enumerate(zip(cast, plain, strict=True)):
        assert torch.equal(a.float(), b.float())
        if follows:
            assert a.dtype == (b.dtype if i == 0 else torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_case
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_no_host_sync(monkeypatch, name, backend):
    prefer(monkeypatch, backend)
    function, inputs, others = make(name, dtype=torch.float32, device="cuda")
    results(function, inputs, others)
    with torch.no_grad():
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(*inputs, *others)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_case
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_cuda_graph_replays_with_new_data(monkeypatch, name, backend):
    prefer(monkeypatch, backend)
    function, inputs, others = make(name, dtype=torch.float32, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            function(*inputs, *others)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = function(*inputs, *others)
        _, fresh, _ = make(name, 11, torch.float32, "cuda")
        for a, b in zip(inputs, fresh):
            a.copy_(b)
        graph.replay()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = function(*inputs, *others)
        for a, b in zip(outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            assert torch.equal(a, b)


def test_in_place_append_compiles():
    def step(k, v, k_cache, v_cache, slots):
        ops.kv_append_(k, v, k_cache, v_cache, slots)
        return k_cache.sum() + v_cache.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    new = normal((3, 2, 4), 0, torch.float32)
    for slots in (torch.tensor([7, -1, 2]), torch.tensor([0, 3, -1])):
        caches = [torch.zeros(2, 4, 2, 4) for _ in range(4)]
        with torch.no_grad():
            got, want = compiled(new, new, *caches[:2], slots), step(new, new, *caches[2:], slots)
        assert torch.equal(got, want) and torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


@targets("route")
def test_routing_compiles_whole_and_once(device, backend):
    """From the scores to what is written back: another routing recompiles nothing, and nothing waits for a GPU."""

    def step(x, weight):
        routed = ops.route(x, weight, 2, backend=backend)
        return routed.indices, ops.scatter_back(x, routed.rows, routed.indices, routed.gates, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for again, scores in enumerate(([3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0])):
        x = torch.tensor([scores], device=device)[..., None].repeat(1, 1, 3)
        runs = []
        for run in (step, compiled):
            inputs = x.clone().requires_grad_(), torch.eye(3, device=device)[0].requires_grad_()
            with torch._dynamo.config.patch(error_on_recompile=bool(again)):
                if again and device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    indices, y = run(*inputs)
                finally:
                    if device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            runs.append([indices, y, *torch.autograd.grad(y.square().sum(), inputs)])
        assert runs[0][0].tolist() == [[2, 3] if again else [0, 2]]
        assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@targets("scatter_back_")
def test_scatter_compiles_with_a_named_backend(device, backend):
    def step(x, update, index, gates):
        y = ops.scatter_back(x, update, index, gates, residual="delta", backend=backend)
        with torch.no_grad():
            stream = torch.zeros_like(x)
            assert ops.scatter_back_(stream, update, index, gates, backend=backend) is stream
            ops.scatter_back_(stream[0, :4], update[1], index[0], backend=backend)  # packed, and a view
        return y, stream

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in (0, 7):
        inputs = [normal(shape, seed, torch.float32).to(device) for shape in [(2, 5, 4), (2, 3, 4), (2, 3)]]
        index = torch.tensor([[3, -1, seed % 3], [4, 2, -1]], device=device)
        runs = []
        for run in (compiled, step):
            x, update, gates = (t.clone().requires_grad_() for t in inputs)
            outputs = run(x, update, index, gates)
            runs.append([*outputs, *torch.autograd.grad(outputs[0].square().sum(), (x, update, gates))])
        for got, want in zip(*runs, strict=True):
            assert torch.equal(got, want)
