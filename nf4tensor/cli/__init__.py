"""The `nf4tensor` command: one file for each group of subcommands.

`env.py` says what is installed, `files.py` works on checkpoints, `plan.py` says what fits.
Each subcommand prints a table, or JSON with `--json`; the work is done by the rooms below. Called
by the script that `pip` installs and by `python -m nf4tensor`.
"""

import argparse
import sys
from collections.abc import Sequence

import nf4tensor
from nf4tensor.cli import env, files, plan
from nf4tensor.errors import NF4TensorError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 after an error of ours, 2 for misuse."""
    parser = argparse.ArgumentParser("nf4tensor", description="4-bit weights for PyTorch.")
    parser.add_argument("--version", action="version", version=nf4tensor.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    env.add(commands)
    files.add(commands)
    plan.add(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except NF4TensorError as error:
        print(f"nf4tensor: {error}", file=sys.stderr)
        return 1
    return 0
