"""`nf4tensor quantize`, `inspect`, `merge` and `convert`: checkpoints in, checkpoints out.

What is read may be on the Hugging Face hub (`checkpoint/locate.py`).
"""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from nf4tensor.checkpoint.entries import Entry
from nf4tensor.checkpoint.files import Checkpoint
from nf4tensor.checkpoint.locate import located
from nf4tensor.checkpoint.transform import (
    SKIP,
    Change,
    merge_files,
    quantize_files,
    read,
    relative_error,
)
from nf4tensor.checkpoint.write import WriteOptions
from nf4tensor.errors import CheckpointError
from nf4tensor.format.spec import QUANT_TYPES
from nf4tensor.integrations.convert import TARGETS, convert_files

BAR_WIDTH = 30
_QUANTIZE = """example:
  nf4tensor quantize HuggingFaceTB/SmolLM2-135M-Instruct smollm2-nf4
  nf4tensor quantize ./dense ./packed --block-size 32 --dry-run"""
_INSPECT = """example:
  nf4tensor inspect smollm2-nf4
  nf4tensor inspect smollm2-nf4 --source HuggingFaceTB/SmolLM2-135M-Instruct"""
_CONVERT = """example:
  nf4tensor convert unsloth/Llama-3.2-1B-bnb-4bit llama-nf4 --to nf4tensor
  nf4tensor convert smollm2-nf4 smollm2-bnb --to bitsandbytes"""
_MERGE = """example:
  nf4tensor merge smollm2-nf4 runs/finetune/adapter merged
  nf4tensor merge smollm2-nf4 runs/finetune/adapter merged-nf4 --4-bit"""


def add(commands: Any) -> None:
    """Add the subcommands."""
    quantize = _parser(commands, "quantize", "quantize a dense checkpoint", _QUANTIZE)
    quantize.add_argument("source", metavar="SRC", help="file, folder or hub id")
    quantize.add_argument("--block-size", type=int, default=64)
    quantize.add_argument(
        "--scale-block-size", type=int, default=256, help="0 keeps float32 scales"
    )
    quantize.add_argument("--quant-type", choices=QUANT_TYPES, default="nf4")
    quantize.add_argument(
        "--skip", nargs="*", default=list(SKIP), help=f"parts of names; by default {' '.join(SKIP)}"
    )
    _add_output(quantize)
    quantize.set_defaults(run=_quantize)

    inspect = _parser(commands, "inspect", "show what a checkpoint holds", _INSPECT)
    inspect.add_argument("path", metavar="PATH", help="file, folder or hub id")
    inspect.add_argument("--source", help="dense checkpoint to compare with")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    merge = _parser(commands, "merge", "merge LoRA adapters of PEFT into a checkpoint", _MERGE)
    merge.add_argument("base", metavar="BASE", help="file, folder or hub id, dense or 4-bit")
    merge.add_argument("adapter", metavar="ADAPTER", help="folder or hub id")
    merge.add_argument(
        "--4-bit", dest="in_4_bits", action="store_true", help="keep 4-bit weights 4-bit"
    )
    _add_output(merge)
    merge.set_defaults(run=_merge)

    convert = _parser(
        commands, "convert", "convert weights of bitsandbytes to 4-bit tensors or back", _CONVERT
    )
    convert.add_argument("source", metavar="PATH", help="file, folder or hub id")
    convert.add_argument("--to", choices=TARGETS, required=True)
    convert.add_argument(
        "--requantize", action="store_true", help="quantize again what cannot be held exactly"
    )
    _add_output(convert)
    convert.set_defaults(run=_convert)


def _parser(commands: Any, name: str, does: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=does,
        description=does,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="DST", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _quantize(options: argparse.Namespace) -> None:
    changes = quantize_files(
        located(options.source),
        options.target,
        block_size=options.block_size,
        scale_block_size=options.scale_block_size or None,
        quant_type=options.quant_type,
        skip=options.skip,
        options=WriteOptions(overwrite=options.overwrite, title="quantize"),
        dry_run=options.dry_run,
    )
    _show_changes(changes, options)


def _merge(options: argparse.Namespace) -> None:
    changes = merge_files(
        located(options.base),
        located(options.adapter),
        options.target,
        in_4_bits=options.in_4_bits,
        options=WriteOptions(overwrite=options.overwrite, title="merge"),
        dry_run=options.dry_run,
    )
    _show_changes(changes, options)


def _convert(options: argparse.Namespace) -> None:
    changes = convert_files(
        located(options.source),
        options.target,
        options.to,
        requantize=options.requantize,
        options=WriteOptions(overwrite=options.overwrite, title="convert"),
        dry_run=options.dry_run,
    )
    _show_changes(changes, options)


def _show_changes(changes: Sequence[Change], options: argparse.Namespace) -> None:
    before = sum(change.before_bytes for change in changes)
    after = sum(change.after_bytes for change in changes)
    if options.json:
        found = {"before_bytes": before, "after_bytes": after, "dry_run": options.dry_run}
        print(json.dumps({**found, "tensors": [c.to_dict() for c in changes]}, indent=2))
        return
    rows = [
        (
            c.name,
            _shape(c.shape),
            c.what,
            _bytes(c.before_bytes),
            _bytes(c.after_bytes),
            _error(c.error),
        )
        for c in changes
    ]
    _table(("tensor", "shape", "", "before", "after", "error"), rows)
    done = "would become" if options.dry_run else "became"
    print(f"\n{_bytes(before)} {done} {_bytes(after)}, {options.target}")


def _inspect(options: argparse.Namespace) -> None:
    checkpoint = Checkpoint(located(options.path))
    source = Checkpoint(located(options.source)) if options.source else None
    rows = [_examined(checkpoint, entry, source) for entry in checkpoint.entries.values()]
    total = sum(row["bytes"] for row in rows)
    if options.json:
        content = {"path": str(checkpoint.path), "bytes": total, "aliases": checkpoint.aliases}
        print(json.dumps({**content, "tensors": rows}, indent=2))
        return
    _table(
        ("tensor", "shape", "format", "bytes", "bits", "error"),
        [
            (
                row["name"],
                _shape(row["shape"]),
                row["format"],
                _bytes(row["bytes"]),
                f"{row['bits']:.2f}",
                _error(row["error"]),
            )
            for row in rows
        ],
    )
    for alias, stored in checkpoint.aliases.items():
        print(f"{alias} is {stored}")
    print(f"\n{_bytes(total)} in {len(rows)} tensors")
    formats: dict[str, int] = {}
    for row in rows:
        formats[row["format"]] = formats.get(row["format"], 0) + row["bytes"]
    width = max(map(len, formats), default=0)
    for name, size in sorted(formats.items(), key=lambda item: -item[1]):
        bar = "#" * max(1, round(BAR_WIDTH * size / max(total, 1)))
        print(f"{name:<{width}}  {bar:<{BAR_WIDTH}}  {_bytes(size)}")


def _examined(checkpoint: Checkpoint, entry: Entry, source: Checkpoint | None) -> dict[str, Any]:
    shape, size = entry.weights_shape, entry.nbytes
    kind = entry.dtype
    if entry.weight is not None:
        spec = entry.weight.spec
        kind = f"{spec.quant_type} of {spec.block_size}, {spec.scale_kind}"
    error = None
    if source is not None and entry.weight is not None:
        original = source.find(entry.name)
        if original is None or original.weights_shape != shape:
            raise CheckpointError(f"{source.path} has no {entry.name} of shape {list(shape)}")
        dense = read(source, original)
        dense = dense if original.weight is None else dense.dequantize()
        error = relative_error(read(checkpoint, entry).dequantize(), dense)
    bits = 8 * size / math.prod(shape) if all(shape) else 0.0
    return {
        "name": entry.name,
        "shape": list(shape),
        "format": kind,
        "bytes": size,
        "bits": bits,
        "error": error,
    }


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _bytes(size: int) -> str:
    if size < 1000:
        return f"{size} B"
    power = min(3, int(math.log10(size)) // 3)
    return f"{size / 1000**power:.3g} {'BKMG'[power]}B"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.4f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )
