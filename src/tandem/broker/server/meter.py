"""Counters of a broker, and their text for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tandem.broker.queue.records import EnvReport, Report

LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the classes of latency, in seconds."""
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Upper bounds of the classes of lag, in policy steps."""


class BucketHistogram:
    """Counts by class."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper ends of the classes, inclusive; one more class takes what is above them."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Meter:
    """Counters of a running broker; they begin at 0 with it."""

    def __init__(self) -> None:
        self.latency: dict[str, BucketHistogram] = {}
        """Seconds from a request's head to its answer, by path."""
        self.answers: Counter[tuple[str, int]] = Counter()
        """Requests by path and status."""
        self.refused: Counter[str] = Counter()
        """Requests refused by reason."""
        self.lag = BucketHistogram(LAGS)
        """Policy steps between sampling and serving, of each group served."""
        self.served_batches = 0
        """Batches served."""
        self.served_groups = 0
        """Groups served."""
        self.served_bytes = 0
        """Bytes of batches served, before compression."""
        self.accepted_bytes = 0
        """Payload bytes of groups accepted."""

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.answers[path, status] += 1
        histogram = self.latency.get(path)
        if histogram is None:
            histogram = self.latency[path] = BucketHistogram(LATENCIES)
        histogram.add(seconds)

    def detail(self) -> dict[str, Any]:
        """What was served and refused, as plain data."""
        return {
            "served": {"batches": self.served_batches, "groups": self.served_groups, "bytes": self.served_bytes},
            "lag": {"bounds": self.lag.bounds, "counts": self.lag.counts},
            "refused": dict(self.refused),
        }

    def prometheus(self, report: Report, received: int) -> str:
        """Everything in Prometheus' text format.

        Args:
            report: the store's state.
            received: bytes of bodies read.
        """
        return "\n".join([*self._totals(report, received), *_environments(report), *self._requests()]) + "\n"

    def _totals(self, report: Report, received: int) -> Iterator[str]:
        yield from _family("step", "gauge", "Batches served, from the starting step.", [("", report.step)])
        yield from _family("policy_step", "gauge", "Policy step that groups are stamped with.", [("", report.policy)])
        held = [
            (_labels(state=state), count)
            for state, count in (
                ("queued", report.queued_groups),
                ("buffered", report.buffered_groups),
                ("leased", report.leased_groups),
            )
        ]
        yield from _family("groups", "gauge", "Groups held, by state.", held)
        yield from _family("held_bytes", "gauge", "Payload bytes held.", [("", report.held_bytes)])
        yield from _family("leases", "gauge", "Batches leased and not acknowledged.", [("", report.leases)])
        counts = [(_labels(event=name), count) for name, count in report.counts.items()]
        yield from _family("groups_total", "counter", "Groups since the ledger began, by what became of them.", counts)
        for name, count, text in (
            ("served_batches_total", self.served_batches, "Batches served."),
            ("served_groups_total", self.served_groups, "Groups served."),
            ("served_bytes_total", self.served_bytes, "Bytes of batches served, before compression."),
            ("accepted_bytes_total", self.accepted_bytes, "Payload bytes of groups accepted."),
            ("received_bytes_total", received, "Bytes of bodies received, as sent."),
        ):
            yield from _family(name, "counter", text, [("", count)])
        yield from _histogram("lag_steps", "Policy steps between sampling and serving.", [("", self.lag)])

    def _requests(self) -> Iterator[str]:
        refused = [(_labels(reason=reason), count) for reason, count in sorted(self.refused.items())]
        yield from _family("refused_total", "counter", "Requests refused, by reason.", refused)
        answers = [
            (_labels(path=path, status=str(status)), count) for (path, status), count in sorted(self.answers.items())
        ]
        yield from _family("requests_total", "counter", "Requests answered.", answers)
        latencies = [(f'path="{_escaped(path)}"', histogram) for path, histogram in sorted(self.latency.items())]
        yield from _histogram("request_seconds", "Seconds to answer a request.", latencies)


def _environments(report: Report) -> Iterator[str]:
    """Those of one name, as some are after a reset, are one to Prometheus, which refuses what is there twice."""
    by_name: dict[str, list[EnvReport]] = {}
    for env in report.envs:
        by_name.setdefault(env.name, []).append(env)
    for name, kind, text, of in (
        ("env_queued_groups", "gauge", "Groups queued, by environment.", lambda env: env.queued_groups),
        ("env_queued_sequences", "gauge", "Sequences queued, by environment.", lambda env: env.queued_sequences),
        ("env_buffered_sequences", "gauge", "Sequences buffered.", lambda env: env.buffered_sequences),
        ("env_held_bytes", "gauge", "Payload bytes held, by environment.", lambda env: env.held_bytes),
        (
            "env_connected",
            "gauge",
            "Environments of this name heard from lately.",
            lambda env: int(env.connected),
        ),
        ("env_accepted_total", "counter", "Groups accepted, by environment.", lambda env: env.accepted),
    ):
        yield from _family(
            name, kind, text, [(_labels(env=env), sum(map(of, alike))) for env, alike in by_name.items()]
        )


def _family(name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP tandem_broker_{name} {text}"
    yield f"# TYPE tandem_broker_{name} {kind}"
    for labels, value in values:
        yield f"tandem_broker_{name}{labels} {value}"


def _histogram(name: str, text: str, histograms: Iterable[tuple[str, BucketHistogram]]) -> Iterator[str]:
    yield f"# HELP tandem_broker_{name} {text}"
    yield f"# TYPE tandem_broker_{name} histogram"
    for labels, histogram in histograms:
        comma = f"{labels}," if labels else ""
        seen = 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            seen += count
            yield f'tandem_broker_{name}_bucket{{{comma}le="{bound}"}} {seen}'
        own = f"{{{labels}}}" if labels else ""
        yield f"tandem_broker_{name}_sum{own} {histogram.total}"
        yield f"tandem_broker_{name}_count{own} {seen}"


def _labels(**values: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
