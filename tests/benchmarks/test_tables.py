"""The tables of the documentation are those of committed results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pages_are_what_their_results_say():
    command = [sys.executable, str(ROOT / "benchmarks/tables.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr


def test_every_page_with_a_table_of_results_names_its_file():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [line for page in pages for line in page.read_text().splitlines() if "results:" in line]
    assert len(named) >= 2
