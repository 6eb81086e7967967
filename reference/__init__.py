"""What a Mixture-of-Recursions model computes, written to be read.

Plain PyTorch with loops over sequences and tokens, in float64 whenever its inputs are float64. It shares no code with
``mor_kernels``, so that the two can be checked against each other; everything is differentiable by ordinary autograd.

- ``ops``: each operation on its own - routing, packing, attention, keys and values, losses, metrics;
- ``model``: a whole model, forward only, run one sequence at a time;
- ``decode``: generation that recomputes everything for every new token, and so needs no cache.

Read ``model`` first.
"""
