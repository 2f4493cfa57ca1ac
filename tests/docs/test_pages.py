"""The documentation: it builds without warnings, its links lead somewhere, and its Python runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]+)")
# Pages whose blocks have a test of their own, which knows what must come of them.
ELSEWHERE = {
    "files.md": "tests/checkpoint/test_reader.py",
    "huggingface.md": "tests/integrations/test_huggingface_docs.py",
}
SETUP = {
    "README.md": "import torch\n",
    "troubleshooting.md": """
import torch
from nf4tensor import quantize_
model = quantize_(torch.nn.Sequential(torch.nn.Linear(256, 256)), progress=False)
model.append(torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model[1].parameters())
""",
}
RANKS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29631"}


def tiny_llama(folder: Path) -> str:
    """Write a small model and return where it is."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=str)
def test_blocks_run(page, tmp_path):
    if page.name in ELSEWHERE:
        assert page.name in (ROOT / ELSEWHERE[page.name]).read_text()
        return
    code = SETUP.get(page.name, "") + "\n".join(BLOCK.findall(page.read_text()))
    if "HuggingFaceTB/" in code:
        pytest.importorskip("peft", reason="needs the extra hf")
        model = json.dumps(tiny_llama(tmp_path / "model"))
        code = re.sub(r'"HuggingFaceTB/[^"]*"', lambda _: model, code)
    (tmp_path / "page.py").write_text(code)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "page.py"],
        cwd=tmp_path,
        env=os.environ | RANKS | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_pages_build_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="needs Python 3.11")
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-q", "-W", "--keep-going"]
    result = subprocess.run(
        [*command, "-b", "html", str(DOCS), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
