"""Whole models in safetensors files, 4-bit or dense, streamed and sharded.

`files.py` reads what a folder holds, `write.py` writes files a tensor at a time, `save.py` and
`load.py` move models. Nothing of a file is trusted, and no pickle is read or written.
"""

from nf4tensor.checkpoint.load import LoadResult, load
from nf4tensor.checkpoint.save import save

__all__ = ["LoadResult", "load", "save"]
