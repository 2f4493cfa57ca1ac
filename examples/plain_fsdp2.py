"""LoRA over a 4-bit base with plain PyTorch: quantize, add adapters, `fully_shard`, train.

    torchrun --nproc-per-node 2 examples/plain_fsdp2.py --model HuggingFaceTB/SmolLM2-135M-Instruct

`finetune.py` adds what a real run needs: evaluation, checkpoints, resuming.
"""

import argparse

import corpus
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from nf4tensor import doctor, quantize_


def main(argv: list[str] | None = None) -> None:
    """Train for some steps and say how the loss went."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--data", default=corpus.DEFAULT, help="a text or .jsonl file")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank")
    parser.add_argument("--seq-len", type=int, default=128)
    options = parser.parse_args(argv)

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # CPUs may emulate bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    quantize_(model, progress=rank == 0)
    torch.manual_seed(0)  # the same adapters on every rank
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).to(device)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    if rank == 0:
        print(doctor(model, optimizer=optimizer))

    num_chunks = options.steps * options.batch * num_ranks
    chunks, _ = corpus.load_chunks(options.data, tokenizer, options.seq_len, num_chunks, 1)
    for step, batch in enumerate(chunks.split(options.batch * num_ranks)):
        tokens = batch.chunk(num_ranks)[rank].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item() / num_ranks:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
