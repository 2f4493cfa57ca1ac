"""Bytes that other packages made, and the scripts that asked them."""
