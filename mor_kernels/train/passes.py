"""The forward and backward pass of a training step: as CUDA graphs, and on copies of the weights in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..graphs import captured, side_stream, without_workspace

_Given = TypeVar("_Given", torch.Tensor, torch.Tensor | None)
# a graph, the inputs that it reads, the gradients of the parameters, and what its pass returned
_Captured = tuple[torch.cuda.CUDAGraph, list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]


class Graphs:
    """A forward and backward pass as CUDA graphs, one for each of the sizes that it is called with: the host launches a
    graph, not its thousands of kernels. Nothing in the pass may wait for the device.

    `forward_backward(sizes, *inputs)` adds to the gradients of `parameters` and returns tensors. All graphs work in the
    same memory: what one has left there, gradients and outputs too, is gone once another is replayed.
    """

    KEPT = 32  # the last ones used

    def __init__(self, parameters: Iterable[torch.nn.Parameter],
                 forward_backward: Callable[..., Sequence[torch.Tensor]]) -> None:
        self.parameters, self.forward_backward = list(parameters), forward_backward
        self.graphs: dict[Hashable, _Captured] = {}
        self.pool: Any = None  # the handle of their memory
        self.stream = side_stream(self.parameters[0].device)

    def __call__(self, sizes: Hashable, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Adds to the gradients, and returns what the pass returned. The gradients are overwritten by the next call."""
        before = [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]
        found = self.graphs.pop(sizes, None) or self._capture(sizes, inputs)
        self.graphs[sizes] = found
        graph, own, gradients, outputs = found
        for tensor, new in zip(own, inputs):
            tensor.copy_(new)
        graph.replay()
        for parameter, gradient, earlier in zip(self.parameters, gradients, before):
            if gradient is not None:
                parameter.grad = gradient if earlier is None else gradient.add_(earlier)
        return [output.clone() for output in outputs]

    def _capture(self, sizes: Hashable, inputs: Iterable[torch.Tensor]) -> _Captured:
        while len(self.graphs) >= self.KEPT:
            del self.graphs[next(iter(self.graphs))]
        own = [tensor.clone() for tensor in inputs]
        self._forget()
        with torch.cuda.device(self.stream.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                with without_workspace():
                    self.forward_backward(sizes, *own)  # compiles and loads kernels
            torch.cuda.current_stream().wait_stream(self.stream)
            self._forget()
            graph = torch.cuda.CUDAGraph()
            with captured(graph, self.pool, self.stream.device):
                outputs = self.forward_backward(sizes, *own)
        self.pool = graph.pool()
        gradients = [_lent(parameter.grad, graph) for parameter in self.parameters]
        lent = [_lent(output, graph) for output in outputs]
        self._forget()
        return graph, own, gradients, lent

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class _Memory:
    """The memory of a graph's tensor, without which it may be taken by the captures of other graphs."""

    def __init__(self, tensor: torch.Tensor, graph: torch.cuda.CUDAGraph) -> None:
        storage = tensor.untyped_storage()
        self.graph = graph  # which the memory is there as long as
        self.__cuda_array_interface__ = {"data": (storage.data_ptr(), False), "shape": (storage.nbytes(),),
                                         "typestr": "|u1", "version": 3}


def _lent(tensor: _Given, graph: torch.cuda.CUDAGraph) -> _Given:
    """`tensor`, made while `graph` was captured, as one that doesn't keep its memory from the captures of others."""
    if tensor is None or not tensor.numel():
        return tensor
    memory = torch.as_tensor(_Memory(tensor, graph), device=tensor.device).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Copies(torch.autograd.Function):
    """Tensors in another dtype, and their gradients back in their own: two launches for all of them."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(copies, tensors)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(copies)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = [(d, torch.empty_like(d, dtype=dtype)) for d, dtype in zip(gradients, ctx.dtypes) if d is not None]
        if there:
            torch._foreach_copy_([out for _, out in there], [d for d, _ in there])
        outs = iter(out for _, out in there)
        return None, *(None if d is None else next(outs) for d in gradients)


@contextmanager
def parameters_in(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within, the modules of `model` compute on copies of their parameters in `dtype`, whose gradients reach the
    parameters in these' own dtype. All activations are of `dtype` then, the residual stream too, and a weight that is
    used several times is copied once. The backward pass belongs within where it computes activations anew."""
    places = [(module, name, parameter) for module in model.modules()
              for name, parameter in module._parameters.items() if parameter is not None]
    parameters = list(dict.fromkeys(parameter for _, _, parameter in places))
    copies = dict(zip(parameters, _Copies.apply(dtype, *parameters)))
    try:
        for module, name, parameter in places:
            module._parameters[name] = copies[parameter]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
