"""Text for the fine-tuning example: documents in, fixed chunks of tokens out.

A source is CPython's own `pydoc_data.topics`, a text file, a JSONL file or the name of a dataset. A
tenth of the documents is held out before anything is cut, so no held-out document is trained on.
Everything is a function of the source and the seed: a resumed run, and every rank, sees the same
chunks. Nothing here knows about models or ranks.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

import torch

DEFAULT = "pydoc-topics"
FILE_SUFFIXES = {".txt", ".md", ".rst", ".json", ".jsonl"}
FIELDS = '"text", or "messages", or "prompt" and "completion"'


def read_documents(source: str) -> Sequence[dict]:
    """Return the source's documents, each with "text", "messages", or "prompt" and "completion".

    Raises:
        SystemExit: a missing file, a line with none of these, or a dataset that does not load.
    """
    if source == DEFAULT:
        return read_topics()
    path = Path(source).expanduser()
    if not path.exists() and not source.startswith((".", "/")) and path.suffix not in FILE_SUFFIXES:
        return read_dataset(source)
    if not path.is_file():
        raise SystemExit(
            f"--data {source}: no such file. Give a text file, a .jsonl file, a dataset's name, or "
            f"leave it out for CPython's own documentation ({DEFAULT})."
        )
    if path.suffix in {".jsonl", ".json"}:
        return read_jsonl(path)
    return [{"text": text} for text in paragraphs(path.read_text(encoding="utf-8"))]


def read_topics() -> list[dict]:
    """Return the language reference that CPython carries for `help()`, one document a topic."""
    try:
        from pydoc_data import topics
    except ImportError:
        raise SystemExit(
            f"this Python has no pydoc_data.topics, the text of --data {DEFAULT} (some systems put "
            "it in a package of its own). Give a text file: --data FILE"
        ) from None
    return [{"text": text} for text in topics.topics.values()]


def has_fields(names: Set[str]) -> bool:
    """Say whether a document with these fields can be used."""
    return bool({"text", "messages"} & names) or {"prompt", "completion"} <= names


def read_jsonl(path: Path) -> list[dict]:
    """Read one JSON object a line."""
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SystemExit(
                f"{path}, line {number}: not JSON ({error}). Each line is one JSON object."
            ) from None
        if not isinstance(row, dict) or not has_fields(row.keys()):
            raise SystemExit(f"{path}, line {number}: needs {FIELDS}.")
        documents.append(row)
    return documents


def read_dataset(name: str) -> Sequence[dict]:
    """Load the train split of a dataset of the hub, or of its local cache."""
    try:
        import datasets
    except ImportError:
        raise SystemExit(
            f'--data {name}: no such file; a dataset needs: pip install "nf4tensor[hf,plot]"'
        ) from None
    datasets.logging.set_verbosity_error()
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # of the library, the hub's client, HTTP or the file system
        raise SystemExit(
            f"--data {name}: no such file, and it did not load as a dataset "
            f"({type(error).__name__}). Check the name and the network, or give a file."
        ) from None
    if not has_fields(set(rows.column_names)):
        raise SystemExit(f"--data {name}: has {rows.column_names}, needs {FIELDS}.")
    return rows


def paragraphs(text: str, size: int = 2000) -> Iterator[str]:
    """Cut a text at blank lines into documents of at least `size` characters, but for the last."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(piece) >= size:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def as_text(document: dict, tokenizer) -> str:
    """Render one document: plain text, or a conversation through the model's chat template."""
    if "text" in document:
        return document["text"]
    if "messages" in document:
        return tokenizer.apply_chat_template(document["messages"], tokenize=False)
    return document["prompt"] + document["completion"]


def pack(documents: Iterable[dict], tokenizer, seq_len: int, limit: int) -> torch.Tensor:
    """Tokenise documents, join them with the end token and cut the stream into rows.

    Returns:
        int64 `[chunks, seq_len]`, at most `limit` chunks; reading stops when they are full.
    """
    tokens: list[int] = []
    for document in documents:
        tokens += tokenizer(as_text(document, tokenizer), verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        if len(tokens) >= limit * seq_len:
            break
    chunks = min(limit, len(tokens) // seq_len)
    return torch.tensor(tokens[: chunks * seq_len], dtype=torch.int64).view(chunks, seq_len)


def load_chunks(source: str, tokenizer, seq_len: int, train_limit: int, held_out_limit: int):
    """Read, split and pack a source.

    Returns:
        (train, held_out), int64 `[chunks, seq_len]` each.

    Raises:
        SystemExit: the text is too short for one chunk on each side.
    """
    documents = read_documents(source)
    order = random.Random(0).sample(range(len(documents)), len(documents))
    tenth = max(1, len(documents) // 10)
    held_out = pack((documents[i] for i in order[:tenth]), tokenizer, seq_len, held_out_limit)
    train = pack((documents[i] for i in order[tenth:]), tokenizer, seq_len, train_limit)
    if not len(train) or not len(held_out):
        raise SystemExit(
            f"--data {source}: {len(documents)} documents give {len(train)} training and "
            f"{len(held_out)} held-out chunks of {seq_len} tokens; one of each is needed. Use a "
            "smaller --seq-len or more text."
        )
    return train, held_out


def batch_rows(num_chunks: int, batch: int, step: int, seed: int) -> list[int]:
    """Return the chunks of one step.

    A function of seed and step alone, so no sampler state has to be saved. Each epoch is a
    permutation of all chunks; a batch may straddle two epochs.
    """
    rows = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, place = divmod(position, num_chunks)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        rows.append(int(torch.randperm(num_chunks, generator=generator)[place]))
    return rows
