"""Tests of nf4tensor; the folders mirror the package."""
