"""Tests of `nf4tensor.format`: what the bytes mean."""
