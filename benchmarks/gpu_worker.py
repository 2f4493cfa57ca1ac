"""The process that runs the sections of `gpu_check.py`, and what it tells the one that asked.

`Worker` is the asking side and imports no torch. `serve` is the other side: it gives each section a
`Check`, sends rows as they come, and prints the tables at the end.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

ERROR_LINES = 12
STOP_SECONDS = 2.0
# What `Check.choices` may choose: store mappings of dequantize; up to how many rows of input the
# fused kernel of linear is taken.
MAPPINGS = ("direct", "pair", "staged")  # direct stores 32 bytes at once from sm_100 on
ALWAYS = 1 << 20
Message = tuple[str, object]  # kind and content


class Worker:
    """A process that runs sections, until one fails.

    Args:
        options: of the command line.
        package: folder to import nf4tensor from, once it is built; None: where Python finds it.
    """

    def __init__(self, options, package: Path | None) -> None:
        # Spawned: a forked process cannot use a GPU that its parent has used.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        folder = None if package is None else str(package)
        self._process = context.Process(target=serve, args=(theirs, options, folder), daemon=True)
        self._process.start()
        theirs.close()
        self._facts: dict | None = None
        self._is_busy = False
        self.outcome: dict = {}

    def is_alive(self) -> bool:
        """Say whether it takes sections."""
        return self._process.is_alive()

    def facts(self, until: float) -> dict:
        """Return what it says of torch and the GPU, which takes it some seconds at first."""
        if self._facts is None:
            self._facts = self._receive(until)[1]
        return self._facts

    def run(self, where: str, until: float) -> Iterator[Message]:
        """Run a section; yield what it sends, and leave how it ended in `outcome`.

        Raises:
            TimeoutError: It took too long. The process is still at it: stop it.
            EOFError: The process died.
        """
        self._is_busy = True
        with contextlib.suppress(BrokenPipeError):  # receiving says why
            self._connection.send((where, until - time.monotonic()))
        while True:
            kind, content = self._receive(until)
            if kind == "outcome":
                self.outcome, self._is_busy = content, False
                return
            yield kind, content

    def _receive(self, until: float) -> Message:
        if not self._connection.poll(max(0.0, until - time.monotonic())):
            raise TimeoutError("stopped: its time is over")
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(5)
            status = self._process.exitcode
            raise EOFError(f"the process died with exit status {status}, see above") from None

    def stop(self) -> None:
        """End the process; one that is not busy ends by itself."""
        if not self._is_busy:
            self._connection.close()
            self._process.join(STOP_SECONDS)
        self._process.kill()
        self._process.join(STOP_SECONDS)


def serve(connection, options, package: str | None) -> None:
    """Run the sections that are asked for, in a new process."""
    faulthandler.enable()
    connection.send(("facts", facts_of(options.device)))
    while True:
        try:
            where, seconds = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if package is not None and package not in sys.path:  # now it is built
            sys.path.insert(0, package)
        connection.send(("outcome", Check(connection, options, package, seconds).run(where)))


def facts_of(device: str) -> dict:
    """Return what the build and the report need to know."""
    import torch

    facts = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cuda" and torch.cuda.is_available():
        from torch.utils import cpp_extension

        properties = torch.cuda.get_device_properties(0)
        nvcc = Path(cpp_extension.CUDA_HOME or "") / "bin" / "nvcc"
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GB": round(properties.total_memory / 1e9, 1),
            "L2 MB": round(properties.L2_cache_size / 1e6, 1),
            "nvcc": str(nvcc) if nvcc.exists() else None,
        }
    return facts


class Check:
    """What a section is given: the device, its time, and where its findings go.

    Attributes:
        device: "cuda" or "cpu".
        quick: small shapes and few rounds.
        no_peers: leave out other packages.
        package: folder that nf4tensor was built into; None: it was not.
        judges: times are compared with goals, which are those of a GPU and of full sizes.
        left_out: who or what could not take part, and why.
    """

    def __init__(self, connection, options, package: str | None, seconds: float) -> None:
        self.device, self.quick, self.no_peers = options.device, options.quick, options.no_peers
        self.package = package
        self.judges = options.device == "cuda" and not options.quick
        self.left_out: dict[str, str] = {}
        self._connection = connection
        self._deadline = time.monotonic() + seconds
        self._tables: dict[str, list[dict]] = {}

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - time.monotonic()

    def at(self, text: str) -> None:
        """Say what comes now: if it fails, or never ends, this is where."""
        self._connection.send(("at", text))

    def row(self, title: str, row: dict) -> None:
        """Add a row to a table."""
        self._tables.setdefault(title, []).append(row)
        self._connection.send(("row", (title, row)))

    def choices(self, name: str, values: tuple) -> Iterator[object]:
        """Choose the default kernel and then others, by a function of `native`; yield each value.

        None is the default, and all there is on the CPU.
        """
        from nf4tensor.errors import NF4TensorError
        from nf4tensor.kernels import native

        choose = getattr(native, name)
        if self.device == "cpu":
            yield None
            return
        try:
            for value in (None, *values):
                try:
                    choose(value)
                except NF4TensorError as error:
                    self.left_out[f"{name}({value!r})"] = str(error)
                else:
                    yield value
        finally:
            choose(None)

    def run(self, where: str) -> dict:
        """Run a section and return how it ended: its text, if it returns one, is why it cannot."""
        import torch

        module, function = where.split(":")
        torch.manual_seed(0)
        try:
            because = getattr(importlib.import_module(module), function)(self)
            outcome = {"status": "skipped", "because": because} if because else {"status": "ok"}
        except (Exception, SystemExit):
            said = traceback.format_exc().strip().splitlines()[-ERROR_LINES:]
            # The exception first: it is what the summary shows.
            outcome = {"status": "failed", "because": "\n".join([said[-1], *said[:-1]])}
        self._print_tables()
        return outcome | {"left out": self.left_out}

    def _print_tables(self) -> None:
        with contextlib.suppress(ImportError):  # of nf4tensor: then there are no tables
            import harness

            for title, rows in self._tables.items():
                print(f"\n{title}", *harness.table(rows), sep="\n", flush=True)
