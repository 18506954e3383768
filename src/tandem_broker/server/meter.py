"""Counts what the broker does, and writes it in Prometheus' text format."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any


class Meter:
    """Counters of a running broker; they begin at 0 with it."""

    def __init__(self) -> None:
        self.served = Counter(dict.fromkeys(("batches", "groups", "bytes"), 0))
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.refused: Counter[str] = Counter()

    def prometheus(self, report: Mapping[str, Any]) -> str:
        """Write everything, given the queue's state."""
        groups = {state: report[f"{state}_groups"] for state in ("queued", "buffered", "leased")}
        requests = {f'path="{path}",status="{status}"': count for (path, status), count in self.answers.items()}
        families: dict[str, float | Mapping[str, float]] = {
            "step": report["step"],
            "policy_step": report["policy"],
            "groups": _by("state", groups),
            "held_bytes": report["held_bytes"],
            "leases": report["leases"],
            "groups_total": _by("event", report["counts"]),
            **{f"served_{name}_total": count for name, count in self.served.items()},
            "refused_total": _by("reason", self.refused),
            "requests_total": requests,
            "request_seconds_total": _by("path", self.seconds),
        }
        for name in ("queued_groups", "queued_sequences", "buffered_sequences", "held_bytes", "connected", "accepted"):
            values = {env["name"]: int(env[name]) for env in report["envs"]}
            families["env_accepted_total" if name == "accepted" else f"env_{name}"] = _by("env", values)
        return "\n".join(line for name, samples in families.items() for line in _lines(name, samples)) + "\n"


def _by(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{label}="{_escaped(name)}"': value for name, value in values.items()}


def _lines(name: str, samples: float | Mapping[str, float]) -> Iterator[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    yield f"# TYPE tandem_broker_{name} {kind}"
    for labels, value in samples.items() if isinstance(samples, Mapping) else [("", samples)]:
        yield f"tandem_broker_{name}{f'{{{labels}}}' if labels else ''} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
