"""The two tables that say what an NF4Tensor does with an operation.

`OPS` maps ATen ops to handlers with one signature; `FUNCTIONS` maps Python-level functions, which
run above autograd and autocast. The families (`rows`, `columns`, `linear`, `collectives`,
`fallback`) fill them once, at import.
"""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
Function = Callable[..., Any]

OPS: dict[OpOverload, Handler] = {}
FUNCTIONS: dict[Any, Function] = {}
_default: list[Handler] = []


def implements(*ops: OpOverload) -> Callable[[Handler], Handler]:
    """Register a handler `(op, args, kwargs) -> result` for ATen ops."""

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


def default(handler: Handler) -> Handler:
    """Register the handler of every op that no family implements."""
    _default.append(handler)
    return handler


def call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an op on arguments of which at least one is an NF4Tensor."""
    return OPS.get(op, _default[0])(op, args, kwargs)


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
