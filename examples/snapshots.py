"""Checkpoints of the fine-tuning example: each whole or not there, the last two kept.

A checkpoint is a folder `step-NNNNNN` of torch.distributed.checkpoint's files and a `run.json`. It
holds what training changes: the adapter and the optimizer. The frozen 4-bit base is left out, being
made again, byte for byte, from the model folder; so is the random state, since every step seeds its
own. Another number of ranks may read it.
"""

import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist

KEPT = 2


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in `folder`, or None."""
    return max(folder.glob("step-*"), default=None)


def save(folder: Path, step: int, model, optimizer, run: dict) -> None:
    """Write one checkpoint; every rank calls this. A kill at any moment leaves the previous one.

    Args:
        folder: where the checkpoints are.
        step: steps done.
        model: the sharded model.
        optimizer: its optimizer.
        run: what else a resumed run needs, as JSON (rank 0's is written).
    """
    import torch.distributed.checkpoint as dcp

    unfinished, final = folder / f"unfinished-{step:06d}", folder / f"step-{step:06d}"
    if dist.get_rank() == 0:
        for left_over in folder.glob("unfinished-*"):
            shutil.rmtree(left_over)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dcp.save(trainable_state(model, optimizer), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        (unfinished / "run.json").write_text(json.dumps(run))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        for old in sorted(folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def load(checkpoint: Path, model, optimizer) -> None:
    """Read a checkpoint into a model and an optimizer built as for a new run; by every rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state = trainable_state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["weights"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # the frozen base is not in it
    )


def trainable_state(model, optimizer) -> dict:
    """Return the state of adapters and optimizer, sharded as they are."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(ignore_frozen_params=True)
    weights, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"weights": weights, "optimizer": optimizer_state}


def read_run(checkpoint: Path) -> dict:
    """Return what `save` was given as `run`."""
    return json.loads((checkpoint / "run.json").read_text())


def clear(folder: Path) -> None:
    """Remove the checkpoints of an earlier run; every rank calls this."""
    if dist.get_rank() == 0:
        for old in [*folder.glob("step-*"), *folder.glob("unfinished-*")]:
            shutil.rmtree(old)
    dist.barrier()
