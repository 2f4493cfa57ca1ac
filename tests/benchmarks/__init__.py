"""Tests of the benchmark scripts: that they run and report, never how fast anything is."""
