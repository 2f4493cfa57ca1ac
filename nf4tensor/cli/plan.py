"""`nf4tensor plan`: what a model needs on each GPU to train in 4 bits, before any weight is there.

The model is made from its configuration on the meta device, sharded on paper (`fsdp.plan`), and one
step is run without values (`fsdp.step_memory`).
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nf4tensor.errors import NF4TensorError
from nf4tensor.fsdp.estimate import Estimate, estimate
from nf4tensor.fsdp.plan import plan
from nf4tensor.fsdp.policy import PREFERRED, Policy
from nf4tensor.fsdp.step_memory import StepMemory, trace
from nf4tensor.fsdp.table import amount
from nf4tensor.integrations import model_configs
from nf4tensor.integrations.model_configs import Recipe

MOST_GPUS = 1024
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": (1000 if kind == "B" else 1024) ** power
    for power, letter in enumerate("KMGT", 1)
    for kind in ("B", "iB")
}
_EXAMPLES = """examples:
  nf4tensor plan meta-llama/Llama-3.1-70B --gpus 2 --gpu-memory 24GiB
  nf4tensor plan ./my-model --gpus 8 --gpu-memory 80GB --seq-len 8192 --plot memory.png"""


@dataclass(frozen=True)
class Setup:
    """What is asked about: the hardware, the batch of one rank, and how it trains."""

    gpus: int
    batch_size: int
    seq_len: int
    recipe: Recipe
    offload: bool


class Planner:
    """Estimates of one model, each step run once."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._models: dict[Recipe, Any] = {}
        self._steps: dict[tuple[Recipe, int, int], StepMemory] = {}

    def estimates(self, setup: Setup) -> dict[str, Estimate]:
        """Return what both policies need."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        recipe, key = setup.recipe, (setup.recipe, setup.batch_size, setup.seq_len)
        if recipe not in self._models:
            self._models[recipe] = model_configs.make_model(self._config, recipe)
        model = self._models[recipe]
        if key not in self._steps:
            self._steps[key] = trace(
                model, lambda: model_configs.loss_of(model, setup.batch_size, setup.seq_len)
            )
        # Pinned or not makes no difference to bytes, and pinning would need a GPU here.
        offload = CPUOffloadPolicy(pin_memory=False) if setup.offload else None
        sharding = plan(model, setup.gpus, offload_policy=offload)
        return {name: estimate(sharding, name, self._steps[key]) for name in PREFERRED}


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="say what a model needs on each GPU, without its weights",
        description="Say what a model needs on each GPU to train LoRA over a 4-bit base.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="config.json, folder or hub id")
    parser.add_argument("--gpus", type=positive, default=1)
    parser.add_argument("--gpu-memory", type=size, required=True, help="of each: 24GiB, 80GB")
    parser.add_argument("--seq-len", type=positive, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=positive, default=1, help="sequences on each GPU")
    parser.add_argument("--lora-rank", type=positive, default=16)
    parser.add_argument("--targets", nargs="+", default=["all-linear"], help="layers with adapters")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--offload", action="store_true", help="keep shards in the host's memory")
    parser.add_argument("--policy", choices=("auto", "shard", "replicate"), default="auto")
    parser.add_argument("--plot", type=Path, help="picture to write, .png or .svg")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """Read a positive number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def size(text: str) -> int:
    """Read bytes from "24GiB", "80GB" or a number."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]i?B|B|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no amount of memory: write 24GiB or 80GB")
    return int(float(match[1]) * _UNITS[match[2]])


def run(options: argparse.Namespace) -> None:
    """Print the table or the JSON, and draw."""
    targets = tuple(options.targets)
    recipe = Recipe(
        options.lora_rank,
        "all-linear" if targets == ("all-linear",) else targets,
        options.checkpointing,
    )
    setup = Setup(options.gpus, options.batch_size, options.seq_len, recipe, options.offload)
    planner = Planner(model_configs.load_config(options.model))
    found = planner.estimates(setup)
    chosen = choose(found, options.policy, options.gpu_memory)
    fits = not chosen.problem and chosen.device <= options.gpu_memory
    ways = [] if fits else list(ways_out(planner, setup, options.policy, options.gpu_memory))
    if options.json:
        print(json.dumps(_as_dict(options, found, chosen, fits, ways), indent=2))
    else:
        print("\n".join(_lines(options, found, chosen, fits, ways)))
    if options.plot:
        draw(options.plot, found, options)


def choose(found: dict[str, Estimate], policy: Policy, budget: int) -> Estimate:
    """Choose replicating where it works and fits, since then no frozen weight travels."""
    if policy != "auto":
        return found[policy]
    working = [found[name] for name in PREFERRED if not found[name].problem]
    fitting = [e for e in working if e.device <= budget]
    return (fitting or working[-1:] or [found["shard"]])[0]


def ways_out(planner: Planner, setup: Setup, policy: Policy, budget: int) -> Iterator[str]:
    """Yield each single change that makes it fit, and the largest batch that does."""
    changes: list[tuple[str, Setup]] = []
    if not setup.recipe.checkpointing:
        changes.append(
            (
                "activation checkpointing",
                replace(setup, recipe=replace(setup.recipe, checkpointing=True)),
            )
        )
    if not setup.offload:
        changes.append(("--offload", replace(setup, offload=True)))
    halves = setup
    while halves.batch_size > 1 or halves.seq_len > 256:
        if halves.batch_size > 1:
            halves = replace(halves, batch_size=halves.batch_size // 2)
        else:
            halves = replace(halves, seq_len=halves.seq_len // 2)
        text = f"--batch-size {halves.batch_size} --seq-len {halves.seq_len}"
        changes.append((text, halves))
    more = setup
    while 2 * more.gpus <= MOST_GPUS:
        more = replace(more, gpus=2 * more.gpus)
        changes.append((f"--gpus {more.gpus}", more))
    done: set[str] = set()
    for text, changed in changes:
        kind = text.split()[0]
        if kind in done:
            continue
        needed = choose(planner.estimates(changed), policy, budget)
        if not needed.problem and needed.device <= budget:
            done.add(kind)
            yield f"{text}: {both(needed.device)}"


def both(num_bytes: int) -> str:
    """Write bytes in GB and GiB."""
    return f"{num_bytes / 1e9:.2f} GB ({num_bytes / 2**30:.2f} GiB)"


def _as_dict(options, found, chosen, fits, ways) -> dict[str, Any]:
    return {
        "model": options.model,
        "gpus": options.gpus,
        "gpu_memory": options.gpu_memory,
        "policy": chosen.policy,
        "fits": fits,
        "ways_out": ways,
        "choices": {
            name: {
                "parts": e.parts,
                "device": e.device,
                "host": e.host,
                "wire": e.wire,
                "problem": e.problem,
            }
            for name, e in found.items()
        },
    }


def _lines(options, found, chosen, fits, ways) -> Iterator[str]:
    yield (
        f"{options.model}: LoRA of rank {options.lora_rank} over a 4-bit base, "
        f"{options.batch_size} x {options.seq_len} tokens on each of {options.gpus} GPUs"
    )
    yield ""
    names = list(found)
    width = max(len(part) for part in chosen.parts)
    yield f"{'':<{width}}" + "".join(
        f"  {n + (' *' if n == chosen.policy else ''):>24}" for n in names
    )
    for part in chosen.parts:
        yield f"{part:<{width}}" + "".join(f"  {both(found[n].parts[part]):>24}" for n in names)
    for label, value in (("device", "device"), ("host", "host"), ("wire a step", "wire")):
        numbers = [getattr(found[n], value) for n in names]
        if any(numbers):
            yield f"{label:<{width}}" + "".join(f"  {both(v):>24}" for v in numbers)
    yield ""
    for name in names:
        if found[name].problem:
            yield f"{name} cannot work: {found[name].problem}"
    left = options.gpu_memory - chosen.device
    if fits:
        yield f"{chosen.policy}: fits {both(options.gpu_memory)}, {amount(left)} left"
        return
    yield f"{chosen.policy}: {amount(-left)} more than {both(options.gpu_memory)}"
    for way in ways:
        yield f"fits with {way}"
    if not ways:
        yield "no single change makes it fit: combine them, or take a smaller --lora-rank"


def draw(path: Path, found: dict[str, Estimate], options: argparse.Namespace) -> None:
    """Draw both choices as stacked bars under the memory of a GPU."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise NF4TensorError(f'{error}: --plot needs pip install "nf4tensor[plot]"') from None
    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    bottoms = dict.fromkeys(found, 0.0)
    for part in next(iter(found.values())).parts:
        heights = [e.parts[part] / 2**30 for e in found.values()]
        if any(heights):
            axes.bar(list(found), heights, bottom=list(bottoms.values()), label=part, width=0.5)
            bottoms = {n: b + h for (n, b), h in zip(bottoms.items(), heights, strict=True)}
    axes.axhline(options.gpu_memory / 2**30, color="black", linestyle="--", label="a GPU's memory")
    axes.set_ylabel("GiB on each GPU")
    axes.set_title(f"{options.model} on {options.gpus} GPUs")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
