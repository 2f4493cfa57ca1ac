"""A quantized model leaves Python: `torch.export`, its files, and AOTInductor."""

import io

import pytest
import torch
from torch import nn

from nf4tensor import NF4Tensor, quantize_
from tests.tensor.weights import assert_same, dense

# torch's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def model() -> nn.Module:
    """Two layers and an activation between."""
    torch.manual_seed(0)
    layers = nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)
    return quantize_(nn.Sequential(*layers), progress=False).eval()


def export(model: nn.Module, strict: bool = False) -> torch.export.ExportedProgram:
    """Export for any number of rows."""
    shapes = ({0: torch.export.Dim("rows")},)
    return torch.export.export(model, (dense(3, 256),), dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_and_loaded_programs_are_the_model(model, strict):
    program = export(model, strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    weights = {"0.weight", "2.weight"}
    for exported in (program, loaded):
        assert {n for n, w in exported.state_dict.items() if isinstance(w, NF4Tensor)} == weights
        for rows in (1, 3, 5):
            x = dense(rows, 256)
            assert_same(exported.module()(x), model(x))


def test_lowered_programs_hold_records(model):
    lowered = export(model).run_decompositions()
    uint8 = [t for t in lowered.state_dict.values() if t.dtype == torch.uint8]
    assert sorted(t.shape[0] for t in uint8) == [64, 128]
    for node in lowered.graph.nodes:
        value = node.meta.get("val")
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        assert not is_float or value.shape not in ((128, 256), (64, 128))


@pytest.mark.slow
def test_compiled_packages_run(model, tmp_path):
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(export(model), package_path=path)
    run = torch._inductor.aoti_load_package(path)
    for rows in (1, 3, 5):
        x = dense(rows, 256)
        assert_same(run(x), model(x))
