"""Whole models: quantize and dequantize their weights, count their bytes."""
