"""Fine-tune a language model over a frozen 4-bit base: a plain PyTorch loop.

    python examples/finetune.py [--help]

The base weights become NF4 tensors, PEFT adds LoRA adapters, and PyTorch's own `fully_shard` shards
both: no wrapper, no trainer. Read `train` first. The neighbours hold what is not training:
`options.py` (command line, checks), `ranks.py` (one process a rank, started by this file or by
torchrun), `corpus.py` (text to tokens), `snapshots.py` (checkpoints), `report.py` (metrics,
picture) and `smollm2.py` (the default model).
"""

import math
import os
import sys
import time
from pathlib import Path

try:
    import corpus
    import options as command_line
    import ranks
    import report
    import snapshots
    import torch
    import torch.distributed as dist
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    raise SystemExit(f'no {missing.name}: pip install "nf4tensor[hf,plot]"') from None


def train(options, device: torch.device) -> None:
    """Run the whole job on this rank."""
    from transformers import AutoTokenizer

    folder = command_line.model_folder(options.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chunks, held_out = corpus.load_chunks(
        options.data, tokenizer, options.seq_len, options.steps * options.batch, options.eval_chunks
    )
    chunks, held_out = chunks.to(device), held_out.to(device)
    checkpoints = Path(options.out) / "checkpoints"
    resumed = snapshots.newest(checkpoints) if options.resume else None
    run = snapshots.read_run(resumed) if resumed else {"train_losses": []}
    run["options"] = vars(options)
    run["dtype"] = run.get("dtype") or ranks.quickest_dtype(device)

    model = build_model(options, folder, device, getattr(torch, run["dtype"]))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=options.lr, weight_decay=0.0, foreach=True)
    run["sizes"] = measure(model, device)
    report.print_sizes(run)
    if resumed:
        snapshots.load(resumed, model, optimizer)
    else:
        snapshots.clear(checkpoints)
        run["loss_before"] = evaluate(model, held_out, options.batch)
        run["sample_before"] = generate(model, tokenizer, options, device)

    seconds = fit(model, optimizer, chunks, run, options)

    run["loss_after"] = evaluate(model, held_out, options.batch)
    run["sample_after"] = generate(model, tokenizer, options, device)
    save_adapter(model, Path(options.out) / "adapter")
    report.finish(run, options, seconds, device)


def fit(model, optimizer, chunks: torch.Tensor, run: dict, options) -> list[float]:
    """Take the steps that are left, with a checkpoint every so many; return their seconds.

    Args:
        model: the sharded model.
        optimizer: over its trainable parameters.
        chunks: int64 `[chunks, seq_len]`, the training text.
        run: its `train_losses` tells how many steps are done, and grows.
        options: the command line.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    seconds = []
    model.train()
    done = len(run["train_losses"])
    progress = tqdm(total=options.steps, initial=done, desc="training", disable=rank != 0)
    for step in range(done, options.steps):
        start = time.perf_counter()
        torch.manual_seed((options.seed * options.steps + step) * world + rank)  # for dropout
        optimizer.param_groups[0]["lr"] = options.lr * schedule(step, options.steps)
        rows = corpus.batch_rows(len(chunks), options.batch, step, options.seed)
        mine = chunks[rows[rank::world]]

        loss = take_step(model, optimizer, mine)
        run["train_losses"].append(ranks.mean(loss))
        seconds.append(time.perf_counter() - start)
        progress.set_postfix(loss=f"{run['train_losses'][-1]:.3f}", refresh=False)
        progress.update()
        if (step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps:
            folder = Path(options.out) / "checkpoints"
            snapshots.save(folder, step + 1, model, optimizer, run)
        ranks.stop_without_launcher()
    progress.close()
    return seconds


def take_step(model, optimizer, rows: torch.Tensor) -> torch.Tensor:
    """Take one step on int64 rows of tokens and return the loss before it."""
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def build_model(options, folder: Path, device: torch.device, dtype: torch.dtype):
    """Load, quantize, add adapters, shard.

    Every rank reads the whole model into CPU memory before it keeps its share. That is the simple
    way, good for a model that fits there once a rank.

    Returns:
        The PEFT model around the sharded one.
    """
    from transformers import AutoModelForCausalLM

    from nf4tensor import quantize_

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_(model, skip=("lm_head",), freeze_base=True, progress=dist.get_rank() == 0)
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    peft_model = add_adapters(model, options)
    shard(model, options, device, dtype)
    return peft_model


def add_adapters(model, options):
    """Return the PEFT model around a frozen one; its adapters are float32."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(options.seed)  # the same adapters on every rank, and after a resume
    targets = options.lora_targets
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.dropout,
        target_modules=targets if targets == "all-linear" else targets.split(","),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise SystemExit(f"--lora-targets {targets}: {error}") from None


def shard(model, options, device: torch.device, dtype: torch.dtype) -> None:
    """Shard each decoder layer, then the rest, with plain `fully_shard`.

    The adapters stay in float32, gathered copies are in `dtype`; 4-bit weights travel as their
    bytes and are decoded to `dtype` where they are used.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    sharding = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    if options.offload:
        sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, **sharding)
    fully_shard(model, **sharding)


def measure(model, device: torch.device) -> dict:
    """Count parameters, and the base's bytes on the fullest rank: as they are, and if all bf16."""
    from nf4tensor import memory_footprint

    frozen = [p for p in model.parameters() if not p.requires_grad]
    adapters = [p for p in model.parameters() if p.requires_grad]
    adapter_bytes = sum(p.to_local().nbytes for p in adapters)
    bf16_bytes = sum(2 * p.to_local().numel() for p in frozen)
    fullest = torch.tensor([memory_footprint(model) - adapter_bytes, bf16_bytes], device=device)
    dist.all_reduce(fullest, dist.ReduceOp.MAX)
    return {
        "parameters": sum(p.numel() for p in frozen),
        "trainable": sum(p.numel() for p in adapters),
        "base_bytes_per_rank": int(fullest[0]),
        "base_bf16_bytes_per_rank": int(fullest[1]),
    }


def schedule(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: a short linear warm-up, then a cosine."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


@torch.no_grad()
def evaluate(model, held_out: torch.Tensor, batch: int) -> float:
    """Return the mean loss over the held-out chunks, shared among the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    total = torch.zeros(2, device=held_out.device)
    starts = range(0, len(held_out), batch)
    for start in tqdm(starts, "held-out loss", leave=False, disable=rank != 0):
        rows = held_out[start : start + batch][rank::world]
        weight = len(rows)
        # A rank without rows still runs forward: gathering the weights takes every rank.
        rows = rows if weight else held_out[:1]
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        total[0] += loss.float() * weight
        total[1] += weight
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def generate(model, tokenizer, options, device: torch.device) -> str:
    """Continue the prompt greedily; all ranks together, since gathering the weights takes all."""
    if options.sample_tokens < 1:
        return ""
    model.eval()
    inputs = tokenizer(options.prompt, return_tensors="pt")["input_ids"].to(device)
    tokens = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=options.sample_tokens,
        do_sample=False,
        synced_gpus=dist.get_world_size() > 1,  # no rank stops before the others
    )
    return tokenizer.decode(tokens[0, inputs.shape[1] :], skip_special_tokens=True)


def save_adapter(model, folder: Path) -> None:
    """Gather the adapter and write it in PEFT's format, for `PeftModel.from_pretrained`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    gather = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights = get_model_state_dict(model, options=gather)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)


def main() -> None:
    """Check everything and start the ranks; in a rank, train."""
    options = command_line.parse()
    command_line.check(options)
    if "RANK" not in os.environ:
        command_line.fetch(options)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all is here now
        ranks.launch(__file__, sys.argv[1:], options.ranks)
        return
    with ranks.session(options.device, lambda: command_line.fetch(options)) as device:
        report.quiet()
        train(options, device)


if __name__ == "__main__":
    main()
