"""The model of `bench_sharding.py` over each base: what is trained, not how it is measured.

A small Llama from a configuration, the same weights and adapters whoever holds them. The weights of
the decoder layers' linears are the base; each contestant holds them in its own form, made and
sharded as its users do, and decodes them to the dtype of the activations, float32, where they are
used. Everything else is float32 in all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import peers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from nf4tensor import quantize_
from nf4tensor.format.spec import NF4Spec, ceil_div

ADAPTER_RANK = 8
VOCABULARY = 128


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama.

    Args:
        hidden: width of a token.
        intermediate: width inside of an MLP.
        heads: of attention, as many for keys and values.
        head_dim: width of a head.
        layers: decoder layers.
    """

    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    layers: int = 2

    def weights(self) -> list[tuple[int, int]]:
        """Return the shapes `[out, in]` of the base."""
        attention = self.heads * self.head_dim
        layer = [(attention, self.hidden)] * 3 + [(self.hidden, attention)]
        layer += [(self.intermediate, self.hidden)] * 2 + [(self.hidden, self.intermediate)]
        return layer * self.layers

    def packed_bytes(self, num_ranks: int) -> int:
        """Return the bytes of NF4 records on the fullest rank, padding rows included."""
        return sum(
            ceil_div(rows, num_ranks) * NF4Spec.for_weight(columns).pitch
            for rows, columns in self.weights()
        )


SHAPES = {
    "even": Sizes(hidden=768, intermediate=768, heads=6, head_dim=128),
    # Rows of 520, 490 and 1367: 3 divides none, 4 one, 2 two of them. The elements of each weight
    # are a multiple of 8, since bitsandbytes stores 8 codes as a float32.
    "uneven": Sizes(hidden=520, intermediate=1367, heads=5, head_dim=98),
}
QUICK_SHAPES = {
    "even": Sizes(hidden=96, intermediate=192, heads=3, head_dim=32, layers=1),
    "uneven": Sizes(hidden=88, intermediate=131, heads=1, head_dim=74, layers=1),
}


@dataclass(frozen=True)
class Contestant:
    """How a base is held.

    Args:
        convert: replaces the linears of a module, which hold bfloat16, by ones in its own form.
        decode: gives the float32 weight that a layer computes with.
        is_bitsandbytes: PEFT has to know.
    """

    convert: Callable[[nn.Module], object]
    decode: Callable[[nn.Linear], Tensor]
    is_bitsandbytes: bool = False


class BFloat16Linear(nn.Linear):
    """A layer whose weight is held, and gathered, in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def contestants(options, skipped: dict[str, str]) -> dict[str, Contestant]:
    """Return who can take part, by name; who cannot goes into `skipped`."""
    found = {
        "nf4tensor": Contestant(
            lambda module: quantize_(module, progress=False),
            lambda layer: layer.weight.dequantize(torch.float32),
        ),
        "dense bf16": Contestant(
            lambda module: _replace(module, lambda layer: _holding(layer, BFloat16Linear)),
            lambda layer: layer.weight.float(),
        ),
    }
    if (bnb := peers.load("bitsandbytes", options, skipped)) is not None:
        found["bitsandbytes"] = _bitsandbytes(bnb)
    if (torchao := peers.load("torchao", options, skipped)) is not None:
        found["torchao"] = _torchao(torchao)
    return found


def _bitsandbytes(bnb: ModuleType) -> Contestant:
    def made(layer: nn.Linear) -> nn.Module:
        # It rounds weights to the dtype that it saw before it multiplies gradients by them. Stored
        # in the dtype that is sharded, as its users do.
        weight, dtype = layer.weight.data.float(), torch.float32
        return peers.bitsandbytes_linear(bnb, weight, dtype, quant_storage=dtype)

    return Contestant(
        lambda module: _replace(module, made),
        lambda layer: bnb.functional.dequantize_4bit(layer.weight, layer.quant_state),
        is_bitsandbytes=True,
    )


def _torchao(torchao: ModuleType) -> Contestant:
    class TorchAOLinear(nn.Linear):  # torchtune's FrozenNF4Linear
        def forward(self, x: Tensor) -> Tensor:
            return torchao.linear_nf4(x, self.weight)

    def made(layer: nn.Linear) -> nn.Module:
        return _holding(layer, TorchAOLinear, peers.torchao_weight(torchao, layer.weight.data))

    return Contestant(
        lambda module: _replace(module, made),
        lambda layer: layer.weight.to(torch.float32),
    )


def _linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the base's layers, without those of adapters."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and "lora_" not in name:
            yield name, layer


def _replace(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for name, layer in _linears(module):
        module.set_submodule(name, make(layer))


def _holding(layer: nn.Linear, kind: type[nn.Linear], weight: Tensor | None = None) -> nn.Linear:
    """Return a layer of some kind over another weight, or over the layer's own."""
    made = kind(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(layer.weight.data if weight is None else weight, requires_grad=False)
    return made


def build(
    contestant: Contestant, sizes: Sizes, seed: int = 0, *, decoded: bool = False
) -> nn.Module:
    """Make the model with its adapters.

    Args:
        contestant: who holds the base.
        sizes: of the model.
        seed: of all weights.
        decoded: hold the contestant's weights dense, as it decodes them.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.head_dim,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    layers = model.model.layers
    for _, layer in _linears(layers):
        layer.to(torch.bfloat16)
    contestant.convert(layers)
    if decoded:
        _replace(layers, lambda layer: _holding(layer, nn.Linear, contestant.decode(layer)))
    elif contestant.is_bitsandbytes:
        model.is_loaded_in_4bit = True
    adapters = LoraConfig(task_type="CAUSAL_LM", r=ADAPTER_RANK, target_modules="all-linear")
    torch.manual_seed(seed)
    model = get_peft_model(model, adapters)
    for parameter in trainable(model):
        # PEFT rounds them to the dtype in which a base seems to be held: now the same in all.
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


def shard(model: nn.Module) -> nn.Module:
    """Shard each decoder layer and the rest, as users do."""
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the adapters' parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def held(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return what this rank holds of the base, replicated parts too: tensors by layer and name."""
    found = {}
    for name, layer in _linears(model.base_model.model.model.layers):
        weight = getattr(layer.weight, "_local_tensor", layer.weight).detach()
        parts = {"weight": weight}
        if hasattr(weight, "__tensor_flatten__"):
            parts = {part: getattr(weight, part) for part in weight.__tensor_flatten__()[0]}
        if (state := getattr(layer, "quant_state", None)) is not None:  # of bitsandbytes
            parts |= {"absmax": state.absmax, "code": state.code, "offset": state.offset}
            parts |= {"nested absmax": state.state2.absmax, "nested code": state.state2.code}
        found[name] = parts
    return found


def held_bytes(model: nn.Module) -> int:
    """Count the bytes of the storages under what this rank holds of the base."""
    storages = (
        tensor.untyped_storage() for parts in held(model).values() for tensor in parts.values()
    )
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def differing_parts(model: nn.Module, other: nn.Module) -> dict[str, list[str]]:
    """Compare all bytes of two models on this rank; name the parts that differ, by layer."""
    theirs, differing = held(other), {}
    for layer, parts in held(model).items():
        names = [name for name, part in parts.items() if not _same(part, theirs[layer][name])]
        if names:
            differing[layer] = names
    pairs = zip(trainable(model), trainable(other), strict=True)
    if not all(_same(mine.to_local(), its.to_local()) for mine, its in pairs):
        differing["adapters"] = ["weight"]
    return differing


def _same(a: Tensor, b: Tensor) -> bool:
    # As bytes: codes that are stored as float32 may be NaN.
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (a, b)))
