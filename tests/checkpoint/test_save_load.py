"""Models go into files and come back: the same bytes, on any number of ranks."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nf4tensor import NF4Tensor, checkpoint, quantize_, to_nf4
from nf4tensor.errors import CheckpointError
from tests.fsdp.training import Model, is_base, make_model, shard
from tests.ranks import Ranks

EVEN = {"hidden": (192, 192), "block_size": 16}
up_to_four = pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what this rank holds of every tensor of the state, 4-bit ones as their records."""
    local = {n: getattr(t, "_local_tensor", t) for n, t in model.state_dict().items()}
    return {n: t.record if isinstance(t, NF4Tensor) else t for n, t in local.items()}


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    found = stored(model)
    assert found.keys() == stored(expected).keys()
    for name, tensor in stored(expected).items():
        assert torch.equal(found[name], tensor), name


def on_meta(**options) -> Model:
    with torch.device("meta"):
        return make_model(**options)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Everything(nn.Module):
    """Experts, tied weights, a row, buffers of odd dtypes, scalars and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.experts = nn.Parameter(to_nf4(torch.randn(3, 5, 96)), requires_grad=False)
        self.dense_experts = nn.Parameter(torch.randn(2, 3, 4, 5).bfloat16())
        self.row = nn.Parameter(to_nf4(torch.randn(65)), requires_grad=False)
        self.fp4 = nn.Parameter(
            to_nf4(torch.randn(7, 130).half(), 32, None, quant_type="fp4"), requires_grad=False
        )
        self.first = nn.Linear(64, 32)
        self.second = nn.Linear(64, 32, bias=False)
        quantize_(self.first, filter_fn=lambda module, name: True, progress=False)
        self.second.weight = self.first.weight
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0, 4, dtype=torch.float64))
        self.register_buffer("passing", torch.ones(3), persistent=False)


@pytest.mark.parametrize("max_file_bytes", [10**9, 2000, 1])
def test_every_kind_of_tensor_comes_back(tmp_path: Path, max_file_bytes):
    model = Everything()
    checkpoint.save(model, tmp_path / "m", max_file_bytes=max_file_bytes, progress=False)
    loaded = Everything()
    for tensor in stored(loaded).values():
        tensor.data.zero_()
    assert checkpoint.load(loaded, tmp_path / "m", progress=False) == checkpoint.LoadResult((), ())
    assert_equal(loaded, model)
    assert loaded.second.weight is loaded.first.weight


def test_files_are_read_by_the_library(tmp_path: Path):
    model = make_model()
    checkpoint.save(model, tmp_path / "m", progress=False)
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    for name, tensor in stored(model).items():
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as opened:
        described = json.loads(opened.metadata()["nf4tensor"])
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["quantization_config"]["weights"] == described["weights"]
    assert len(described["weights"]) == 7


def test_a_model_on_meta_is_filled(tmp_path: Path):
    checkpoint.save(make_model(), tmp_path / "m", progress=False)
    model = on_meta()
    checkpoint.load(model, tmp_path / "m", progress=False)
    assert_equal(model, make_model())
    assert torch.equal(model(torch.ones(2, 96)), make_model()(torch.ones(2, 96)))


def dense_files(folder: Path) -> Path:
    """Write a dense checkpoint as others do, in two files with an index."""
    torch.manual_seed(1)
    state = Model().state_dict()
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    places = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def loaded_and_saved(rank, world_size, folder):
    """Load what is dense and what is 4-bit onto shards, and save again."""
    folder = Path(folder)
    expected = shard(make_model())
    for source in ("dense", "packed"):
        model = shard(on_meta())
        checkpoint.load(model, folder / source, progress=False)
        assert_equal(model, expected)
        inputs = torch.ones(2, 96)
        assert torch.equal(model(inputs), expected(inputs))
        checkpoint.save(model, folder / f"{source}-by-{world_size}", progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense and a 4-bit checkpoint of the same model."""
    made = tmp_path_factory.mktemp("checkpoints")
    (made / "dense").mkdir()
    dense_files(made / "dense")
    checkpoint.save(make_model(), made / "packed", progress=False)
    return made


@up_to_four
def test_ranks_load_their_rows_and_save_the_same_files(ranks: Ranks, folder: Path):
    ranks.run(loaded_and_saved, str(folder))
    expected = files_of(folder / "packed")
    for source in ("dense", "packed"):  # quantized while it was loaded, and not
        assert files_of(folder / f"{source}-by-{ranks.world_size}") == expected


def parallel(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,))
    data = mesh
    if world_size == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        data, mesh = both["data"], both["tensor"]

    def cut(model):
        for block in model.blocks:
            plan = {"up.base": ColwiseParallel(), "down.base": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
        return shard(model, mesh=data) if world_size == 4 else model

    model = cut(on_meta(**EVEN))
    checkpoint.load(model, folder, progress=False)
    assert_equal(model, cut(make_model(**EVEN)))
    checkpoint.save(model, Path(folder).with_name("again"), progress=False)


@up_to_four
@pytest.mark.parametrize("is_dense", [False, True])
def test_columns_are_cut_from_whole_rows(ranks: Ranks, tmp_path: Path, is_dense):
    model = make_model(**EVEN)
    checkpoint.save(model, tmp_path / "packed", progress=False)
    if is_dense:
        torch.manual_seed(1)
        dense = Model(hidden=EVEN["hidden"])
        checkpoint.save(dense, tmp_path / "dense", progress=False)
    ranks.run(parallel, str(tmp_path / ("dense" if is_dense else "packed")))
    assert files_of(tmp_path / "again") == files_of(tmp_path / "packed")


def failing(rank, world_size, folder):
    """One rank finds NaN in its rows, or no file at all: every rank says so."""
    model = shard(make_model())
    with pytest.raises(CheckpointError, match=r"rank 1: .*blocks.0.up.base.weight in .*NaN"):
        checkpoint.load(model, Path(folder) / "nan", progress=False)
    path = Path(folder) / ("missing" if rank == 1 else "good")
    with pytest.raises(CheckpointError, match=r"rank 1: .*missing is no checkpoint"):
        checkpoint.load(model, path, progress=False)
    with pytest.raises(CheckpointError, match=r"rank 0: .*exists: pass overwrite=True"):
        checkpoint.save(model, Path(folder) / "good", progress=False)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_what_fails_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path):
    checkpoint.save(make_model(), tmp_path / "good", progress=False)
    torch.manual_seed(1)
    dense = Model()
    dense.blocks[0].up.base.weight.data[66 // 2 + 5] = torch.nan
    checkpoint.save(dense, tmp_path / "nan", progress=False)
    ranks.run(failing, str(tmp_path))


def test_names_without_a_counterpart(tmp_path: Path):
    model = make_model()
    base = nn.Sequential(model.blocks[0].up.base)
    checkpoint.save(base, tmp_path / "m", progress=False)
    wrapped = nn.Module()
    wrapped.base_model = nn.Module()
    wrapped.base_model.model = nn.Sequential(nn.Module())
    wrapped.base_model.model[0].base_layer = on_meta().blocks[0].up.base
    wrapped.base_model.model[0].lora_a = nn.Linear(3, 4, bias=False)
    with pytest.raises(CheckpointError, match=r"lora_a.weight, which .* lacks; pass strict=False"):
        checkpoint.load(wrapped, tmp_path / "m", progress=False)
    result = checkpoint.load(wrapped, tmp_path / "m", strict=False, progress=False)
    assert result.missing == ("base_model.model.0.lora_a.weight",)
    assert_equal(wrapped.base_model.model[0].base_layer, base[0])


def test_an_interrupted_save_keeps_what_was_there(tmp_path: Path, monkeypatch):
    folder = tmp_path / "m"
    checkpoint.save(make_model(), folder, progress=False)
    (folder / "tokenizer.json").write_text("{}")
    before = files_of(folder)
    with pytest.raises(CheckpointError, match="exists: pass overwrite=True"):
        checkpoint.save(make_model(), folder, progress=False)
    for failing_call in range(3):
        calls = []

        def fsync(descriptor, calls=calls, failing_call=failing_call):
            calls.append(descriptor)
            if len(calls) > failing_call:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(
                make_model(hidden=(4,)), folder, overwrite=True, max_file_bytes=1, progress=False
            )
        monkeypatch.undo()
        assert files_of(folder) == before
        assert [path.name for path in tmp_path.iterdir()] == ["m"]
    checkpoint.save(make_model(hidden=(4,)), folder, overwrite=True, progress=False)
    assert (folder / "tokenizer.json").exists()
    checkpoint.load(make_model(hidden=(4,)), folder, progress=False)


def test_other_folders_are_not_overwritten(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("...")
    with pytest.raises(CheckpointError, match="holds other things"):
        checkpoint.save(make_model(), tmp_path, overwrite=True, progress=False)
    assert (tmp_path / "thesis.txt").exists()


def test_specs_must_be_equal(tmp_path: Path):
    checkpoint.save(make_model(), tmp_path / "m", progress=False)
    with pytest.raises(CheckpointError, match=r"block_size=64.*block_size=32"):
        checkpoint.load(make_model(block_size=32), tmp_path / "m", progress=False)
    dense = make_model(quantize=False)
    checkpoint.load(dense, tmp_path / "m", progress=False)
    assert_equal(dense, make_model(quantize=False))
    assert is_base(dense.head.base, "head.base")
