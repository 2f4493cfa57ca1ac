"""`nf4tensor plan`: what fits, what does not, and what would make it fit."""

import json

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra hf")
from nf4tensor.cli import main
from nf4tensor.cli.plan import size

pytestmark = pytest.mark.hf
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def planned(folder, capsys, *arguments: str) -> dict:
    """Return what the command prints as JSON."""
    command = ["plan", str(folder), "--seq-len", "64", "--json", *arguments]
    assert main(command) == 0
    return json.loads(capsys.readouterr().out)


def test_sizes_are_decimal_or_binary():
    sizes = {"24GiB": 24 * 2**30, "80GB": 80 * 10**9, "1.5KiB": 1536, "12": 12, "1TiB": 2**40}
    assert {text: size(text) for text in sizes} == sizes


def test_a_base_that_fits_is_replicated(folder, capsys):
    found = planned(folder, capsys, "--gpus", "2", "--gpu-memory", "24GiB")
    assert (found["policy"], found["fits"], found["ways_out"]) == ("replicate", True, [])
    shard, whole = (found["choices"][name]["parts"] for name in ("shard", "replicate"))
    assert 2 * shard["packed base"] == whole["packed base"]
    assert whole["gathered layers"] < shard["gathered layers"]
    for choice in found["choices"].values():
        assert choice["device"] == sum(choice["parts"].values())


def test_what_does_not_fit_says_what_would(folder, capsys):
    arguments = ["--gpu-memory", "1.05GB", "--batch-size", "16", "--no-checkpointing"]
    found = planned(folder, capsys, *arguments)
    assert not found["fits"]
    kinds = {way.split()[0] for way in found["ways_out"]}
    assert {"activation", "--batch-size"} <= kinds


def test_offloading_moves_shards_to_the_host(folder, capsys):
    here = planned(folder, capsys, "--gpus", "2", "--gpu-memory", "24GiB", "--policy", "shard")
    there = planned(
        folder, capsys, "--gpus", "2", "--gpu-memory", "24GiB", "--policy", "shard", "--offload"
    )
    shard = there["choices"]["shard"]
    assert shard["parts"]["packed base"] == shard["parts"]["optimizer"] == 0
    assert shard["host"] >= here["choices"]["shard"]["parts"]["packed base"]


def test_table_and_picture(folder, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    command = ["plan", str(folder), "--gpu-memory", "2GiB", "--seq-len", "64"]
    assert main([*command, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "packed base" in text
    assert "fits 2.15 GB (2.00 GiB)" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_configuration(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", str(tmp_path), "--gpu-memory", "24GiB"]) == 1
    assert "pass a config.json, a folder with one, or a hub id" in capsys.readouterr().err


def test_layers_that_do_not_exist(folder, capsys):
    assert main(["plan", str(folder), "--gpu-memory", "24GiB", "--targets", "qq_proj"]) == 1
    assert "qq_proj" in capsys.readouterr().err
