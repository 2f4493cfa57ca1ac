"""Whole models in safetensors files, 4-bit or dense, streamed and sharded.

`files.py` reads what a folder holds, `write.py` writes files a tensor at a time; `prepare.py`,
`load.py` and `save.py` are for models. Nothing of a file is trusted, and no pickle is read or
written.
"""

from nf4tensor.checkpoint.load import load
from nf4tensor.checkpoint.match import LoadResult
from nf4tensor.checkpoint.prepare import prepare
from nf4tensor.checkpoint.save import save

__all__ = ["LoadResult", "load", "prepare", "save"]
