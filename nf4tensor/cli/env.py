"""`nf4tensor env`: versions, and which kernels run where and why."""

import argparse
import json
import os
import platform
from typing import Any

import torch

import nf4tensor
from nf4tensor.format.spec import FORMAT_VERSION
from nf4tensor.kernels import native, schema, select

ENVIRONMENT = ("NF4TENSOR_BACKEND", "NF4TENSOR_ISA", "NF4TENSOR_STRICT")


def add(commands: Any) -> None:
    """Add the subcommand."""
    env = commands.add_parser("env", help="show versions, and which kernels run where and why")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=run)


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


def run(options: argparse.Namespace) -> None:
    """Print the table or the JSON."""
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
