"""The errors a user can meet.

Every class here is a `NF4TensorError` and the built-in that a caller would expect to catch. A
message says what was expected, what came, whose it is, and the way out. Faults of this package
itself are assertions, not errors of this file.
"""


class NF4TensorError(Exception):
    """Base of every error that nf4tensor raises on purpose."""


class SpecError(NF4TensorError, ValueError):
    """A geometry that the format does not have, or two that do not fit each other."""


class WeightError(NF4TensorError, ValueError):
    """A weight whose values cannot be quantized, such as one with NaN or infinite elements."""


class DTypeError(NF4TensorError, TypeError):
    """A tensor of a dtype that the format does not take."""


class ShapeError(NF4TensorError, ValueError):
    """A tensor whose shape does not fit the operation."""


class UnsupportedError(NF4TensorError, NotImplementedError):
    """An operation that a 4-bit tensor cannot carry out without a wrong or lossy result."""


class GradientError(NF4TensorError, RuntimeError):
    """A backward pass that would have to train a 4-bit weight."""


class ShardingError(NF4TensorError, ValueError):
    """A way of sharding that cannot work; raised on every rank before the first collective."""


class CheckpointError(NF4TensorError, ValueError):
    """A file that is damaged, of another version, or does not fit the model."""


class NF4TensorWarning(UserWarning):
    """Something works, but costs memory or precision that a user may not expect."""


class UnhealthyError(NF4TensorError, AssertionError):
    """A model that `doctor` found faults in; the message is its report."""
