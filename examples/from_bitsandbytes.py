"""Take over a model that bitsandbytes quantized, and give it back, byte for byte.

    python examples/from_bitsandbytes.py --model unsloth/Llama-3.2-1B-Instruct-bnb-4bit

No weight is quantized again, and bitsandbytes need not be installed. On many ranks, convert once
with `nf4tensor convert MODEL NEW --to nf4tensor`, and load NEW with `DistributedConfig`.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from nf4tensor import memory_footprint
from nf4tensor.integrations.convert import convert_files
from nf4tensor.integrations.transformers import NF4Config


def main(argv: list[str] | None = None) -> None:
    """Load, generate, save both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--out", default="runs/from-bitsandbytes")
    parser.add_argument("--prompt", default="The quick brown fox")
    options = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=NF4Config())
    print(f"{model.num_parameters():,} parameters in {memory_footprint(model) / 1e6:.1f} MB")
    tokens = tokenizer(options.prompt, return_tensors="pt")
    print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))

    model.save_pretrained(f"{options.out}/nf4tensor")  # trains, shards and loads anywhere
    tokenizer.save_pretrained(f"{options.out}/nf4tensor")
    convert_files(f"{options.out}/nf4tensor", f"{options.out}/bitsandbytes", "bitsandbytes")


if __name__ == "__main__":
    main()
