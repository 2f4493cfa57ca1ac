"""The two tables that say what an NF4Tensor does with an operation.

`OPS` maps ATen ops to handlers with one signature; `FUNCTIONS` maps Python-level functions, which
run above autograd and autocast. The families (one file each) fill them once, at import.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_any

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
Function = Callable[..., Any]

OPS: dict[OpOverload | str, Handler] = {}
FUNCTIONS: dict[Any, Function] = {}
_default: list[Handler] = []
# What schemas don't say: these write the running statistics, and those share memory.
_UNDECLARED_WRITES = (
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
)
_UNDECLARED_VIEWS = ("aten::unsafe_split", "aten::unsafe_split_with_sizes")


def implements(*ops: OpOverload | str) -> Callable[[Handler], Handler]:
    """Register a handler `(op, args, kwargs) -> result` for ops.

    A name such as "c10d::send" stands for an op of a library that is not loaded yet, or that this
    torch may not have.
    """

    def register(handler: Handler) -> Handler:
        for op in ops:
            assert op not in OPS, f"{op} has two handlers"
            OPS[op] = handler
        return handler

    return register


def overrides(*functions: Any) -> Callable[[Function], Function]:
    """Register a replacement for Python-level functions; NotImplemented declines a call."""

    def register(replacement: Function) -> Function:
        for function in functions:
            assert function not in FUNCTIONS, f"{function} has two replacements"
            FUNCTIONS[function] = replacement
        return replacement

    return register


def call_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a Python-level function on arguments of which at least one is an NF4Tensor."""
    if function in FUNCTIONS:
        result = FUNCTIONS[function](*args, **kwargs)
        if result is not NotImplemented:
            return result
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def default(handler: Handler) -> Handler:
    """Register the handler of ops that no family implements and nothing else is made of."""
    _default.append(handler)
    return handler


def call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an op on arguments of which at least one is an NF4Tensor."""
    handler = OPS.get(op) or OPS.get(op._schema.name)
    if handler is None:
        result = op.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        handler = _default[0]
    if not is_view(op):
        return handler(op, args, kwargs)
    with viewing(args[0]):
        return handler(op, args, kwargs)


@contextmanager
def viewing(base: Any) -> Iterator[None]:
    """Let a view of a record be one to autograd too: each counts the writes into the other.

    Handlers run below autograd, where every look at a record would count for itself, and a backward
    pass would not notice that what it saved was changed through another.
    """
    if torch.compiler.is_compiling():
        yield
    elif torch.is_inference_mode_enabled() and not base.is_inference():
        # An inference tensor has no count to share with the normal one that it would be a view of.
        with torch.inference_mode(False), enable_reentrant_dispatch():
            yield
    else:
        with enable_reentrant_dispatch():
            yield


@cache
def is_view(op: OpOverload) -> bool:
    """Tell whether an op's result shares the memory of its first argument, unwritten."""
    if op._schema.name in _UNDECLARED_VIEWS:
        return True
    returns = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def writes_into(kind: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an op would write into an argument of a class."""
    bound = bind(op, args, kwargs)
    written = [
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if op._schema.name in _UNDECLARED_WRITES and bound["training"]:
        written += ["running_mean", "running_var"]
    return tree_any(lambda leaf: isinstance(leaf, kind), [bound[name] for name in written])


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the op's schema, defaults included."""
    bound = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound
