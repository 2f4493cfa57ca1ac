"""What the bytes of a quantized weight mean: codebooks, geometry, legal cuts.

No torch and no arithmetic on weights in here. `README.md` is the versioned byte specification that
this code follows; every other room may import this one.
"""
