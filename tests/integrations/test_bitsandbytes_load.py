"""`checkpoint.load` of a folder that bitsandbytes quantized: its codes and scales, on any ranks."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from nf4tensor import NF4Tensor, checkpoint
from nf4tensor.errors import NF4TensorError, UnsupportedError
from nf4tensor.integrations.bitsandbytes import from_state_dict
from nf4tensor.integrations.convert import convert_files
from tests.integrations.golden_entries import CASES, entries, text_entry
from tests.ranks import Ranks


def shape_of(case: str) -> tuple[int, ...]:
    return tuple(json.loads(CASES[case]["quant_state"])["shape"])


CASES_2D = [case for case in CASES if len(shape_of(case)) == 2]
NARROW = 8  # weights of a row: blocks of at least 16 cross it


def on_meta(shape: tuple[int, ...]) -> nn.Module:
    """Return a model with one layer, without memory."""
    rows, columns = shape
    with torch.device("meta"):
        return nn.ModuleDict({"layer": nn.Linear(columns, rows, bias=False)})


def save(case: str, folder: Path) -> Path:
    """Write the file of a golden weight."""
    file = folder / "model.safetensors"
    save_file(entries(case), file)
    return file


def load(case: str, path: Path, **options) -> torch.Tensor:
    """Return the weight of a model that was given the checkpoint's geometry and bytes."""
    model = on_meta(shape_of(case))
    checkpoint.prepare(model, path)
    checkpoint.load(model, path, progress=False, **options)
    return model["layer"].weight


@pytest.mark.parametrize("case", CASES_2D)
def test_records_are_those_of_the_state_dict(case, tmp_path):
    expected, layout = from_state_dict(entries(case), "layer.weight")
    found = load(case, save(case, tmp_path))
    assert isinstance(found, NF4Tensor)
    assert (found.spec, found.dtype) == (expected.spec, expected.dtype)
    assert torch.equal(found.record, expected.record)
    convert_files(tmp_path, tmp_path / "converted", "nf4tensor")
    assert torch.equal(load(case, tmp_path / "converted").record, expected.record)
    assert layout is not None


def narrow(case: str, folder: Path) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Write the file of a golden weight as if its rows were narrow; return entries and shape."""
    found = entries(case)
    (name,) = (name for name in found if ".quant_state." in name)
    description = json.loads(bytes(found[name].tolist()))
    rows, columns = description["shape"]
    description["shape"] = [rows * columns // NARROW, NARROW]
    found[name] = text_entry(json.dumps(description))
    save_file(found, folder / "model.safetensors")
    return found, tuple(description["shape"])


@pytest.mark.parametrize("case", [c for c in CASES_2D if math.prod(shape_of(c)) % NARROW == 0])
def test_what_rows_cannot_hold_is_refused_or_decoded(case, tmp_path):
    found, shape = narrow(case, tmp_path)
    with pytest.raises(NF4TensorError, match="requantize"):
        checkpoint.load(on_meta(shape), tmp_path, progress=False)
    with pytest.raises(UnsupportedError, match="requantize=True"):
        from_state_dict(found, "layer.weight")
    model = on_meta(shape)
    checkpoint.load(model, tmp_path, progress=False, requantize=True)
    exact, _ = from_state_dict(entries(case), "layer.weight")
    dense = model["layer"].weight
    assert torch.equal(dense.view(exact.shape), exact.dequantize().to(dense.dtype))


def case_of_ranks(rank, world_size, path, cases):
    """Load each case onto shards; return this rank's records."""
    found = {}
    for case in cases:
        model = on_meta(shape_of(case))
        checkpoint.prepare(model, Path(path) / case)
        fully_shard(model["layer"])
        checkpoint.load(model, Path(path) / case, progress=False)
        found[case] = model["layer"].weight.to_local().record.clone()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)
def test_ranks_load_their_own_rows(ranks: Ranks, tmp_path):
    for case in CASES_2D:
        (tmp_path / case).mkdir()
        save(case, tmp_path / case)
    found = ranks.run(case_of_ranks, str(tmp_path), CASES_2D)
    for case in CASES_2D:
        expected, _ = from_state_dict(entries(case), "layer.weight")
        assert torch.equal(torch.cat([each[case] for each in found]), expected.record), case
