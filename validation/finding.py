"""What came of a claim, and its record, which is used again only if the same program wrote it and its checks agree."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from nlflow.backends.machine import folder_digest
from nlflow.store.encoding import digest, encode, misfit, plain
from nlflow.store.records import Records, program
from validation.harness import Check, Claim, Outcome

KIND = "finding of a claim"
_FINDING = {"status": str, "message": str, "seconds": float, "checks": list | None, "details": dict, "figures": dict}


@dataclass(frozen=True)
class Finding:
    """A claim with what came of it; figures are PNG files by caption."""

    claim: Claim
    status: str  # 'pass', 'fail', 'error' or 'not run'
    outcome: Outcome | None
    message: str
    seconds: float
    figures: dict[str, bytes]

    @property
    def line(self) -> str:
        """Claim, source, measured and tolerance, result."""
        found = self.message
        if self.outcome is not None and self.outcome.checks:
            worst = self.outcome.worst
            found = f"{worst.what}: {worst.relation}"
            if len(self.outcome.checks) > 1:
                found += f" (nearest of {len(self.outcome.checks)})"
        source = self.claim.source.replace("arXiv 2312.00751, ", "")
        return f"{self.status:<8}{self.claim.name:<25} {source:<34.34} {self.seconds:5.1f} s  {found}"

    def as_plain(self) -> dict[str, Any]:
        """Return the finding in JSON's types, pictures in base64; figures of matplotlib are left out."""
        outcome = self.outcome
        return {
            "status": self.status,
            "message": self.message,
            "seconds": self.seconds,
            "checks": None if outcome is None else [plain_check(check) for check in outcome.checks],
            "details": {} if outcome is None else plain(outcome.details),
            "figures": {caption: b64encode(image).decode() for caption, image in self.figures.items()},
        }

    @classmethod
    def from_plain(cls, claim: Claim, content: dict[str, Any]) -> Finding:
        """Return the finding that `as_plain` was asked of."""
        figures = {caption: b64decode(image, validate=True) for caption, image in content["figures"].items()}
        outcome = None
        if content["checks"] is not None:
            outcome = Outcome([Check(**check) for check in content["checks"]], {}, content["details"])
        return cls(claim, content["status"], outcome, content["message"], content["seconds"], figures)


def plain_check(check: Check) -> dict[str, Any]:
    """Return a check in JSON's types: its figures may be NumPy's."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in asdict(check).items()}


def findings_in(out: Path, claims: list[Claim], quick: bool) -> Records[dict[str, Any]]:
    """Return the records of claims in a folder, of findings in plain data.

    Those of another state of the source are computed again without a word, and so are errors.
    """
    by_name = {claim.name: claim for claim in claims}
    versions = digest(encode([program(), folder_digest(Path(__file__).parent), quick]))

    def unpack(name: str, content: Any) -> dict[str, Any] | None:
        trouble = misfit(content, {"program": str, "finding": dict})
        if trouble is None and content["program"] != versions:
            return None  # whose findings may be of another form
        trouble = trouble or _foreign(content["finding"])
        if trouble is not None:
            raise ValueError(trouble)
        plain_finding: dict[str, Any] = content["finding"]
        found = Finding.from_plain(by_name[name], plain_finding)
        if found.status not in ("pass", "fail"):
            return None
        if found.outcome is None or found.outcome.passed != (found.status == "pass"):
            raise ValueError(f"{found.status!r}, which its checks do not say")
        return plain_finding

    return Records(out / "claims", KIND, lambda name, finding: {"program": versions, "finding": finding}, unpack)


def _foreign(finding: Any) -> str | None:
    """Return why plain data is no finding; None if it is. Of its pictures, whether they are text."""
    trouble = misfit(finding, _FINDING) or misfit(finding["figures"], dict.fromkeys(finding["figures"], str))
    if trouble is not None:
        return trouble
    kinds = get_type_hints(Check)
    return next((wrong for check in finding["checks"] or () if (wrong := misfit(check, kinds)) is not None), None)
