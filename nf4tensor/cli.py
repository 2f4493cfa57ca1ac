"""The `nf4tensor` command.

One function per subcommand, each printing a table, or JSON with `--json`; the work is done by the
rooms below. Called by the script that `pip` installs and by `python -m nf4tensor.cli`.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch

import nf4tensor
from nf4tensor.errors import NF4TensorError
from nf4tensor.format.spec import FORMAT_VERSION
from nf4tensor.kernels import native, schema, select

ENVIRONMENT = ("NF4TENSOR_BACKEND", "NF4TENSOR_ISA", "NF4TENSOR_STRICT")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 after an error of ours."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except NF4TensorError as error:
        print(f"nf4tensor: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nf4tensor", description="4-bit weights for PyTorch.")
    parser.add_argument("--version", action="version", version=nf4tensor.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="show versions, and which kernels run where and why")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=_env)
    return parser


def environment() -> dict[str, Any]:
    """Return what `nf4tensor env` shows: versions, the compiled library, and each op's backend."""
    if torch.cuda.is_available():
        torch.cuda.init()  # so that the table knows the devices
    return {
        "nf4tensor": nf4tensor.__version__,
        "format version": FORMAT_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "accelerator": _accelerator(),
        "threads": torch.get_num_threads(),
        "compiled library": native.unavailable_because() or "loaded",
        **{name: os.environ.get(name, "not set") for name in ENVIRONMENT},
        "kernels": [vars(choice) for choice in select.table()],
    }


def _accelerator() -> str:
    if not torch.accelerator.is_available():
        return "none"
    device = torch.accelerator.current_accelerator()
    return f"{torch.accelerator.device_count()} x {device.type}"


def _env(options: argparse.Namespace) -> None:
    found = environment()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    kernels = found.pop("kernels")
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}")
    ops: dict[tuple[str, str, str], list[str]] = {}
    for row in kernels:
        ops.setdefault((row["device"], row["backend"], row["reason"]), []).append(row["op"])
    print(f"\n{'device':<7} {'backend':<10} ops and why")
    for (device, backend, reason), names in ops.items():
        listed = "all ops" if len(names) == len(schema.SCHEMAS) else ", ".join(names)
        print(f"{device:<7} {backend:<10} {listed}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
