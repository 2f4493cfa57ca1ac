"""The harness: who is called when, what is made of the times, what is written."""

import importlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nf4tensor import to_nf4
from nf4tensor.kernels import native

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks():
    """The benchmarks' modules, importable as the scripts import them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = ("harness", "roofs", "peers", "bench_linear", "roofline")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_contestants_take_turns_in_changing_order(benchmarks):
    calls = []
    contestants = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = benchmarks.harness.race(contestants, rounds=3)
    assert "".join(calls) == "abc" + "cba" + "abc" + "cba" + "abc"
    assert [timing["rounds"] for timing in times.values()] == [3, 3, 3]


def test_slow_contestants_get_fewer_turns(benchmarks):
    contestants = {"quick": int, "slow": lambda: time.sleep(0.02), "once": lambda: time.sleep(0.1)}
    times = benchmarks.harness.race(contestants, rounds=10, seconds=0.05, slow=0.08)
    rounds = {name: timing["rounds"] for name, timing in times.items()}
    assert rounds == {"quick": 10, "slow": 3, "once": 1}
    assert times["once"]["median_ms"] >= 100


def test_first_results_are_checked_before_any_other_call(benchmarks):
    seen = []
    contestants = {name: lambda name=name: seen.append(name) or name for name in "ab"}
    benchmarks.harness.race(contestants, 2, check=lambda *checked: seen.append(checked))
    assert seen[:4] == ["a", ("a", "a"), "b", ("b", "b")]
    assert sum(isinstance(entry, tuple) for entry in seen) == 2


def test_times_are_those_of_the_given_clock(benchmarks):
    def clock(run, check=None):
        result = run()
        if check is not None:
            check(result)
        return result

    seen = []
    times = benchmarks.harness.race(
        {"a": lambda: 0.5}, 3, check=lambda *checked: seen.append(checked), clock=clock
    )
    assert times["a"]["median_ms"] == 500
    assert seen == [("a", 0.5)]


@pytest.mark.parametrize(
    ("seconds", "quartiles"),
    [([0.002], (2, 2, 2)), ([0.001, 0.002, 0.003], (1, 2, 3))],
)
def test_summary(benchmarks, seconds, quartiles):
    timing = benchmarks.harness.summary(seconds)
    found = (timing["q1_ms"], timing["median_ms"], timing["q3_ms"])
    assert found == pytest.approx(quartiles)
    assert timing["rounds"] == len(seconds)


def test_verdict(benchmarks):
    verdict = benchmarks.harness.verdict
    assert verdict(3.0, 2.0, None) == {"theirs / ours": 1.5}
    assert verdict(3.0, 2.0, 1.5, "x") == {"theirs / ours": 1.5, "goal": ">= 1.5", "met": "yes"}
    assert verdict(3.0, 2.0, 1.6, "memory")["met"] == "no"
    assert verdict(3.0, 2.0, 1.6, "memory")["limit"] == "memory"


def test_report_writes_what_it_prints_and_the_hidden_columns(benchmarks, tmp_path, capsys):
    tables = {"one": [{"name": "a", "ms": 1.234, "bytes": 7}, {"name": "b", "note": "slow"}]}
    path = benchmarks.harness.report(
        "some", tables, tmp_path, roofs={1: {"read GB/s": 9.0}}, skipped={"peer": "not there"}
    )
    printed = capsys.readouterr().out
    assert "1.23" in printed
    assert "bytes" not in printed
    assert "skipped: peer: not there" in printed
    written = json.loads(path.read_text())
    assert path.name == f"some-{written['isa']}.json"
    assert written["tables"] == tables
    assert written["roofs"] == {"1": {"read GB/s": 9.0}}
    assert {"command", "commit", "torch", "processor"} <= written.keys()


def test_quick_yields_to_what_is_given(benchmarks):
    harness = benchmarks.harness
    options = harness.parse(harness.parser("text"), ["--quick", "--rounds", "7"])
    assert (options.rounds, options.seconds) == (7, harness.QUICK["seconds"])
    assert harness.parse(harness.parser("text"), []).rounds == 15


def test_missing_package_is_skipped_with_the_extra(benchmarks, monkeypatch):
    monkeypatch.setitem(benchmarks.peers.MODULES, "torchao", "no_such_package")
    skipped = {}
    options = SimpleNamespace(no_peers=False)
    assert benchmarks.peers.load("torchao", options, skipped) is None
    assert 'pip install "nf4tensor[bench]"' in skipped["torchao"]


def test_no_compiler_is_named(benchmarks, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with monkeypatch.context() as patch:
        patch.setattr(benchmarks.roofs, "_load", benchmarks.roofs._load.__wrapped__)
        assert "no C++ compiler (no-such-compiler)" in benchmarks.roofs.unavailable_because()
        assert benchmarks.roofs.measure(1, SimpleNamespace(quick=True)) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_twin_writes_every_byte(benchmarks, dtype, threads):
    if (reason := benchmarks.roofs.unavailable_because()) is not None:
        pytest.skip(reason)
    quantized = to_nf4(torch.randn(5, 96))
    quantized.record.fill_(0x3F)
    out = torch.zeros(5, 96, dtype=dtype)
    benchmarks.roofs.twin(quantized.record, out, threads)()
    assert (out.view(torch.uint8) == 0x3F).all()


def test_pace_tells_from_fewer_rows(benchmarks):
    pace = benchmarks.bench_linear.Pace({"torch": (16, 3000.0)})
    assert not pace.is_too_slow("torch", 64)
    assert pace.is_too_slow("torch", 128)
    assert not pace.is_too_slow("ours", 512)


def test_wrong_product_is_noticed(benchmarks):
    check = benchmarks.bench_linear.check_bound
    left, right = torch.randn(4, 64), torch.randn(64, 32)
    check(left @ right, left.double(), right.double())
    wrong = left @ right
    wrong[0, 0] += 0.01
    with pytest.raises(AssertionError, match="1 of 128 results are off"):
        check(wrong, left.double(), right.double())


def test_instruction_sets_leave_the_one_in_use(benchmarks):
    if native.unavailable_because() is not None:
        with pytest.raises(SystemExit, match="no compiled kernels to measure"):
            benchmarks.harness.instruction_sets()
        return
    before = native.isa()
    assert before == benchmarks.harness.instruction_sets()[0]
    assert native.isa() == before


def test_roofline_without_results_says_what_to_do(benchmarks, tmp_path):
    with pytest.raises(SystemExit, match="run make bench first"):
        benchmarks.roofline.main(["--results", str(tmp_path)])
