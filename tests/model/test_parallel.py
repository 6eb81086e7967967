"""Two data-parallel processes, one of which has no token beyond the first recursion."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mor_kernels.model import MoR, MoRConfig
from tests.model.test_model import EXPERT, TINY, TOKEN
from tests.strategies import prefer, targets

RELAXED = {"lora_rank": 2, "recursion_encoding": True}  # so that each recursion has parameters of its own


def worker(rank, folder, fields, device, backend):
    prefer(pytest.MonkeyPatch(), backend)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = MoR(MoRConfig(**TINY, **fields, **RELAXED, balance="loss_free")).to(device)
    tokens = torch.arange(2 * 6, device=device).view(2, 6)
    if rank:
        tokens = tokens[:, :1]  # expert-choice keeps none of one token at the second recursion
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    if rank and fields["router"] == "token_choice":
        with torch.no_grad():
            model.routers[0].weight.zero_()  # a tie: the shallowest depth
    out = parallel(tokens, tokens)
    deepest = out.depths.max()
    out.loss.backward()
    model.update_router_bias(out.depths)
    torch.save((deepest, out.depths, model.router_bias, {n: p.grad for n, p in model.named_parameters()}),
               f"{folder}/{rank}.pt")  # fmt: skip
    dist.destroy_process_group()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file")
@pytest.mark.parametrize("fields", [EXPERT, TOKEN], ids=["expert", "token"])
@targets("route")
def test_a_rank_without_deep_tokens_does_not_hang(tmp_path, device, backend, fields):
    """On a GPU both have the same one."""
    if device == "cpu" and backend != "eager":
        pytest.skip("tests/model/test_backends.py has one process, which takes a second in Triton's interpreter")
    mp.spawn(worker, (str(tmp_path), fields, device, backend), nprocs=2)
    ranks = (torch.load(tmp_path / f"{rank}.pt", map_location="cpu") for rank in (0, 1))
    (deep, depths, bias, a), (shallow, others, other_bias, b) = ranks
    assert deep > 1 and shallow == 1
    assert a.keys() == b.keys()
    for name in a:  # averaged over both ranks
        assert a[name] is not None and torch.equal(a[name], b[name])
    if fields is TOKEN:  # loss-free balancing counts the tokens of both
        counts = torch.bincount(torch.cat((depths.flatten(), others.flatten())), minlength=4)[1:].double()
        want = 0.001 * torch.sign(counts.mean() - counts).float()
        assert torch.equal(bias, want) and torch.equal(other_bias, want)
