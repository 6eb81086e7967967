"""Data-parallel training: whole models whose gradients are averaged, or one in parts by FSDP2, which is told that a
recursive model uses its layers several times a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..model import MoR

_meshes: list[DeviceMesh] = []


def forget_groups() -> None:
    """To be called where process groups end, which meshes still hold.

    DTensor's caches hold the meshes until the interpreter has gone, when gloo's threads abort the process now and then.
    """
    while _meshes:
        getattr(_meshes.pop(), "_pg_registry", {}).clear()  # in older torch a mesh has groups' names only


def share(model: nn.Module) -> None:
    """Gives every process the first one's weights."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Over the processes, of parameters that are whole in each; which of them have a gradient is the same in all.

    Once a step, after the backward passes: these may then be CUDA graphs, which saves more than sending would take
    that DistributedDataParallel hides behind the computation. DistributedDataParallel also arranges its buckets anew
    after a run's first step; a resumed run would then add up the gradients of three or more processes in another order
    than an unbroken one.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    torch._foreach_div_(gradients, dist.get_world_size())


class Shards:
    """A model whose parameters are divided among the processes.

    A layer is a group: its parameters are gathered by one collective and its gradients reduced by one. A layer that
    recursions share is gathered at its first use in a step and kept until `end`, and its gradient reduced where the
    backward pass comes to its first use in the last micro-step, overlapping with the layers before it. A layer that is
    used once is freed after its forward pass, as FSDP2 does by default. All else is the root's, and kept as well.

    Around each forward and backward pass call `begin`, and `end` after a step's last one.
    """

    def __init__(self, model: MoR, device: torch.device, bf16: bool) -> None:
        """`share` the model before: each process keeps its part of what it has."""
        if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise ValueError('parallel: expected "ddp" (FSDP2 runs on CPUs from torch 2.7 on), got "fsdp" with device '
                             f"{device} and torch {torch.__version__}")
        self.model = cast(Any, model)  # to which fully_shard gives the methods of FSDPModule, as to its layers
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
        _meshes.append(options["mesh"])
        if bf16:  # gathered as bf16 and used so; parameters, the sum over processes and the optimizer are fp32
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

        uses = Counter(index for layers in model.config.recursion_layers for index in layers)
        self.shared = [layer for index, layer in enumerate(self.model.layers) if uses[index] > 1]
        for layer in self.model.layers:
            # the backward pass begins with the last layer
            kept = layer in self.shared or layer is self.model.layers[-1]
            fully_shard(layer, reshard_after_forward=not kept, **options)
        fully_shard(model, reshard_after_forward=False, **options)
        for module in (self.model, *self.shared):
            module.set_reshard_after_backward(False, recurse=False)
        for layer in self.shared:
            layer.register_forward_hook(self._reduce_at_first_use)
        # Token-choice waits for the device between layers: the next one's parameters should be on their way.
        for layer, following in zip(self.model.layers, self.model.layers[1:]):
            layer.set_modules_to_forward_prefetch([following])
        self.begin(last=True)

    def begin(self, last: bool) -> None:
        """Before a micro-step's forward pass; `last` is whether gradients are reduced after it, or only added up."""
        self.last = last
        self.used: set[nn.Module] = set()
        self.model.set_is_last_backward(last)
        self.model.set_requires_gradient_sync(last)
        for layer in self.shared:
            layer.set_requires_gradient_sync(False, recurse=False)

    def _reduce_at_first_use(self, layer: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        # Autograd adds up the gradient over a layer's uses and hands it over at the first one. FSDP2 looks for it after
        # the backward pass of each use, and at the last one it would find, and reduce, what earlier micro-steps left.
        # When the gradient of the first use's output is there, the backward passes of all later uses are done.
        if outputs[0].requires_grad and layer not in self.used:
            self.used.add(layer)
            outputs[0].register_hook(lambda _: layer.set_requires_gradient_sync(self.last, recurse=False))

    def end(self) -> None:
        """Frees the gathered parameters; afterwards the model's parameters are the ones that the optimizer has."""
        for module in (self.model, *self.model.layers):
            module.reshard()
