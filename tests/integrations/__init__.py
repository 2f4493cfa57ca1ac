"""Tests of `nf4tensor/integrations`."""
