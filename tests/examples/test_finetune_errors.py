"""The fine-tuning example, not run: what it refuses and how, its text, its batches.

Nothing here starts a rank or trains.
"""

import importlib
import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "finetune.py")


@pytest.fixture(scope="module")
def example():
    """The example's modules, importable as the script imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        names = ("options", "corpus", "smollm2", "snapshots", "ranks")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def parse(example, *arguments: str):
    """Parse a command line."""
    return example.options.parse(list(arguments))


@pytest.mark.parametrize("name", ["tqdm", "torch"])
def test_missing_package_of_the_package_itself_names_the_extra(monkeypatch, name):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for module in ("options", "corpus", "snapshots", "ranks", "report"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=rf"no {name}: pip install \"nf4tensor\[hf,plot\]\""):
        runpy.run_path(SCRIPT)


def test_missing_package_names_the_extra(example, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    with pytest.raises(SystemExit, match=r"peft.*pip install \"nf4tensor\[hf,plot\]\""):
        example.options.check(parse(example))


def test_learning_rate_must_be_a_number(example):
    with pytest.raises(SystemExit, match="--lr is nan, must be a positive number"):
        example.options.check(parse(example, "--lr", "nan"))


@pytest.mark.parametrize(
    ("arguments", "num_gpus", "message"),
    [
        ("--device cuda", 0, "sees no GPU here. Use --device cpu"),
        ("--ranks 4", 2, "--ranks 4 needs 4 GPUs, one a process; torch sees 2. Use --ranks 2"),
        ("--ranks 0", 0, "--ranks is 0, must be at least 1"),
        ("--ranks 3 --batch 4", 0, "cannot be shared equally by 3 ranks. Use --batch 6"),
    ],
)
def test_ranks_that_cannot_work(example, arguments, num_gpus, message):
    options = parse(example, *arguments.split())
    with pytest.raises(SystemExit) as refusal:
        example.options.check_ranks(options, num_gpus)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("num_gpus", "batch", "device", "ranks"),
    [(0, 4, "cpu", 2), (0, 3, "cpu", 1), (8, 8, "cuda", 8), (8, 4, "cuda", 4), (1, 4, "cuda", 1)],
)
def test_default_ranks(example, num_gpus, batch, device, ranks):
    options = parse(example, "--batch", str(batch))
    example.options.check_ranks(options, num_gpus)
    assert (options.device, options.ranks) == (device, ranks)


@pytest.mark.parametrize("option", ["--steps", "--batch", "--seq-len", "--checkpoint-every"])
def test_numbers_below_one(example, monkeypatch, option):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(SystemExit, match=rf"{option} is 0, must be at least 1"):
        example.options.check(parse(example, option, "0"))


def interrupted_run(folder: Path, **options) -> Path:
    """Make what an interrupted run leaves."""
    checkpoint = folder / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    run = {"train_losses": [3.0] * 4, "options": {"steps": 9, "lr": 0.5, "ranks": 2, **options}}
    (checkpoint / "run.json").write_text(json.dumps(run))
    return folder


def test_resume_without_a_checkpoint(example, tmp_path):
    with pytest.raises(SystemExit, match=r"no checkpoint in .*Start without --resume"):
        parse(example, "--resume", "--out", str(tmp_path))


def test_resume_takes_the_options_of_the_run(example, tmp_path):
    out = str(interrupted_run(tmp_path))
    options = parse(example, "--resume", "--out", out, "--ranks", "1")
    assert (options.steps, options.lr, options.ranks) == (9, 0.5, 1)


def test_resume_with_an_option_that_changes_the_run(example, tmp_path):
    out = str(interrupted_run(tmp_path))
    with pytest.raises(SystemExit, match=r"started with --lr 0.5, not 0.1. Leave --lr out"):
        parse(example, "--resume", "--out", out, "--lr", "0.1")


def test_unfinished_run_is_not_overwritten(example, tmp_path):
    out = str(interrupted_run(tmp_path))
    with pytest.raises(SystemExit, match=r"ended at step 4 of 9. Continue it with --resume"):
        example.options.check_unfinished(parse(example, "--out", out))
    example.options.check_unfinished(parse(example, "--out", out, "--fresh"))
    example.options.check_unfinished(parse(example, "--out", out, "--resume"))


def test_finished_run_is_replaced(example, tmp_path):
    out = str(interrupted_run(tmp_path, steps=4))
    example.options.check_unfinished(parse(example, "--out", out))


@pytest.mark.parametrize("model", ["./missing", "/missing/model", "missing"])
def test_missing_model_folder(example, model):
    with pytest.raises(SystemExit, match="no such folder, and a hub id has the form owner/name"):
        example.options.model_folder(model)


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ([], "config.json"),
        (["config.json"], r"\*.safetensors"),
        (["config.json", "model.safetensors"], r"tokenizer\*"),
    ],
)
def test_incomplete_model_folder(example, tmp_path, files, missing):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match=f"no {missing} in .* written by save_pretrained"):
        example.options.model_folder(str(tmp_path))


@pytest.mark.hf
def test_hub_model_without_a_network(example, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(SystemExit, match=r"did not give it \(ConnectionError\). Check the name"):
        example.options.model_folder("owner/name")


@pytest.mark.parametrize("data", ["missing.txt", "./missing", "/missing/text", "missing.jsonl"])
def test_missing_data_file(example, data):
    with pytest.raises(SystemExit, match=f"--data {data}: no such file. Give a text file"):
        example.corpus.read_documents(data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: not JSON"),
        ('{"body": "x"}', 'line 2: needs "text", or "messages"'),
        ("[1]", 'line 2: needs "text"'),
        ('{"prompt": "x"}', 'line 2: needs "text"'),
    ],
)
def test_bad_jsonl_line(example, tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(SystemExit, match=message):
        example.corpus.read_documents(str(path))


def test_missing_pydoc_topics(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    with pytest.raises(SystemExit, match=r"no pydoc_data.topics.*Give a text file: --data FILE"):
        example.corpus.read_documents(example.corpus.DEFAULT)


def fake_datasets(load) -> ModuleType:
    """Stand in for the package `datasets`."""
    fake = ModuleType("datasets")
    fake.load_dataset = load
    fake.logging = SimpleNamespace(set_verbosity_error=lambda: None)
    return fake


def test_dataset_without_its_package(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"--data some/name: .*nf4tensor\[hf,plot\]"):
        example.corpus.read_documents("some/name")


def test_dataset_that_does_not_load(example, monkeypatch):
    def unreachable(name, split):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(unreachable))
    with pytest.raises(SystemExit, match=r"\(ConnectionError\). Check the name and the network"):
        example.corpus.read_documents("some/name")


def test_dataset_without_text(example, monkeypatch):
    rows = SimpleNamespace(column_names=["body"])
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(lambda name, split: rows))
    with pytest.raises(SystemExit, match=r"--data some/name: has \['body'\], needs"):
        example.corpus.read_documents("some/name")


class Letters:
    """A tokenizer of letters."""

    eos_token_id = 0

    def __call__(self, text, **options):
        """Return the codes of the letters."""
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, tokenize):
        """Join the messages."""
        return "".join(message["content"] for message in messages)


def test_too_little_text(example, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("A line.\n")
    with pytest.raises(SystemExit, match="1 documents give 0 training and 0 held-out chunks of 32"):
        example.corpus.load_chunks(str(path), Letters(), 32, 8, 8)


def test_no_document_is_on_both_sides(example, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": chr(65 + i) * 31}) for i in range(40)))
    train, held_out = example.corpus.load_chunks(str(path), Letters(), 32, 100, 100)
    assert (len(train), len(held_out)) == (36, 4)
    assert not set(train[:, 0].tolist()) & set(held_out[:, 0].tolist())


def test_documents_of_each_form(example):
    rows = [
        {"text": "ab"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"},
    ]
    assert [example.corpus.as_text(row, Letters()) for row in rows] == ["ab"] * 3


def test_batches_depend_on_seed_and_step_and_cover_each_epoch(example):
    def rows(seed):
        return [i for step in range(3) for i in example.corpus.batch_rows(6, 4, step, seed)]

    assert rows(seed=1) == rows(seed=1) != rows(seed=2)
    assert sorted(rows(seed=1)[:6]) == sorted(rows(seed=1)[6:]) == list(range(6))
