"""Bytes that collectives move while a model runs, seen below FSDP2."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountWire(TorchDispatchMode):
    """List the size of every all-gather's output, and of what every reduction takes in."""

    def __init__(self):
        super().__init__()
        self.gathered_bytes = []
        self.scattered_bytes = []
        self.reduced_bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathered_bytes.append(args[0].nbytes)
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.scattered_bytes.append(args[1].nbytes)
        elif func is torch.ops.c10d.allreduce_.default:
            self.reduced_bytes.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))
