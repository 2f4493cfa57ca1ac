"""The page of the file format is enough: its reader, in numpy alone, decodes what is saved."""

import re
from pathlib import Path

import torch
from torch import nn

from nf4tensor import checkpoint, to_nf4

PAGE = Path(__file__).parents[2] / "docs" / "files.md"
LONGEST = 40  # lines of code; the table of levels aside


def test_the_reader_of_the_page_decodes_bit_for_bit(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for line in code.partition("def read")[2].splitlines() if line.strip()]
    assert len(lines) <= LONGEST
    assert "torch" not in code
    reader: dict = {}
    exec(code, reader)
    model = nn.Module()
    for i, (shape, block_size, scale_block_size) in enumerate(
        (((4, 65), 64, 256), ((3, 5, 1000), 16, 3), ((7, 130), 32, None), ((33,), 16, 256))
    ):
        torch.manual_seed(i)
        weight = to_nf4(torch.randn(shape), block_size, scale_block_size)
        model.register_parameter(f"w{i}", nn.Parameter(weight, requires_grad=False))
    checkpoint.save(model, tmp_path / "m", progress=False)
    found = reader["read"](tmp_path / "m" / "model.safetensors")
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(torch.from_numpy(found[name]), parameter.dequantize()), name
