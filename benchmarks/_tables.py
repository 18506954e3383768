"""How the sync benchmark tells what it found."""

from __future__ import annotations

from typing import Any

PHASES = (
    "pause",
    "optimizer",
    "fold",
    "save",
    "move",
    "sum here",
    "sum there",
    "probe there",
    "probe here",
    "stamp",
    "resume",
    "in all",
    "still",
)
"""Of a publish, in their order; still is the time without sampling beyond the optimizer's own."""


def report(name: str, result: dict[str, Any]) -> None:
    """One way's table."""
    print(f"\n== {name}, {result['shape']}, {result['requests']} requests in flight")
    for key, value in result.items():
        if key == "ms":
            print(f"   {'phase, ms':<34}{'median':>10}{'p99':>10}{'largest':>10}")
            for phase, (median, high, largest) in value.items():
                print(f"     {phase:<32}{median:>10.2f}{high:>10.2f}{largest:>10.2f}")
        elif key == "memory":
            names = list(dict.fromkeys(n for moment in value.values() for n in moment))
            print(f"   {'memory, GB':<34}" + "".join(f"{moment:>18}" for moment in value))
            for row in names:
                cells = (f"{moment[row]:>18.3f}" if row in moment else f"{'':>18}" for moment in value.values())
                print(f"     {row:<32}" + "".join(cells))
        elif not key.endswith(", each"):
            print(f"   {key:<44} {value}")
    print(flush=True)


def compare(results: dict[str, dict[str, Any]]) -> None:
    """Speeds side by side."""
    base = results.get("plain", {}).get("tokens/s unbound, tandem")
    print(
        f"\n{'way':<16}{'stock route':>13}{'unbound':>10}{'bound':>10}{'bound/plain':>13}{'still, ms':>18}{'failed':>8}"
    )
    for name, result in results.items():
        bound = result.get("tokens/s bound, tandem")
        share = f"{bound / base:.3f}" if bound and base else ""
        still = result.get("ms", {}).get("still")
        print(
            f"{name:<16}{result.get('tokens/s unbound, stock', ''):>13}{result.get('tokens/s unbound, tandem', ''):>10}"
            f"{bound or '':>10}{share:>13}{f'{still[0]:.1f} / {still[1]:.1f}' if still else '':>18}"
            f"{result.get('failed', ''):>8}"
        )
