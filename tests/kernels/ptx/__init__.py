"""An interpreter of the PTX that nvcc writes, in numpy: it proves kernels and counts what they do.

`execute.py` runs a kernel, all threads of a launch at once; `parse.py` reads the text, `memory.py`
is what a launch may touch, and the other modules are the instructions. `launches.py` compiles
`csrc/cuda` and asks its launch functions which kernel they start with what. For tests only.

PTX is what is proven: that ptxas translates it faithfully is trusted, and time is not modelled.
"""
