"""Bytes to numbers, per device.

`schema.py` defines each op once, `reference.py` is the plain PyTorch oracle, `native.py` loads the
compiled library, `triton_backend.py` has the Triton kernels and `select.py` alone registers
backends. Other rooms call `ops.py` and nothing else in here.
"""
