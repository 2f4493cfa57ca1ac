"""4-bit weights that shard, gather, save and train like any other tensor.

`quantize_` turns the weights of a model into `NF4Tensor`s; a plain `fully_shard` then works on the
whole model. CONTRIBUTING.md and each folder's own docstring describe the rooms of the package.
"""

from nf4tensor import checkpoint, fsdp
from nf4tensor.checkpoint.files import ASSEMBLERS
from nf4tensor.errors import NF4TensorError, NF4TensorWarning
from nf4tensor.format.spec import NF4Spec
from nf4tensor.fsdp.doctor import doctor
from nf4tensor.integrations.bitsandbytes_files import assemble
from nf4tensor.kernels.ops import release_workspace
from nf4tensor.nn.convert import dequantize_, memory_footprint, quantize_
from nf4tensor.tensor import NF4Tensor, to_nf4
from nf4tensor.tensor.linear import linear_nf4

__version__ = "0.1.0"

ASSEMBLERS.append(assemble)

__all__ = [
    "NF4Spec",
    "NF4Tensor",
    "NF4TensorError",
    "NF4TensorWarning",
    "checkpoint",
    "dequantize_",
    "doctor",
    "fsdp",
    "linear_nf4",
    "memory_footprint",
    "quantize_",
    "release_workspace",
    "to_nf4",
]
