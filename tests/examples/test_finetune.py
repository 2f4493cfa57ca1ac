"""The fine-tuning example, run: what it writes, and that a killed run resumes exactly.

Runs use a model of two tiny layers with a byte tokenizer, made here. One run goes through the
script's own launcher; the others fork their ranks from a server process that has imported the
heavy packages once.
"""

import json
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "finetune.py")
PRELOADED = [
    "peft",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "matplotlib.pyplot",
    "nf4tensor",
]
SMALL = "--seq-len 32 --steps 6 --batch 4 --checkpoint-every 2 --lora-rank 4 --sample-tokens 4"


@pytest.fixture(scope="module")
def server():
    """A process that has imported the heavy packages and forks others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as the launcher gives two ranks on two cores
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        yield context


def run_forked(server, function, *args) -> None:
    """Run a top-level function of this file in a process of its own."""
    process = server.Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def start_ranks(server, world: int, log: Path, arguments: list[str]) -> list:
    """Start the script as torchrun would."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [
        server.Process(target=_rank, args=(rank, world, port, str(log), arguments))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _rank(rank: int, world: int, port: int, log: str, arguments: list[str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.argv = [SCRIPT, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(SCRIPT, run_name="__main__")


def join(ranks: list) -> list[int]:
    """Wait for ranks and return their exit codes."""
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def _make_model(folder: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer = Tokenizer(bytes_only)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def tiny_model(server, tmp_path_factory) -> Path:
    """A folder with a random Llama of two layers and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    run_forked(server, _make_model, str(folder))
    return folder


@pytest.fixture(scope="module")
def finished(server, tiny_model, tmp_path_factory) -> SimpleNamespace:
    """One uninterrupted run on two ranks, through the script's own launcher."""
    out = tmp_path_factory.mktemp("finished") / "run"
    command = [sys.executable, SCRIPT, "--model", str(tiny_model), "--out", str(out)]
    command += ["--device", "cpu", *SMALL.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    return SimpleNamespace(out=out, metrics=metrics, stdout=result.stdout, stderr=result.stderr)


@pytest.mark.hf
def test_run_prints_and_writes_what_it_measured(finished):
    metrics, out = finished.metrics, finished.out
    assert len(metrics["train_losses"]) == 6
    assert metrics["loss_after"] < metrics["loss_before"]
    assert metrics["ranks"] == 2
    assert len(metrics["peak_bytes_per_rank"]) == 2
    assert metrics["tokens_per_second"] > 0
    sizes = metrics["sizes"]
    assert 0 < sizes["base_bytes_per_rank"] < sizes["base_bf16_bytes_per_rank"]
    assert f"{sizes['parameters']:,} parameters" in finished.stdout
    assert f"{metrics['trainable_share']:.2%}" in finished.stdout
    for name in ("loss_before", "loss_after"):
        assert f"{metrics[name]:.4f}" in finished.stdout
    assert repr(metrics["sample_after"]) in finished.stdout
    assert finished.stdout.count("held-out") == 1, "only rank 0 prints"
    assert "Warning" not in finished.stderr
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    kept = sorted(folder.name for folder in (out / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000006"]


def _load_adapter(model: str, adapter: str, loss: float) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import corpus
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nf4tensor import quantize_

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    quantize_(base.bfloat16(), freeze_base=True, progress=False)
    tuned = PeftModel.from_pretrained(base.float(), adapter)
    tokenizer = AutoTokenizer.from_pretrained(model)
    _, held_out = corpus.load_chunks(corpus.DEFAULT, tokenizer, 32, 24, 8)
    with torch.no_grad():
        found = tuned(input_ids=held_out, labels=held_out).loss.item()
    assert abs(found - loss) < 1e-3, (found, loss)


@pytest.mark.hf
def test_peft_loads_the_adapter_onto_an_unsharded_model(server, tiny_model, finished):
    adapter = finished.out / "adapter"
    assert (adapter / "adapter_config.json").exists()
    loss = finished.metrics["loss_after"]
    run_forked(server, _load_adapter, str(tiny_model), str(adapter), loss)


@pytest.fixture(scope="module")
def killed(server, tiny_model, finished, tmp_path_factory) -> Path:
    """The folder of the same run, killed after its first checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    out = folder / "run"
    options = ["--model", str(tiny_model), "--out", str(out), "--device", "cpu", *SMALL.split()]
    ranks = start_ranks(server, 2, folder / "log", options)
    while not (out / "checkpoints" / "step-000002").exists():
        assert all(rank.is_alive() for rank in ranks), (folder / "log").read_text()
        time.sleep(0.005)
    for rank in ranks:
        rank.kill()
    join(ranks)
    assert not (out / "metrics.json").exists(), "it was to be killed before its end"
    return out


@pytest.mark.hf
def test_killed_run_resumes_with_the_losses_it_would_have_had(server, finished, killed, tmp_path):
    out = shutil.copytree(killed, tmp_path / "run")
    log = tmp_path / "log"
    ranks = start_ranks(server, 2, log, ["--resume", "--out", str(out), "--device", "cpu"])
    assert join(ranks) == [0, 0], log.read_text()
    metrics = json.loads((out / "metrics.json").read_text())
    for name in ("train_losses", "loss_before", "loss_after", "sample_before", "sample_after"):
        assert metrics[name] == finished.metrics[name], name


@pytest.mark.hf
def test_resume_on_another_number_of_ranks_offloaded(server, finished, killed, tmp_path):
    out = shutil.copytree(killed, tmp_path / "run")
    log = tmp_path / "log"
    options = ["--resume", "--out", str(out), "--device", "cpu", "--offload", "--recompute"]
    assert join(start_ranks(server, 1, log, options)) == [0], log.read_text()
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["train_losses"] == pytest.approx(finished.metrics["train_losses"], abs=1e-4)


@pytest.mark.hf
def test_error_that_all_ranks_meet_is_said_once(server, tiny_model, tmp_path):
    log = tmp_path / "log"
    options = ["--model", str(tiny_model), "--out", str(tmp_path / "run"), "--device", "cpu"]
    ranks = start_ranks(server, 2, log, [*options, "--lora-targets", "nonsense", *SMALL.split()])
    assert join(ranks) == [1, 1]
    assert log.read_text().count("--lora-targets nonsense: Target modules") == 1
