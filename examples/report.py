"""What the fine-tuning example says and writes: lines on rank 0, `metrics.json` and `loss.png`.

Every number printed is one that was measured in the run and stands in `metrics.json` too. Nothing
here trains or decides anything.
"""

import json
import logging
import platform
import resource
import statistics
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

PACKAGES = ("nf4tensor", "torch", "transformers", "peft", "safetensors")


def quiet() -> None:
    """Silence other packages' progress bars and remarks; errors still come through."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"torch\.distributed|transformers|peft")
    for name in ("torch.distributed", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)


def say(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def print_sizes(run: dict) -> None:
    """Print what was built."""
    sizes, world = run["sizes"], dist.get_world_size()
    four, sixteen = sizes["base_bytes_per_rank"], sizes["base_bf16_bytes_per_rank"]
    share = sizes["trainable"] / (sizes["trainable"] + sizes["parameters"])
    run["trainable_share"] = share
    say(f"model      {run['options']['model']}: {sizes['parameters']:,} parameters, frozen")
    say(f"adapters   {sizes['trainable']:,} trainable parameters ({share:.2%})")
    say(f"base       {four / 1e6:.1f} MB per rank in 4 bits, {sixteen / 1e6:.1f} MB in bf16")
    say(f"ranks      {world}, computing in {run['dtype']}")


def peak_memory(device: torch.device) -> list[int]:
    """Return the peak bytes of every rank: allocated on the GPU, resident in a CPU process."""
    if device.type == "cuda":
        mine = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, mine)
    return peaks


def finish(run: dict, options, seconds: list[float], device: torch.device) -> None:
    """Print the results and write `metrics.json` and `loss.png`; every rank calls this."""
    peaks = peak_memory(device)
    if dist.get_rank():
        return
    out = Path(options.out)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    kind = "GPU memory allocated" if gpu else "resident memory (RSS)"
    median = statistics.median(seconds) if seconds else None
    speed = options.batch * options.seq_len / median if median else None
    run |= {
        "tokens_per_second": speed,
        "median_step_seconds": median,
        "peak_bytes_per_rank": peaks,
        "peak_kind": kind,
        "device": gpu or platform.machine(),
        "ranks": dist.get_world_size(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "python": platform.python_version(),
    }
    before, after = run["loss_before"], run["loss_after"]
    say(f"held-out   loss {before:.4f} before, {after:.4f} after {options.steps} steps")
    if speed:
        say(f"speed      {speed:,.0f} tokens per second (median step {median:.2f} s)")
    say(f"peak       {', '.join(f'{peak / 1e6:,.0f} MB' for peak in peaks)} per rank, {kind}")
    say(f"prompt     {options.prompt!r}")
    say(f"before     {run['sample_before']!r}")
    say(f"after      {run['sample_after']!r}")
    (out / "metrics.json").write_text(json.dumps(run, indent=1) + "\n")
    draw(run, out / "loss.png")
    say(f"written    {out}: adapter/, metrics.json, loss.png, checkpoints/")


def version_of(package: str) -> str | None:
    """Return an installed package's version, or None for one that runs from its source folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def draw(run: dict, path: Path) -> None:
    """Draw the training loss, and the held-out loss before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = run["train_losses"]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", label="training, each step")
    held_out = [run["loss_before"], run["loss_after"]]
    axes.plot([0, len(losses)], held_out, "o", color="tab:orange", label="held out", zorder=3)
    paper = {"boxstyle": "square,pad=0.1", "color": "white"}
    for x, y in zip((0, len(losses)), held_out, strict=True):
        axes.annotate(
            f"{y:.3f}", (x, y), (0, 9), textcoords="offset points", ha="center", bbox=paper
        )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_title(f"LoRA over a 4-bit base, {run['ranks']} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
