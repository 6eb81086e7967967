"""How ops, model and engine live in a process: defaults, threads, forks, streams, devices, graphs, and results that are
the same each time."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mor_kernels import ops
from mor_kernels.decode import Engine, SamplingParams
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.ops import _dispatch
from mor_kernels.train import Tokens, TrainConfig, prepare
from mor_kernels.train.data import Loader
from tests.decode.models import random_prompts, tiny
from tests.ops import jobs
from tests.ops.calls import CASES, every_case, floating
from tests.strategies import DEVICES, cu_seqlens, normal
from tests.train.tiny import EXPERT, SMALL, TOKEN

HOPPER = {  # in bf16
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, return_lse=True),
        [(2, 130, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64)],
        [],
    ),
    "attention_varlen": (
        lambda q, k, v, cu: ops.attention_varlen(q, k, v, cu, cu, 130, 130),
        [(200, 4, 128), (200, 2, 128), (200, 2, 128)],
        [cu_seqlens(torch.tensor([130, 0, 70]))],
    ),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
kernels = pytest.mark.parametrize(
    ("name", "backend"), [*((n, b) for n in CASES for b in ("triton", "cuda")), *((n, "hopper") for n in HOPPER)]
)


def run_of(case, seed=0, dtype=torch.float32, device="cpu"):
    """A function, its differentiable tensors and the other ones, and gradients of its results."""
    function, shapes, others = case
    inputs = [normal(shape, seed + i, dtype).to(device).requires_grad_() for i, shape in enumerate(shapes)]
    others = [t.to(device) for t in others]
    outputs = floating(function(*inputs, *others)) if inputs else []
    weights = [normal(t.shape, seed + 9 + i).to(device, t.dtype) for i, t in enumerate(outputs)]
    return function, inputs, others, weights


def call(function, inputs, others, weights):
    """All results, and the gradients of what has any."""
    outputs = function(*inputs, *others)
    gradients = torch.autograd.grad(floating(outputs), inputs, weights) if inputs else ()
    # without their past, which would keep the stream of this call for later ones of the same inputs
    return [*(t.detach() for t in (outputs if isinstance(outputs, tuple) else (outputs,))), *gradients]


def on_gpu(monkeypatch, name, backend, seed=0, device="cuda"):
    """As run_of, of one backend, which is there and has compiled its kernels."""
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    try:
        run = run_of((HOPPER if backend == "hopper" else CASES)[name], seed,
                     torch.bfloat16 if backend == "hopper" else torch.float32, device)  # fmt: skip
        call(*run)
    except RuntimeError as error:
        if "is not available" not in str(error):
            raise
        pytest.skip(str(error))
    return run


def assert_equal(got, want, message="", backend=None):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype, message
        if backend == "hopper":  # d_q is summed up in any order, in fp32: at most one rounding to bf16 turns
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=2**-7, atol=2**-16)
        else:
            assert torch.equal(a.cpu(), b.cpu()), f"{message} result {i}"


def run_job(*arguments, flags=(), **environment):
    """A job of jobs.py; returns what it printed."""
    command = [sys.executable, *flags, str(Path(__file__).with_name("jobs.py")), *arguments]
    finished = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


# What is set for a whole process


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS = {  # what is made on the meta device by mistake can't be read
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)


@every_setting
@every_case
@pytest.mark.parametrize("device", DEVICES)
def test_defaults_change_no_result(name, device, setting):
    run = run_of(CASES[name], device=device)
    want = call(*run)
    with SETTINGS[setting]():
        got = call(*run)
    assert_equal(got, want, name)


@every_case
@pytest.mark.parametrize("device", DEVICES)
def test_without_gradients(name, device):
    function, inputs, others, _ = run_of(CASES[name], device=device)
    want = call(function, [], [*inputs, *others], [])
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert_equal(call(function, [], [*inputs, *others], []), want, name)
            assert_equal(call(function, [], [t.clone() for t in (*inputs, *others)], []), want, name)


@every_setting
def test_defaults_change_no_metric(setting):
    kept, counts = torch.tensor([[True, False, True]]), torch.tensor([1, 2, 4])
    probs, bias = torch.tensor([[0.2, 0.3, 0.5]]), torch.zeros(3)
    metrics = {
        ops.dead_token_ratio: (kept, torch.ones_like(kept)),
        ops.sampling_accuracy: (kept, ~kept),
        ops.max_vio: (counts,),
        ops.routing_entropy: (probs,),
        ops.router_bias_update: (bias, counts),
    }
    want = [metric(*arguments) for metric, arguments in metrics.items()]
    with SETTINGS[setting]():
        assert_equal([metric(*arguments) for metric, arguments in metrics.items()], want)
    assert all(t.dtype == torch.float32 for t in want)


def completions(model, device="cpu", within=contextlib.nullcontext, **options):
    params = [SamplingParams(max_tokens=5, temperature=i % 2 * 0.9, seed=i, logprobs=2) for i in range(3)]
    model, prompts = model.to(device), random_prompts((3, 5, 2))
    invariant = device != "cpu"  # what runs beside the third depends on when the device tells that another has ended
    with within():
        engine = Engine(model, max_sequences=2, batch_invariant=invariant, **options)
        if engine.cache.block.k_scale is not None:
            engine.calibrate(prompts)
        found = engine.generate(prompts, params)
        engine.submit([1])  # which draws a seed
    return [(c.tokens, c.depths, c.logprobs, c.top_logprobs) for c in found]


@every_setting
@pytest.mark.parametrize("device", DEVICES)
def test_defaults_change_no_completion(device, setting):
    model = tiny(router="expert_choice")[0].float()
    want = completions(model, device, cache_dtype=torch.float8_e4m3fn)
    assert completions(model, device, SETTINGS[setting], cache_dtype=torch.float8_e4m3fn) == want


def test_the_routers_bias_is_fp32_whatever_the_default():
    with default_dtype(torch.bfloat16):
        model = MoR(MoRConfig(**SMALL, **TOKEN))
    assert model.router_bias.dtype == torch.float32 and model.norm.weight.dtype == torch.bfloat16


# Processes and threads


@pytest.mark.parametrize("device", DEVICES)
def test_first_calls_in_threads(device):
    run_job("threads", device)


@needs_fork
def test_imports_again():
    child = multiprocessing.get_context("fork").Process(target=jobs.imports)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_without_asserts_docstrings_warnings_and_a_home(tmp_path):
    home = tmp_path / "file"
    home.touch()  # not even root makes a folder in a file
    # where it compiles, Triton needs a folder, and says so
    cache = f"{tmp_path if torch.cuda.is_available() else home}/cache"
    environment = {"HOME": f"{home}/home", "TRITON_CACHE_DIR": cache, "PYTHONPATH": ""}
    run_job("strict", flags=("-OO", "-I", "-W", "error:::mor_kernels"), **environment)


class Windows(torch.utils.data.Dataset):
    """What a worker of a DataLoader may do: read, and call ops on the CPU."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return 3

    def __getitem__(self, step):
        inputs, _ = self.loader.batch(step)
        return inputs, ops.pack_depths(inputs % 4, 3).indices, ops.rms_norm(inputs.double(), torch.ones(8).double())[1]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Some thousand in two shards."""
    directory = tmp_path_factory.mktemp("tokens")
    (directory / "text").write_text(" ".join(str(i * i) for i in range(4000)))
    prepare(str(directory / "text"), directory / "tokens", vocab_size=300, shard_tokens=10_000)
    return Tokens(directory / "tokens")


@needs_fork
def test_workers_that_are_forked(tokens):
    windows = Windows(Loader(tokens, 8, 2))
    want = [windows[step] for step in range(3)]
    loader = torch.utils.data.DataLoader(windows, None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for got, wanted in zip(loader, want, strict=True):
        assert_equal(got, wanted)


def test_pickles_and_copies(tokens):
    """What users hand to other processes; the tokens as a place, not as a copy of all."""
    x = torch.arange(12).view(2, 6)
    for fields in (EXPERT, TOKEN):
        model = MoR(MoRConfig(**SMALL, **fields))
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert again.config == model.config
            assert torch.equal(again(x, x).loss, model(x, x).loss)
            again.embed_tokens.weight.data.zero_()
            assert model.embed_tokens.weight.any()
    settings = [
        model.config,
        SamplingParams(stop=["end"], seed=3),
        TrainConfig("data", "out"),
        ops.Pages.new(2, 3, 2, "cpu"),
    ]
    for one in settings:
        for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert type(again) is type(one) and str(again) == str(one)
    _, held_out = tokens.split(0.1)
    pickled = pickle.dumps(Loader(held_out, 8, 2))
    assert len(pickled) < len(tokens)
    for got, want in zip(pickle.loads(pickled).batch(1), Loader(held_out, 8, 2).batch(1), strict=True):
        assert torch.equal(got, want)


@gpu
def test_a_child_of_a_process_that_used_cuda():
    run_job("fork_with_cuda")


# Compiled


def everything(values):
    """Every case's results that have gradients, by its tensors."""
    outputs = []
    for name, (inputs, others) in values.items():
        outputs += floating(CASES[name][0](*inputs, *others))
    return outputs


@gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"dynamic": True}, {"mode": "reduce-overhead"}, {"mode": "max-autotune-no-cudagraphs"}],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_compiled_by_inductor(options):
    """All ops in a graph; three times with other numbers, since a CUDA graph is recorded the second time."""
    torch.use_deterministic_algorithms(False)  # or nothing would be tuned
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, **options)
    differentiable = [name for name, case in CASES.items() if case[1]]
    for seed in (0, 5, 7):
        runs = {name: run_of(CASES[name], seed, device="cuda") for name in differentiable}
        values = {name: run[1:3] for name, run in runs.items()}
        inputs, weights = ([t for run in runs.values() for t in run[i]] for i in (1, 3))
        found = []
        for function in (everything, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            outputs = function(values)
            gradients = torch.autograd.grad(outputs, inputs, weights)
            found.append([t.detach().clone() for t in (*outputs, *gradients)])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)  # products may be other ones
    torch._dynamo.reset()


@gpu
@pytest.mark.parametrize("fields", [EXPERT, TOKEN], ids=["expert", "token"])
def test_training_steps_of_cuda_graph_trees(fields):
    """Four steps, of which the last two replay, with other tokens and weights and so another routing each."""
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MoR(MoRConfig(**SMALL, **fields)).cuda()
    twin = copy.deepcopy(model)

    def step(model, x):
        output = model(x, x, logits=False)
        return output.loss, output.depths

    compiled = torch.compile(step, mode="reduce-overhead")
    routings = []
    for seed in range(4):
        x = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(seed)).cuda()
        found = []
        for function, of in ((step, twin), (compiled, model)):
            torch.compiler.cudagraph_mark_step_begin()
            loss, depths = function(of, x)
            loss.backward()
            gradients = [p.grad for p in of.parameters() if p.grad is not None]
            found.append([t.detach().clone() for t in (loss, depths, *gradients)])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)  # sums in another order, through all layers
        routings.append(found[0][1])
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        twin.load_state_dict(model.state_dict())
        for p in (*model.parameters(), *twin.parameters()):
            p.grad = None
    assert not torch.equal(routings[0], routings[-1])
    torch._dynamo.reset()


# Streams and devices


@gpu
@kernels
def test_a_stream_is_an_order(monkeypatch, name, backend):
    """What is launched on another stream reads what that writes before, long after it was launched."""
    function, *tensors = on_gpu(monkeypatch, name, backend)
    want = call(function, *tensors)
    inputs, others, weights = ([torch.zeros_like(t) for t in of] for of in tensors)
    for t in inputs:
        t.requires_grad_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # cycles: 10 ms
        with torch.no_grad():
            for t, value in zip((*inputs, *others), (*tensors[0], *tensors[1])):
                t.copy_(value)
        outputs = function(*inputs, *others)
        torch.cuda._sleep(20_000_000)
        for t, value in zip(weights, tensors[2]):
            t.copy_(value)
        gradients = torch.autograd.grad(floating(outputs), inputs, weights) if inputs else ()
        got = [t.clone() for t in (*(outputs if isinstance(outputs, tuple) else (outputs,)), *gradients)]
    assert not side.query()  # the host hasn't waited
    side.synchronize()
    assert_equal(got, want, name, backend)


@contextlib.contextmanager
def nothing_on_the_first_gpu():
    """Within, the first GPU is the current one, and no memory of it is taken."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    with torch.cuda.device(0):
        yield
    assert torch.cuda.max_memory_allocated(0) == before


@two_gpus
@kernels
def test_another_gpu_than_the_current_one(monkeypatch, name, backend):
    want = call(*on_gpu(monkeypatch, name, backend, device="cuda:0"))
    with nothing_on_the_first_gpu():
        got = call(*on_gpu(monkeypatch, name, backend, device="cuda:1"))
    assert all(t.device == torch.device("cuda:1") for t in got)
    assert_equal(got, want, name, backend)


@two_gpus
@pytest.mark.parametrize("fields", [EXPERT, TOKEN], ids=["expert", "token"])
def test_an_engine_on_another_gpu_than_the_current_one(fields):
    model = tiny(router=fields["router"])[0].float()
    want = completions(model, "cuda:0")
    model.to("cuda:1")
    with nothing_on_the_first_gpu():
        for _ in range(2):  # sizes become graphs the second time
            assert completions(model, "cuda:1") == want


# Graphs


@gpu
@kernels
def test_graphs_that_share_memory(monkeypatch, name, backend):
    """Forward and backward of two calls, replayed in any order while others take and leave memory."""
    runs = [on_gpu(monkeypatch, name, backend, seed) for seed in (0, 7)]
    want = [call(*run) for run in runs]
    side, pool, graphs, got = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), [], []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in runs:
            call(*run)
    torch.cuda.synchronize()
    for run in runs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, stream=side):
            got.append(call(*run))
    for turn in (1, 0, 0, 1):
        others = [torch.full((n,), torch.nan, device="cuda") for n in (16, 2**10, 2**18)]
        del others
        graphs[turn].replay()
        assert_equal(got[turn], want[turn], name, backend)


class Block(nn.Module):
    """A layer of ours: RMSNorm, projection, rotation, attention, and a SwiGLU block."""

    def __init__(self, width=32):
        super().__init__()
        self.norms = nn.Parameter(torch.ones(2, width))
        self.qkv, self.up = (nn.Parameter(normal((n, width), n, torch.float32) * 0.2) for n in (64, 80))
        self.down = nn.Parameter(normal((width, 40), 3, torch.float32) * 0.2)

    def forward(self, x):
        x, qkv = ops.rms_norm_linear(x, self.norms[0], self.qkv)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        q, k, v = ops.rope_qkv(qkv.unflatten(-1, (4, 16)), 2, positions)
        x, gate_up = ops.rms_norm_linear(x, self.norms[1], self.up, add=ops.attention(q, k, v).flatten(-2))
        return x + ops.swiglu_linear(gate_up, self.down)


@gpu
def test_graphed_callables():
    block = Block().cuda()
    twin = copy.deepcopy(block)
    x = normal((2, 9, 32), 0, torch.float32).cuda().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(block, (x,))
    for seed in (0, 1, 2):
        found = []
        for function, of in ((twin, twin), (graphed, block)):
            x = normal((2, 9, 32), seed, torch.float32).cuda().requires_grad_()
            y = function(x)
            found.append([y.detach().clone(), *torch.autograd.grad(y.square().sum(), (x, *of.parameters()))])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


@gpu
def test_first_calls_in_a_capture():
    run_job("first_in_a_capture")


# The same each time

MANY = 5000
MANY_TILES = {  # rows and keys that many programs share, and sums of many parts
    "route": (lambda x, w: ops.route(x, w, 900), [(3, 3000, 320), (320,)], []),
    "gather": (ops.gather, [(MANY, 96)], [torch.arange(0, MANY, 3)]),
    "scatter_delta": (
        lambda x, f, g, i: ops.scatter_back(x, f, i, g, residual="delta"),
        [(MANY, 320), (900, 320), (900,)],
        [torch.arange(0, 5 * 900, 5)],
    ),
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, return_lse=True),
        [(2, 700, 6, 64), (2, 700, 2, 64), (2, 700, 2, 64)],
        [],
    ),
    "attention_varlen": (
        lambda q, k, v, cu: ops.attention_varlen(q, k, v, cu, cu, 900, 900),
        [(1500, 6, 64), (1500, 2, 64), (1500, 2, 64)],
        [cu_seqlens(torch.tensor([900, 0, 600]))],
    ),
    "kv_lookup": (  # rows that share pages, whose gradients add up
        lambda k, v, table, cu: ops.kv_lookup(k, v, table, cu, 4096),
        [(64, 16, 2, 64), (64, 16, 2, 64)],
        [torch.arange(256, dtype=torch.int32).view(8, 32) * 5 % 64, torch.arange(9, dtype=torch.int32) * 512],
    ),
    "aux_loss": (lambda l, i: ops.aux_loss(l, i), [(4, MANY)], [torch.arange(0, MANY, 3).expand(4, -1)]),
    "z_loss": (lambda l: ops.z_loss(l), [(4, MANY, 3)], []),
    "balance_loss": (lambda p, d: ops.balance_loss(p, d), [(4, MANY, 3)], [torch.arange(4 * MANY).view(4, -1) % 4]),
    "choose_depths": (lambda l: ops.choose_depths(l), [(4, MANY, 3)], []),
    "rope_qkv": (lambda x, p: ops.rope_qkv(x, 6, p), [(2, 900, 10, 64)], [torch.arange(900).expand(2, -1)]),
    "rms_norm": (lambda x, a, g: ops.rms_norm(x, g, add=a), [(MANY, 960), (MANY, 960), (960,)], []),
    "swiglu_linear": (lambda x, w: ops.swiglu_linear(x, w), [(MANY, 640), (96, 320)], []),
    "linear_cross_entropy": (
        lambda x, w, t: ops.linear_cross_entropy(x, w, t),
        [(MANY, 64), (3000, 64)],
        [torch.arange(MANY) % 3000],
    ),
}


@gpu
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((n, b) for n in MANY_TILES for b in ("triton", "cuda")), *((n, "hopper") for n in HOPPER)],
)
def test_many_tiles_give_the_same_bits(monkeypatch, name, backend):
    """Outside of deterministic mode as well; but d_q of Hopper's attention, which is summed up in any order."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    try:
        run = run_of(MANY_TILES[name], dtype=dtype, device="cuda")
        want = call(*run)
    except RuntimeError as error:
        if "is not available" not in str(error):
            raise
        pytest.skip(str(error))
    outputs = len(want) - len(run[1])
    for _ in range(4):
        got = call(*run)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b) or (backend == "hopper" and i == outputs), f"result {i}"


def hashes_of_results(device):
    """name -> hash of outputs and gradients, in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    hashes = {}
    for name, case in (CASES | {f"{name} of many tiles": case for name, case in MANY_TILES.items()}).items():
        results = call(*run_of(case, device=device))
        content = b"".join(t.detach().cpu().numpy().tobytes() for t in results)
        hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


@gpu
def test_another_process_gives_the_same_bits():
    assert json.loads(run_job("hashes", "cuda").splitlines()[-1]) == hashes_of_results("cuda")
