"""Programs that test_process.py starts, each in a process of its own: python tests/ops/jobs.py JOB [argument ...]"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch

THREADS = 8


def threads(device):
    """The first calls of all ops at once, forward and backward, each thread with its own numbers and order."""
    from tests.ops import test_process
    from tests.ops.calls import CASES

    start, got, names = threading.Barrier(THREADS), {}, list(CASES)

    def call(i):
        start.wait()
        for name in names[i * 5 :] + names[: i * 5]:
            got[i, name] = test_process.call(*test_process.run_of(CASES[name], i, device=device))

    workers = [threading.Thread(target=call, args=(i,)) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(got) == THREADS * len(names)
    for (i, name), found in got.items():
        want = test_process.call(*test_process.run_of(CASES[name], i, device=device))
        test_process.assert_equal(found, want, f"{name} in thread {i}")


def imports():
    """What is imported again doesn't define the operators again, or says why it can't."""
    from mor_kernels import ops

    assert importlib.reload(ops) is ops
    module = sys.modules["mor_kernels.ops._dispatch"]
    spec = importlib.util.spec_from_file_location("mor_kernels.ops._dispatch", module.__file__)
    with pytest.raises(ImportError, match="mor_kernels.ops._dispatch was imported in this process before, from "):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    gone = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "mor_kernels"}
    with pytest.raises(ImportError, match="operators once a process"):
        importlib.import_module("mor_kernels.ops")
    sys.modules.update(gone)
    assert ops.gather(torch.ones(2, 1), torch.tensor([1])).tolist() == [[1]]  # the first ones go on


def strict():
    """Without asserts and docstrings, with warnings as errors, and a home that nobody can write to."""
    if __debug__ or __doc__ is not None:
        raise RuntimeError("expected -OO")
    import mor_kernels.__main__
    import mor_kernels.train.command
    from mor_kernels import commands, doctor, ops
    from mor_kernels.decode import Engine
    from mor_kernels.model import MoR, MoRConfig
    from mor_kernels.ops import _dispatch
    from tests.train.tiny import EXPERT, SMALL

    mor_kernels.__main__, mor_kernels.train.command, commands  # noqa: B018
    doctor.report()
    x, index = torch.ones(3, 4), torch.tensor([1, -1])
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for backend in _dispatch.BACKENDS:
            if _dispatch.unavailable(backend, "gather", device) is None:
                rows = ops.gather(x.to(device), index.to(device), backend=backend)
                if rows.tolist() != [[1] * 4, [0] * 4]:
                    raise RuntimeError(f"{device} {backend}: {rows}")
    try:
        ops.gather(x, torch.tensor([3]))
    except ValueError:
        pass
    else:
        raise RuntimeError("an index that is too large was not refused")
    model = MoR(MoRConfig(**SMALL, **EXPERT)).eval()
    if len(Engine(model).generate([[1, 2, 3]])[0].tokens) < 1:
        raise RuntimeError("nothing was generated")


def hashes(device):
    """Prints a name and a hash of all results for each op, as JSON."""
    from tests.ops import test_process

    print(json.dumps(test_process.hashes_of_results(device)))


def first_in_a_capture():
    """Ops whose kernels are yet to be compiled: a graph that is right, or an error, after which they work."""
    from tests.ops import test_process
    from tests.ops.calls import CASES
    from tests.strategies import normal

    for name in ("rms_norm", "gather", "rope", "kv_append_turned"):
        function, shapes, others = CASES[name]
        tensors = [t.cuda() for t in (*(normal(shape, 0, torch.float32) for shape in shapes), *others)]
        graph, captured = torch.cuda.CUDAGraph(), None
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                captured = test_process.call(function, [], tensors, [])
        except RuntimeError as error:
            captured = None
            print(f"{name}: {error}")
        want = test_process.call(function, [], tensors, [])
        if captured is not None:
            graph.replay()
            test_process.assert_equal(captured, want, name)


def fork_with_cuda():
    """In a child whose parent has used CUDA nothing hangs or dies: PyTorch's error, and a report."""
    from mor_kernels import doctor, ops

    x, index = torch.ones(2, 1, device="cuda"), torch.tensor([1], device="cuda")
    ops.gather(x, index)
    torch.cuda.synchronize()
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        facts = doctor.report()
        assert facts["gpus"][0].startswith("not usable: Cannot re-initialize CUDA in forked subprocess"), facts
        assert "forked" in facts["backends"]["triton"], facts
        assert ops.gather(torch.ones(2, 1), torch.tensor([1])).tolist() == [[1]]
        with pytest.raises(RuntimeError, match="forked"):
            ops.gather(x, index)
        with pytest.raises(RuntimeError, match="forked"):
            torch.ones(1, device="cuda")
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
