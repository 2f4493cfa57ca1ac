"""Where a checkpoint is: a path, or the id of a repository on the Hugging Face hub.

Called by `load.py`, `prepare.py` and the command line.
"""

from pathlib import Path

from nf4tensor.errors import CheckpointError

# Of the folder itself: repositories keep other formats' weights in folders of theirs, and some the
# same weights a second time, as their maker's own code reads them.
_WANTED, _UNWANTED = ["*.safetensors", "*.json"], ["*/*", "consolidated*"]


def located(path: str | Path) -> Path:
    """Return a path as it is, or where the hub's repository of this id was put.

    What the hub's cache has is not fetched again, and with HF_HUB_OFFLINE=1 nothing is.

    Args:
        path: A path, if it exists, is a `Path`, or starts like one (`./`, `/`, `~`); else an id.

    Raises:
        CheckpointError: There is neither, or the hub's package is missing.
    """
    if isinstance(path, Path):
        return path
    if Path(path).exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        return Path(path).expanduser()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{path} is no file or folder here; to take it from the Hugging Face hub, "
            "pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(path, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # the hub's, and those of what it is built on
        raise CheckpointError(
            f"{path} is no file or folder here, and the hub did not give it: {error}"
        ) from error
