"""Tests of `nf4tensor.kernels`: bytes to numbers."""
