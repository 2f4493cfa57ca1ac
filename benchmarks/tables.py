"""Write the tables of README.md and docs/ from the results that were measured, or check them.

A page names a file of `results/` and a table of it, and holds the text between two comments:

    <!-- results: compile-avx2.json, goals -->
    <!-- end of results -->

Run it after a benchmark; `--check` only says which pages are not what their results say.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<file>\S+), (?P<title>.+?) -->\n)"
    r".*?"
    r"(?P<close><!-- end of results -->)",
    re.DOTALL,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(argv)
    stale = []
    for page in PAGES:
        text = page.read_text()
        expected = filled(text)
        if text != expected:
            stale.append(str(page.relative_to(ROOT)))
            if not options.check:
                page.write_text(expected)
    if options.check and stale:
        sys.exit(f"not what their results say: {', '.join(stale)}; run {Path(__file__).name}")


def filled(page: str) -> str:
    """Return a page with its tables as measured."""
    return BLOCK.sub(
        lambda found: f"{found['open']}{block(**found.groupdict())}{found['close']}", page
    )


def block(file: str, title: str, **_) -> str:
    """Return one table as text, under what it was measured with.

    Raises:
        KeyError: The results have no such table.
    """
    content = json.loads((harness.RESULTS / file).read_text())
    (rows,) = (rows for name, rows in content["tables"].items() if name.startswith(title))
    notes = [f"{mark} {text}" for mark, text in content.get("notes", {}).items()]
    source = f"{content['command']}, {content['processor']}, torch {content['torch']}"
    lines = ["```", f"{source}, commit {content['commit']}", *harness.table(rows), *notes, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
