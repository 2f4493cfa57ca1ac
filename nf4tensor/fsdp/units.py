"""Which modules FSDP2 shards and gathers as one: the layers of a model, and the model around them.

Names of modules only; what they hold is in `parameters.py`. Called by `plan`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from torch import nn

from nf4tensor.errors import ShardingError
from nf4tensor.tensor import NF4Tensor

Modules: TypeAlias = Callable[[nn.Module, str], bool] | Iterable[nn.Module] | None


def choose(model: nn.Module, modules: Modules = None) -> tuple[str, ...]:
    """Choose the modules to shard one by one.

    Args:
        model: Any module.
        modules: The modules, or `(module, name) -> bool`; by default the layers: members of lists
            that hold 4-bit weights. A list inside of a layer, such as its experts, is not taken
            apart, since ranks may skip its members and would then wait for each other; a member
            that is nothing but lists, such as a stage of blocks, is.

    Returns:
        Names of modules, inner ones first, the model itself ("") last.

    Raises:
        ShardingError: A module is not in the model, or has no forward.
    """
    if modules is None:
        names = [name for name, module in _layers("", model) if _holds_quantized(module)]
    elif isinstance(modules, Iterable):  # first: a ModuleList is callable too
        names = _names(model, list(modules))
    else:
        names = [name for name, module in model.named_modules() if name and modules(module, name)]
    for name in (*names, ""):
        module = model.get_submodule(name)
        if _is_container(module):
            raise ShardingError(
                f"{name or 'the model'} is a {type(module).__name__} without a forward, which "
                "fully_shard never sees called: choose its members instead"
            )
    return (*sorted(names, key=lambda name: -name.count(".")), "")


def _names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    wanted = {id(module) for module in modules}
    found = {id(module): name for name, module in model.named_modules() if id(module) in wanted}
    if len(found) < len(wanted):
        raise ShardingError(
            f"{len(wanted) - len(found)} of {len(wanted)} given modules are not in the model: pass "
            "modules of model.modules()"
        )
    return [name for name in found.values() if name]


def _layers(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if _is_list(module) and not _is_container(child) and not _is_all_lists(child):
            yield name, child
        else:
            yield from _layers(name, child)


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):  # torchtitan keys its layers "0", "1", ...
        return len(module) > 0 and all(key.isdigit() for key in module)
    return isinstance(module, nn.ModuleList)


def _is_container(module: nn.Module) -> bool:
    is_plain = type(module).forward is nn.Module.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and is_plain


def _is_all_lists(module: nn.Module) -> bool:
    listed = {
        id(parameter)
        for part in module.modules()
        if _is_list(part)
        for parameter in part.parameters()
    }
    return bool(listed) and all(id(parameter) in listed for parameter in module.parameters())


def _holds_quantized(module: nn.Module) -> bool:
    return any(isinstance(parameter, NF4Tensor) for parameter in module.parameters())
