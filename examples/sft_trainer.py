"""Fine-tune with TRL's SFTTrainer over a 4-bit base, on one process or many.

    python examples/sft_trainer.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    torchrun --nproc-per-node 2 examples/sft_trainer.py --model ...
    accelerate launch --config_file accelerate_fsdp2.yaml sft_trainer.py --model ...

Under torchrun Transformers shards while it loads, and each rank reads only its rows. Under
Accelerate's FSDP2, which is for GPUs, Accelerate shards what the first rank loaded.
"""

import argparse
import os

import corpus
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

import nf4tensor.integrations.accelerate  # noqa: F401  (sends 4-bit weights as they are)
from nf4tensor.integrations.transformers import NF4Config


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--data", default=corpus.DEFAULT, help="a text or .jsonl file")
    parser.add_argument("--out", default="runs/sft")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each process")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--packing", action="store_true", help="fill sequences with many documents")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Load, train, save the adapter."""
    options = parse(argv)
    on_gpu = torch.cuda.is_available()
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    by_accelerate = os.environ.get("ACCELERATE_USE_FSDP", "") == "true"
    loading = {"quantization_config": NF4Config(), "dtype": torch.bfloat16 if on_gpu else None}
    if num_ranks > 1 and not by_accelerate:
        if not dist.is_initialized():
            dist.init_process_group()
        loading["distributed_config"] = DistributedConfig(fsdp_size=num_ranks)
    model = AutoModelForCausalLM.from_pretrained(options.model, **loading)
    texts = [{"text": document["text"]} for document in corpus.read_documents(options.data)]
    arguments = SFTConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        max_length=options.seq_len,
        packing=options.packing,
        learning_rate=1e-3,
        logging_steps=1,
        # Transformers cannot resume what was sharded while it was loaded.
        save_strategy="no" if "distributed_config" in loading else "steps",
        use_cpu=not on_gpu,
        bf16=on_gpu,
        dataloader_pin_memory=on_gpu,
        report_to=[],
    )
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(texts),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=options.lora_rank, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
