"""Options of the fine-tuning example and the checks made before any process is started.

`parse` reads the command line (and, with --resume, the options of the run that is continued),
`check` refuses what cannot work, `model_folder` turns --model into a local folder. Every refusal is
a SystemExit that says what to do. Nothing here trains.
"""

import argparse
import importlib.util
import math
import os
from pathlib import Path

import corpus
import smollm2
import snapshots
import torch

PACKAGES = ("nf4tensor", "transformers", "peft", "safetensors", "tqdm", "matplotlib")
MAY_CHANGE = "out resume fresh ranks device offload recompute checkpoint_every".split()
PROMPT = 'The "for" statement\n*******************\n\nThe "for" statement is'


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, with the defaults of `make finetune`."""
    parser = argparse.ArgumentParser(
        prog="finetune.py",
        description="Fine-tune LoRA adapters on a frozen 4-bit model under plain fully_shard.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="a model folder, a hub id, or smollm2")
    add("--data", default=corpus.DEFAULT, help="a text or .jsonl file, a dataset, or the default")
    add("--out", default="runs/finetune", help="for the adapter, metrics, picture, checkpoints")
    add("--ranks", type=int, help="processes; unset: one a GPU, 2 on a CPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--steps", type=int, default=10, help="optimizer steps")
    add("--batch", type=int, default=4, help="sequences a step, over all ranks")
    add("--seq-len", type=int, default=128, help="tokens in a sequence")
    add("--lora-rank", type=int, default=8, help="rank of the adapters")
    add("--lora-alpha", type=int, default=16, help="scale of the adapters, times the rank")
    add("--lora-targets", default="all-linear", help="all-linear, or names: q_proj,v_proj")
    add("--dropout", type=float, default=0.0, help="dropout before the adapters")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="of the adapters, the order and dropout")
    add("--eval-chunks", type=int, default=8, help="held-out sequences an evaluation")
    add("--prompt", default=PROMPT, help="start of the generated sample")
    add("--sample-tokens", type=int, default=20, help="length of the generated sample")
    add("--checkpoint-every", type=int, default=5, help="steps between two checkpoints")
    add("--recompute", action="store_true", help="recompute activations: slower, less memory")
    add("--offload", action="store_true", help="keep sharded weights in CPU memory")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--fresh", action="store_true", help="start again though --out has an unfinished run")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; with --resume, what is not given comes from the resumed run.

    Raises:
        SystemExit: an option is unknown, there is nothing to resume, or a given option would
            change the resumed run.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if not options.resume:
        return options
    checkpoint = snapshots.newest(Path(options.out) / "checkpoints")
    if checkpoint is None:
        raise SystemExit(
            f"--resume: no checkpoint in {options.out}/checkpoints. Start without --resume, or "
            "give the --out of the run to continue."
        )
    saved = snapshots.read_run(checkpoint)["options"]
    kept = {name: value for name, value in saved.items() if name not in MAY_CHANGE}
    parser.set_defaults(**kept)
    options = parser.parse_args(argv)
    for name, value in kept.items():
        if getattr(options, name) != value:
            given = f"--{name.replace('_', '-')}"
            raise SystemExit(
                f"--resume: this run was started with {given} {value}, not "
                f"{getattr(options, name)}. Leave {given} out, or use another --out."
            )
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot work, and fill in the device and the number of ranks.

    Raises:
        SystemExit: with the reason and the way out.
    """
    check_packages()
    for name in ("steps", "batch", "seq_len", "lora_rank", "eval_chunks", "checkpoint_every"):
        value = getattr(options, name)
        if value < 1:
            raise SystemExit(f"--{name.replace('_', '-')} is {value}, must be at least 1")
    if not 0 <= options.dropout < 1 or options.sample_tokens < 0:
        raise SystemExit(
            f"--dropout is {options.dropout}, must be from 0 to below 1; --sample-tokens is "
            f"{options.sample_tokens}, must be at least 0"
        )
    if not 0 < options.lr < math.inf:
        raise SystemExit(f"--lr is {options.lr}, must be a positive number")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if "RANK" in os.environ:  # started by torchrun, which has the say, perhaps over several nodes
        options.ranks = int(os.environ["WORLD_SIZE"])
        num_gpus *= options.ranks // int(os.environ["LOCAL_WORLD_SIZE"])
    check_ranks(options, num_gpus)
    check_unfinished(options)


def check_packages() -> None:
    """Refuse to start without a package that is needed later."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f'missing packages: {", ".join(missing)}. Install: pip install "nf4tensor[hf,plot]"'
        )


def check_ranks(options: argparse.Namespace, num_gpus: int) -> None:
    """Fill in device and ranks; refuse more ranks than GPUs and a batch that they cannot share."""
    if options.device == "cuda" and not num_gpus:
        raise SystemExit("--device cuda: torch sees no GPU here. Use --device cpu.")
    if options.device == "auto":
        options.device = "cuda" if num_gpus else "cpu"
    if options.ranks is None:
        options.ranks = num_gpus if options.device == "cuda" else 2
        while options.batch % options.ranks:
            options.ranks -= 1
    if options.ranks < 1:
        raise SystemExit(f"--ranks is {options.ranks}, must be at least 1")
    if options.device == "cuda" and options.ranks > num_gpus:
        raise SystemExit(
            f"--ranks {options.ranks} needs {options.ranks} GPUs, one a process; torch sees "
            f"{num_gpus}. Use --ranks {num_gpus}, or --device cpu."
        )
    if options.batch % options.ranks:
        share = -(-options.batch // options.ranks) * options.ranks
        raise SystemExit(
            f"--batch {options.batch} cannot be shared equally by {options.ranks} ranks. "
            f"Use --batch {share}, or another --ranks."
        )


def check_unfinished(options: argparse.Namespace) -> None:
    """Refuse to start over a run that was interrupted, unless told to."""
    checkpoint = snapshots.newest(Path(options.out) / "checkpoints")
    if checkpoint is None or options.resume or options.fresh:
        return
    run = snapshots.read_run(checkpoint)
    done, steps = len(run["train_losses"]), run["options"]["steps"]
    if done < steps:
        raise SystemExit(
            f"{options.out} has a run that ended at step {done} of {steps}. Continue it with "
            "--resume, start again with --fresh, or give another --out."
        )


def fetch(options: argparse.Namespace) -> None:
    """Get text and model here, or refuse: what is missing is said once, before the long work."""
    corpus.read_documents(options.data)
    model_folder(options.model)


def model_folder(model: str) -> Path:
    """Return the local folder of a model, downloading it where it is the default or a hub id.

    Raises:
        SystemExit: the folder lacks a file, or the download failed.
    """
    if model == "smollm2":
        return smollm2.fetch()
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise SystemExit(
                f"--model {model}: no such folder, and a hub id has the form owner/name. "
                "Leave --model out for the default, SmolLM2-135M-Instruct."
            )
        folder = download(model)
    for pattern in ("config.json", "*.safetensors", "tokenizer*"):
        if not any(folder.glob(pattern)):
            raise SystemExit(
                f"--model {model}: no {pattern} in {folder}. Give a folder written by "
                "save_pretrained (model and tokenizer), with safetensors weights."
            )
    return folder


def download(model: str) -> Path:
    """Return the hub's snapshot of a model; without a network, the cached one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if os.environ.get("RANK"):
        disable_progress_bars()
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except Exception as error:  # the library raises requests', its own and OSError classes here
        raise SystemExit(
            f"--model {model}: no such folder, and the hub did not give it "
            f"({type(error).__name__}). Check the name, the network and, for a gated model, your "
            "login; or give a local folder."
        ) from None
