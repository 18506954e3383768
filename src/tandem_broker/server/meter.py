"""Counts what the broker does, and writes it in Prometheus' text format."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from tandem_broker.queue.records import Report

LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Inclusive upper bounds of the lag histogram, in policy steps."""


class Meter:
    """Counters of a running broker; they begin at 0 with it."""

    def __init__(self) -> None:
        self.totals = Counter(dict.fromkeys(("batches", "groups", "bytes", "accepted_bytes"), 0))
        """Batches, groups and bytes served; payload bytes accepted."""
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.refused: Counter[str] = Counter()
        self.lags: Counter[int] = Counter()
        """Served groups by the policy steps between sampling and serving, up to the first beyond ``LAGS``."""
        self.lag_sum = 0

    def lag(self, steps: int) -> None:
        """Count a served group's policy steps between sampling and serving."""
        self.lags[min(steps, LAGS[-1] + 1)] += 1
        self.lag_sum += steps

    def prometheus(self, report: Report, received: int) -> str:
        """Write everything, given the queue's state and the bytes of bodies read."""
        groups = {"queued": report.queued_groups, "buffered": report.buffered_groups, "leased": report.leased_groups}
        lags = {str(bound): sum(n for lag, n in self.lags.items() if lag <= bound) for bound in LAGS}
        requests = {f'path="{path}",status="{status}"': count for (path, status), count in self.answers.items()}
        families: dict[str, float | Mapping[str, float]] = {
            "step": report.step,
            "policy_step": report.policy,
            "groups": _by("state", groups),
            "held_bytes": report.held_bytes,
            "leases": report.leases,
            "groups_total": _by("event", report.counts),
            **{f"served_{name}_total": self.totals[name] for name in ("batches", "groups", "bytes")},
            "accepted_bytes_total": self.totals["accepted_bytes"],
            "received_bytes_total": received,
            "lag_steps_bucket": _by("le", {**lags, "+Inf": self.lags.total()}),
            "lag_steps_sum": self.lag_sum,
            "lag_steps_count": self.lags.total(),
            "refused_total": _by("reason", self.refused),
            "requests_total": requests,
            "request_seconds_total": _by("path", self.seconds),
        }
        for name in ("queued_groups", "queued_sequences", "buffered_sequences", "held_bytes", "connected", "accepted"):
            values: Counter[str] = Counter()
            for env in report.envs:  # several may have one name after a reset
                values[env["name"]] += int(env[name])
            families["env_accepted_total" if name == "accepted" else f"env_{name}"] = _by("env", values)
        return "\n".join(line for name, samples in families.items() for line in _lines(name, samples)) + "\n"


def _by(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{label}="{_escaped(name)}"': value for name, value in values.items()}


def _lines(name: str, samples: float | Mapping[str, float]) -> Iterator[str]:
    kind = "counter" if name.endswith(("_total", "_bucket", "_sum", "_count")) else "gauge"
    yield f"# TYPE tandem_broker_{name} {kind}"
    for labels, value in samples.items() if isinstance(samples, Mapping) else [("", samples)]:
        yield f"tandem_broker_{name}{f'{{{labels}}}' if labels else ''} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
