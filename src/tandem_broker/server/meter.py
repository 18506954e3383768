"""Counts what the broker does, and writes it in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from tandem_broker.queue.records import Report

LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Inclusive upper bounds of the lag histogram, in policy steps."""
Samples = Mapping[tuple[tuple[str, str], ...], float]


class Meter:
    """Counters of a running broker; they begin at 0 with it."""

    def __init__(self) -> None:
        self.totals = Counter(dict.fromkeys(("batches", "groups", "bytes", "accepted_bytes"), 0))
        """Batches, groups and bytes served; payload bytes accepted."""
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.refused: Counter[str] = Counter()
        self.lags = [0] * (len(LAGS) + 1)
        self.lag_sum = 0

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.answers[path, status] += 1
        self.seconds[path] += seconds

    def lag(self, steps: int) -> None:
        """Count a served group's policy steps between sampling and serving."""
        self.lags[bisect_left(LAGS, steps)] += 1
        self.lag_sum += steps

    def detail(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "served": {name: self.totals[name] for name in ("batches", "groups", "bytes")},
            "lag": {"bounds": LAGS, "counts": self.lags},
            "refused": dict(self.refused),
        }

    def prometheus(self, report: Report, received: int) -> str:
        """Write everything, given the queue's state and the bytes of bodies read."""
        groups = {"queued": report.queued_groups, "buffered": report.buffered_groups, "leased": report.leased_groups}
        envs: dict[str, Counter[str]] = {
            name: Counter() for name in ("queued_groups", "queued_sequences", "buffered_sequences", "held_bytes",
                                         "connected", "accepted")
        }  # fmt: skip
        for name, values in envs.items():
            for env in report.envs:  # those of one name count as one: Prometheus refuses what is there twice
                values[env.name] += int(getattr(env, name))
        seen = [sum(self.lags[: place + 1]) for place in range(len(self.lags))]
        buckets = zip((*map(str, LAGS), "+Inf"), seen, strict=True)
        families: list[tuple[str, str, Samples]] = [
            ("step", "gauge", {(): report.step}),
            ("policy_step", "gauge", {(): report.policy}),
            ("groups", "gauge", _by("state", groups)),
            ("held_bytes", "gauge", {(): report.held_bytes}),
            ("leases", "gauge", {(): report.leases}),
            ("groups_total", "counter", _by("event", report.counts)),
            ("served_batches_total", "counter", {(): self.totals["batches"]}),
            ("served_groups_total", "counter", {(): self.totals["groups"]}),
            ("served_bytes_total", "counter", {(): self.totals["bytes"]}),
            ("accepted_bytes_total", "counter", {(): self.totals["accepted_bytes"]}),
            ("received_bytes_total", "counter", {(): received}),
            ("lag_steps_bucket", "counter", _by("le", dict(buckets))),
            ("lag_steps_sum", "counter", {(): self.lag_sum}),
            ("lag_steps_count", "counter", {(): seen[-1]}),
            ("refused_total", "counter", _by("reason", self.refused)),
            ("requests_total", "counter", {(("path", p), ("status", str(s))): n for (p, s), n in self.answers.items()}),
            ("request_seconds_total", "counter", _by("path", self.seconds)),
            *(
                ("env_accepted_total", "counter", _by("env", values))
                if name == "accepted"
                else (f"env_{name}", "gauge", _by("env", values))
                for name, values in envs.items()
            ),
        ]
        return "\n".join(line for family in families for line in _lines(*family)) + "\n"


def _by(label: str, values: Mapping[str, float]) -> Samples:
    return {((label, name),): value for name, value in values.items()}


def _lines(name: str, kind: str, samples: Samples) -> Iterator[str]:
    yield f"# TYPE tandem_broker_{name} {kind}"
    for labels, value in samples.items():
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
        yield f"tandem_broker_{name}{f'{{{inside}}}' if inside else ''} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
