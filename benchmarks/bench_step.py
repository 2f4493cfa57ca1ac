"""Take one training step of `make finetune`'s model, over a 4-bit, a dense and bitsandbytes' base.

Model, text, adapters and step are those of `examples/finetune.py`, in one process and not sharded:
LoRA by PEFT, 4 sequences of 256 tokens. The dense base holds the decoded weights in the dtype that
is computed in, so the first losses of both must agree. bfloat16 is measured on fewer tokens where
the processor emulates it.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import harness
import peers
import roofs
import torch
from torch import nn

from nf4tensor import NF4Tensor, dequantize_, quantize_

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import corpus
import finetune
import options as example_options
import report

BATCH, SEQ_LEN = 4, 256
QUICK_BATCH, QUICK_SEQ_LEN = 1, 16  # also of an emulated dtype
GOALS = {"dense": 1 / 1.05, "bitsandbytes": 1.3}  # of their time over ours; both in bfloat16
# Of first losses. Dense and ours differ by the rounding of sums; bitsandbytes by its scales.
LOSS_DISTANCE = {"float32": 1e-4, "bfloat16": 1e-2}
OTHER_SCALES_DISTANCE = 2e-2


class Losses:
    """The first losses: of the same adapters, tokens and, but for rounding, weights."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.first: dict[str, float] = {}

    def check(self, name: str, loss: float) -> None:
        """Keep the first loss of a base and compare it with ours, which comes first of all."""
        if name in self.first:
            return
        ours = self.first.setdefault("nf4tensor", loss)
        self.first[name] = loss
        bound = LOSS_DISTANCE[self.dtype] if name == "dense" else OTHER_SCALES_DISTANCE
        assert abs(loss - ours) <= bound * ours, f"{name}: first loss {loss:.5f}, ours {ours:.5f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--model", default="smollm2", help="as of examples/finetune.py")
    parser.add_argument("--dtype", choices=LOSS_DISTANCE, nargs="+", default=list(LOSS_DISTANCE))
    options = harness.parse(parser, argv)
    example = example_options.parse(["--model", options.model])
    example_options.check_packages()
    folder = example_options.model_folder(options.model)  # or says what to do
    report.quiet()
    skipped = {"roofs": reason} if (reason := roofs.unavailable_because()) else {}
    found, rows = {}, []
    for threads in options.threads:
        torch.set_num_threads(threads)
        found[threads] = roofs.measure(threads, options)
    for name in options.dtype:
        emulated = name == "bfloat16" and not roofs.has_quick_bfloat16()
        if emulated:
            skipped[f"{name} at full size"] = "this processor emulates it: fewer tokens"
        size = (QUICK_BATCH, QUICK_SEQ_LEN) if options.quick or emulated else (BATCH, SEQ_LEN)
        tokens = load_tokens(folder, *size)
        with peers.quiet():  # transformers and PEFT import what of the peers is installed
            bases = make_bases(folder, getattr(torch, name), options, skipped)
            steps = {base: step_of(model, example) for base, model in bases.items()}
        # Forward and the gradient of each input; attention and adapters are left out.
        flops = 4 * tokens.numel() * linear_weights(bases["nf4tensor"])
        losses = Losses(name)
        for threads in options.threads:
            torch.set_num_threads(threads)
            harness.say(f"steps in {name}, {threads} threads")
            calls = {base: bind(step, tokens) for base, step in steps.items()}
            # Steps are long and few: the same number of each, or the machine's mood decides.
            times = harness.race(calls, options.rounds, check=losses.check, slow=float("inf"))
            labels = {"compute": name, "batch": f"{size[0]} x {size[1]}", "threads": threads}
            for base, row in summarize(times, flops, emulated, found[threads], name).items():
                rows.append({**labels, "base": base, "first loss": losses.first[base], **row})
    title = f"one training step of {Path(folder).name}, LoRA of rank {example.lora_rank}"
    harness.report(
        "step", {title: rows}, options.results, roofs=roofs.present(found), skipped=skipped
    )


def load_tokens(folder: Path, batch: int, seq_len: int) -> torch.Tensor:
    """Return the first sequences of the example's text, int64 `[batch, seq_len]`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return corpus.load_chunks(corpus.DEFAULT, tokenizer, seq_len, batch, 1)[0]


def make_bases(folder: Path, dtype: torch.dtype, options, skipped) -> dict[str, nn.Module]:
    """Return the frozen models by name, all but their 4-bit weights in the dtype."""
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    original.requires_grad_(False)
    ours = quantize_(copy.deepcopy(original), freeze_base=True, progress=False)
    bases = {"nf4tensor": ours, "dense": dequantize_(copy.deepcopy(ours), dtype)}
    if (bnb := peers.load("bitsandbytes", options, skipped)) is not None:
        bases["bitsandbytes"] = with_bitsandbytes(bnb, original, ours, dtype)
    for base in bases.values():
        for parameter in base.parameters():  # embeddings and norms
            if type(parameter) is nn.Parameter and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return bases


def linear_weights(model: nn.Module) -> int:
    """Count the weights of a model's linear layers, without those of its adapters."""
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora" not in name
    ]
    return sum(layer.in_features * layer.out_features for layer in layers)


def with_bitsandbytes(bnb, original: nn.Module, ours: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model with bitsandbytes' layers where ours has 4-bit weights."""
    model = copy.deepcopy(original)
    for name, parameter in ours.named_parameters():
        if isinstance(parameter, NF4Tensor):
            layer_name = name.removesuffix(".weight")
            layer = model.get_submodule(layer_name)
            assert layer.bias is None
            model.set_submodule(
                layer_name, peers.bitsandbytes_linear(bnb, layer.weight.data, dtype)
            )
    model.is_loaded_in_4bit = True  # for PEFT
    return model


def step_of(base: nn.Module, example) -> Callable[[torch.Tensor], float]:
    """Return the example's step, of adapters over a base; it returns the loss."""
    model = finetune.add_adapters(base, example).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=example.lr, weight_decay=0.0, foreach=True)
    return lambda tokens: finetune.take_step(model, optimizer, tokens).item()


def bind(step: Callable[[torch.Tensor], float], tokens: torch.Tensor) -> Callable[[], float]:
    """Return the step as a contestant."""
    return lambda: step(tokens)


def summarize(times, flops: int, emulated: bool, roof, dtype: str) -> dict[str, harness.Row]:
    """Return what a row says of each base; goals are those of the full size."""
    mine = times["nf4tensor"]["median_ms"]
    limit = roofs.share(flops / mine / 1e6, roof, f"{dtype} matmul GFLOP/s")
    rows = {}
    for name, timing in times.items():
        row = {**harness.cells(timing), "GFLOP/s": flops / timing["median_ms"] / 1e6}
        if name != "nf4tensor":
            goal = None if emulated else GOALS.get(name)
            row |= harness.verdict(timing["median_ms"], mine, goal, limit)
        rows[name] = row
    return rows


if __name__ == "__main__":
    main()
