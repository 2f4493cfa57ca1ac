"""What `doctor` found, as objects and as text.

Nothing is looked at here: the checks make findings, `doctor` puts them together.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nf4tensor.errors import UnhealthyError
from nf4tensor.fsdp.table import amount

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """One fault, of one parameter or of many alike.

    Args:
        severity: "error" if training fails or goes wrong, "warning" if it costs memory, time or
            precision, "note" if that may well be meant.
        check: Name of the check, for `assert_healthy(allow=...)`.
        names: Parameters or modules of the model; "" is the model itself.
        nbytes: Bytes on this rank that it costs, of all names together; 0 if it costs none.
        message: What is wrong with each.
        fix: The way out. Code in backticks is for each `name` of `names`.
    """

    severity: Severity
    check: str
    names: tuple[str, ...]
    nbytes: int
    message: str
    fix: str

    def __str__(self) -> str:
        names = ", ".join(name or "the model" for name in self.names[:_NAMES_SHOWN])
        if len(self.names) > _NAMES_SHOWN:
            names = f"{len(self.names)} such as {names}"
        cost = f" ({amount(self.nbytes)})" if self.nbytes else ""
        return f"{self.severity} [{self.check}] {names}{cost}: {self.message}\n  fix: {self.fix}"


@dataclass(frozen=True)
class Report:
    """What `doctor` found on this rank; `print` it.

    Args:
        num_parameters: Parameters of the model, tied ones once.
        num_quantized: Those in 4 bits.
        num_shards: Ranks that share a 4-bit weight, every number that occurs.
        world_size: Ranks in all.
        bytes_by_role: Bytes on this rank: "4-bit weights", "adapters", "other trainable", "other
            frozen", "buffers", "gradients", "optimizer state", and "gathered now" for what FSDP2
            gives back when it reshards.
        findings: Worst first.
    """

    num_parameters: int
    num_quantized: int
    num_shards: tuple[int, ...]
    world_size: int
    bytes_by_role: Mapping[str, int]
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Tell whether nothing worse than a note was found."""
        return all(finding.severity == "note" for finding in self.findings)

    def assert_healthy(self, *, allow: Collection[str] = ()) -> None:
        """Fail if anything worse than a note was found: the one line of a user's test.

        Args:
            allow: Names of checks whose findings are meant.

        Raises:
            UnhealthyError: An AssertionError whose message is the report.
        """
        if not all(f.severity == "note" or f.check in allow for f in self.findings):
            raise UnhealthyError(str(self))

    def __str__(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        found = ", ".join(
            f"{counts[severity]} {severity}{'s' if counts[severity] > 1 else ''}"
            for severity in SEVERITIES
            if counts[severity]
        )
        lines = [
            f"{self.num_quantized} of {self.num_parameters} parameters are 4-bit{self._sharded()}: "
            f"{found or 'healthy'}"
        ]
        lines += [f"  {role:<16}{amount(n):>10}" for role, n in self.bytes_by_role.items()]
        if self.findings and "gathered now" in self.bytes_by_role:
            lines += ["  fixes are for parameters that are not gathered: call reshard() first"]
        return "\n".join([*lines, *map(str, self.findings)])

    def _sharded(self) -> str:
        if self.num_shards in ((), (1,)):
            return f", whole on each of {self.world_size} ranks" if self.world_size > 1 else ""
        return f", sharded over {' or '.join(map(str, self.num_shards))} of {self.world_size} ranks"


def collect(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Join findings that differ in names and bytes only, and sort them by severity."""
    alike: dict[Finding, list[Finding]] = {}
    for finding in findings:
        alike.setdefault(replace(finding, names=(), nbytes=0), []).append(finding)
    joined = [
        replace(
            kind,
            names=tuple(name for finding in group for name in finding.names),
            nbytes=sum(finding.nbytes for finding in group),
        )
        for kind, group in alike.items()
    ]
    return tuple(sorted(joined, key=lambda finding: SEVERITIES.index(finding.severity)))
