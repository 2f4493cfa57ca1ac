"""Check and measure everything on a GPU, offline and in under four minutes.

Builds nf4tensor for the GPU at hand into a temporary folder, then runs sections, the most important
first, in a process that imports what was built. A section that raises, crashes or hangs is recorded
with what it said, and the others go on in a new process; what does not fit into `--seconds` is
skipped by name. The JSON file is written after every row. `--device cpu` is the dry run for a
machine without a GPU: the same code on CPU tensors, less what only CUDA has.

Sections are functions of a `gpu_worker.Check`: see SECTIONS. Exit status 1: something failed or
differs; a goal that is not met is no failure.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# Nothing here may import torch or nf4tensor: the one is not built yet, and a process whose GPU
# context a kernel broke cannot go on.
from gpu_worker import Worker

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
OLDEST_TORCH = (2, 11)
SECONDS = 210.0
LEAST_SECONDS = 4.0  # a section that would get less is skipped
ERROR_LINES = 30
# Name -> module:function, and the seconds after which it is stopped, of SECONDS in all.
SECTIONS = {
    "build": ("gpu_exactness:library", 120),
    "exactness": ("gpu_exactness:exactness", 60),
    "mappings": ("gpu_kernels:mappings", 30),
    "dequantize": ("gpu_kernels:dequantize", 40),
    "linear": ("gpu_kernels:linear", 60),
    "step": ("gpu_training:step", 50),
    "fsdp": ("gpu_training:fsdp", 40),
    "offload": ("gpu_training:offload", 40),
    "compile": ("gpu_training:compiled", 70),
    "graph": ("gpu_limits:graph", 20),
    "huge": ("gpu_limits:huge", 40),
}


class CheckError(Exception):
    """The check cannot go on: the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; return the exit status."""
    options = parse(argv)
    deadline = time.monotonic() + options.seconds
    record = Record(options.results / f"gpu-check-{options.device}.json")
    with tempfile.TemporaryDirectory(prefix="nf4tensor-gpu-check-") as folder:
        package = None if options.skip_build else Path(folder) / "package"
        run_sections(options, record, package, deadline)
    print(f"\n{record.summary()}\n{record.path}", flush=True)
    return 1 if "failed" in record.statuses() else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the dry run")
    add("--seconds", type=float, default=SECONDS, help="for all sections together")
    add("--sections", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="only these")
    add("--skip-build", action="store_true", help="check the nf4tensor that Python imports")
    add("--quick", action="store_true", help="small shapes, few rounds: only to see that it runs")
    add("--no-peers", action="store_true", help="leave out bitsandbytes and torchao")
    add("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args(argv)
    # Also with --skip-build: it says what is checked.
    options.sections = [name for name in SECTIONS if name in ("build", *options.sections)]
    return options


def run_sections(options, record: "Record", package: Path | None, deadline: float) -> None:
    """Run one section after the other, each as long as it may."""
    worker, blocked = Worker(options, package), ""
    for name in options.sections:
        where, limit = SECTIONS[name]
        left = deadline - time.monotonic()
        if blocked or left < LEAST_SECONDS:
            record.end(name, {"status": "skipped", "because": blocked or "no time left"})
            continue
        record.begin(name)
        until = time.monotonic() + min(limit * max(1.0, options.seconds / SECONDS), left)
        try:
            if not worker.is_alive():
                worker = Worker(options, package)
            record.facts = worker.facts(until)
            if name == "build":
                check_facts(options, record.facts)
                if package is not None:
                    record.take("at", build(package, options, record.facts, until))
            for kind, content in worker.run(where, until):
                record.take(kind, content)
            outcome = worker.outcome
        except (CheckError, EOFError, TimeoutError) as error:
            outcome = {"status": "failed", "because": str(error)}
        record.end(name, outcome)
        if outcome["status"] == "failed":
            worker.stop()
            blocked = f"{name} failed" if name == "build" else ""
    worker.stop()


def check_facts(options, facts: dict) -> None:
    """Refuse what nothing can be checked on.

    Raises:
        CheckError: torch is too old, or sees no GPU.
    """
    version = tuple(int(part) for part in facts["torch"].split(".")[:2])
    if version < OLDEST_TORCH:
        raise CheckError(f"torch is {facts['torch']}, expected 2.11 or later")
    if options.device == "cuda" and "capability" not in facts:
        raise CheckError(
            f"torch {facts['torch']} sees no CUDA device: run this on a machine with a GPU and a "
            "torch for it, or with --device cpu for the dry run"
        )


class Record:
    """What the sections found, in a file that has all of it at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.facts: dict[str, object] = {}
        self.sections: dict[str, dict] = {}
        self._started = 0.0
        self._running: dict = {}

    def statuses(self) -> list[str]:
        """Return how each section ended."""
        return [section["status"] for section in self.sections.values()]

    def begin(self, name: str) -> None:
        """Start a section."""
        print(f"\n== {name}", flush=True)
        self._started = time.monotonic()
        self._running = self.sections[name] = {"status": "running", "at": "start", "tables": {}}
        self._write()

    def take(self, kind: str, content) -> None:
        """Add to the running section: a row of a table, or where it is."""
        if kind == "row":
            title, row = content
            self._running["tables"].setdefault(title, []).append(row)
            self._write()
        else:
            self._running[kind] = content

    def end(self, name: str, outcome: dict) -> None:
        """Say how a section ended."""
        section = self.sections.setdefault(name, {})
        seconds = time.monotonic() - self._started if section else 0.0
        section |= {"seconds": round(seconds, 1), **outcome}
        if section["status"] == "failed":
            section["because"] += f"\n(at {section['at']})"
        because = section.get("because", "")
        print(f"{name}: {section['status']}, {seconds:.1f} s{because and ': ' + because}")
        for who, why in section.get("left out", {}).items():
            print(f"left out: {who}: {why}")
        sys.stdout.flush()
        self._write()

    def _write(self) -> None:
        content = {
            "name": "gpu-check",
            "command": " ".join(["python", *sys.argv]),
            **self.facts,
            "sections": self.sections,
        }
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.replace(self.path)

    def summary(self) -> str:
        """Return a line for each section and for each goal that was not met."""
        lines = []
        for name, section in self.sections.items():
            first = section.get("because", "").strip().split("\n")[0]
            lines.append(f"{name:11}{section['status']:8}{section['seconds']:6.1f} s  {first}")
        rows = [
            (title, row)
            for section in self.sections.values()
            for title, rows in section.get("tables", {}).items()
            for row in rows
            if "met" in row
        ]
        missed = [(title, row) for title, row in rows if row["met"] != "yes"]
        lines.append(f"goals met: {len(rows) - len(missed)} of {len(rows)}")
        for title, row in missed:
            told = ", ".join(f"{column} {value}" for column, value in row.items())
            lines.append(f"not met: {title}: {told}")
        return "\n".join(lines)


# The build


def build(package: Path, options, facts: dict, until: float) -> str:
    """Build nf4tensor into a folder that Python can import it from; return which way worked.

    Raises:
        CheckError: No way worked; the message is the end of what the last one said.
        TimeoutError: It took too long.
    """
    environment = os.environ | {"NF4TENSOR_REQUIRE_COMPILED": "1", "NF4TENSOR_CUDA": "OFF"}
    if options.device == "cuda":
        # Machine code of this GPU and nothing else: a quarter of the time.
        environment |= {"NF4TENSOR_CUDA": "ON", "CUDAARCHS": f"{facts['capability']}-real"}
        if facts["nvcc"]:
            environment.setdefault("CUDACXX", facts["nvcc"])
    said = ""
    for way, commands in ways(package, environment["NF4TENSOR_CUDA"]):
        shutil.rmtree(package, ignore_errors=True)
        said = next(filter(None, (run_command(c, environment, until) for c in commands)), "")
        if not said:
            if not (package / "nf4tensor" / "__init__.py").exists():  # CMake installs _C.so alone
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                source, target = ROOT / "nf4tensor", package / "nf4tensor"
                shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
            return f"built by {way}"
        print(f"the build by {way} failed:\n{said}", flush=True)
    raise CheckError(f"no way to build worked:\n{said}")


def run_command(command: list[str], environment: dict[str, str], until: float) -> str:
    """Run a command; return the end of what it said if it failed, else nothing.

    Raises:
        TimeoutError: It took too long; it and what it started are ended.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        # A group of its own: pip alone would leave its compilers running.
        process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    except OSError as error:
        return f"{command[0]}: {error}"
    try:
        said, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except BaseException as stopped:  # the keyboard, too
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(stopped, subprocess.TimeoutExpired):
            raise
        raise TimeoutError(f"stopped: its time is over: {' '.join(command)}") from None
    if process.returncode == 0:
        return ""
    return "\n".join([*said.splitlines()[-ERROR_LINES:], f"exit status {process.returncode}"])


def ways(package: Path, cuda: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield what builds may be tried: a name, and the commands that must all succeed."""
    # Build folders of their own: one of `make setup` may hold the choice of other architectures.
    folders = [str(package.parent / name) for name in ("pip", "cmake")]
    if importlib.util.find_spec("scikit_build_core") is not None:
        install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        install += ["--no-build-isolation", "--no-deps", "--no-compile", "--target", str(package)]
        yield "pip", [[*install, f"--config-settings=build-dir={folders[0]}", str(ROOT)]]
    configure = ["cmake", "-S", str(ROOT), "-B", folders[1], "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DNF4TENSOR_CUDA={cuda}"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    compile_ = ["cmake", "--build", folders[1], "--parallel"]
    install = ["cmake", "--install", folders[1], "--prefix", str(package)]
    yield "CMake", [configure, compile_, install]


if __name__ == "__main__":
    sys.exit(main())
