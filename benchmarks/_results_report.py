"""Records of runs as the tables of docs/design/results.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
Record = Mapping[str, Any]


def report(all_records: Sequence[Record]) -> str:
    """All tables for which there is something; a later record of a run replaces an earlier one."""
    records = list({record["name"]: record for record in all_records}.values())
    runs = [record for record in records if record["set"] != "equal"]
    by_set = {name: [r for r in runs if r["set"] == name] for name in dict.fromkeys(r["set"] for r in runs)}
    equal = [record for record in records if record["set"] == "equal"]
    texts = []
    for name, members in by_set.items():
        texts.append(f"### {name}\n\n{each(members)}")
        if name in ("tasks", "trl", "cpu"):
            texts.append(over_seeds(members))
        if name == "trl":
            texts.append(versus(members))
        if name == "long":
            texts += [processes(members), kills(members), equality(equal)]
        texts.append(commands(members))
    if unfinished := [r for r in runs if not r["done"]]:
        lines = (
            f"- {r['name']}: {r['steps_done']} of {r['steps']} steps; {r.get('error') or 'stopped'}" for r in unfinished
        )
        texts.append("### not done\n\n" + "\n".join(lines))
    return "\n\n".join(filter(None, texts))


def spark(values: Sequence[float], low: float = 0.0, high: float | None = None) -> str:
    """A curve as a line of bars, from ``low`` to the largest value."""
    top = max(values, default=0.0) if high is None else high
    span = top - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, max(0, int((v - low) / span * len(BARS))))] for v in values)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; nothing without rows."""
    rows = list(rows)
    lines = [f"| {' | '.join(row)} |" for row in ([*head], ["---"] * len(head), *rows)]
    return "\n".join(lines) if rows else ""


def number(value: float | None, digits: int = 2) -> str:
    """As text; a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Of one; a dash where nothing was measured."""
    return "-" if value is None else f"{100 * value:.1f}"


def interval(look: Mapping[str, Any]) -> str:
    """Percent right, with the 95 % interval."""
    low, high = look["mean_ci"]
    return f"{percent(look['mean'])} ({percent(low)} to {percent(high)})"


def looks(record: Record) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The evaluation before the first step and the one after the last; None where a run has none."""
    by_step = {look["step"]: look for look in record["held_out"]}
    return by_step.get(0), by_step.get(record["steps"])


def each(records: Sequence[Record]) -> str:
    """A row for each run."""
    head = ["run", "held out before, %", "after, % (95 %)", "reward", "from → to", "s a step", "still, ms", "publishes"]
    head += [
        "probe gap, median / max",
        "kl_behavior, median / max",
        "alarms",
        "proofs asked again, failed",
        "RSS, GB",
        "wall, s",
    ]
    rows = []
    for r in sorted(records, key=lambda r: (r["task"], r["trained"], r["way"], r["system"], r["seed"])):
        before, after = looks(r)
        curve = r["curves"].get("reward", [])
        ends = f"{number(curve[0])} → {number(curve[-1])}" if curve else "-"
        rss = r["memory"].get("memory/rss_gb")
        rows.append([
            r["name"].removeprefix(f"{r['set']}-"),
            interval(before) if before else "-",
            interval(after) if after else "-",
            spark(curve),
            ends,
            number(r["step_seconds"]),
            number(r["paused_ms"], 0),
            str(r["publishes"]),
            _spread(r["probe_gap"], 3),
            _spread(r["kl_behavior"], 5),
            str(len(r["alarms"])),
            f"{r['proofs_asked_again']}, {len(r['proofs_failed'])}",
            f"{rss[0]:.2f} → {rss[1]:.2f}" if rss else "-",
            number(r["training_seconds"], 0),
        ])  # fmt: skip
    notes = [f"- {r['name']}: {text}" for r in records for text in (*r["alarms"], *r["proofs_failed"])]
    return "\n\n".join(filter(None, [table(head, rows), "\n".join(notes)]))


def _spread(spread: Mapping[str, float] | None, digits: int) -> str:
    return f"{number(spread['median'], digits)} / {number(spread['max'], digits)}" if spread else "-"


def over_seeds(records: Sequence[Record]) -> str:
    """A row for each kind of run, its seeds together."""
    rows = []
    for (task, trained, way, system), members in grouped(records, "task", "trained", "way", "system"):
        constant = next((r["constant"] for r in members if r.get("constant") is not None), None)
        ends = [(a["mean"], b) for r in members for a, b in [looks(r)] if a and b]
        if not ends:
            continue
        afters = ", ".join(
            f"{percent(b['mean'])} ({percent(b['mean_ci'][0])} to {percent(b['mean_ci'][1])})" for _, b in ends
        )
        gain = statistics.fmean(b["mean"] - a for a, b in ends)
        befores = ", ".join(percent(a) for a, _ in ends)
        curves = [r["curves"]["reward"] for r in members if r["curves"].get("reward")]
        mean = [statistics.fmean(values) for values in zip(*curves, strict=False)]
        walls = [r["training_seconds"] for r in members if r["training_seconds"]]
        rows.append(
            [
                f"{task}, {trained}, {way}, {system}",
                str(len(ends)),
                percent(constant),
                befores,
                afters,
                f"{100 * gain:+.1f}",
                spark(mean),
            ]
        )
        rows[-1].append(number(statistics.fmean(walls), 0) if walls else "-")
    head = [
        "task, trained, way, system",
        "seeds",
        "best constant answer, %",
        "before, %",
        "after, % (95 %), of each seed",
        "mean gain, points",
    ]
    return table([*head, "reward, mean of seeds", "wall, s"], rows)


def grouped(records: Sequence[Record], *keys: str) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Records that agree in ``keys``, in the order of their first."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return list(groups.items())


def versus(records: Sequence[Record]) -> str:
    """Tandem's reward and TRL's at as many generated tokens, and after as many seconds."""
    rows = []
    for (task, seed), members in grouped(records, "task", "seed"):
        by_system = {r["system"]: r for r in members if r["curves"].get("reward")}
        if len(by_system) < 2:
            continue
        for label, axis, digits in (("tokens", "tokens_to", 0), ("seconds", "seconds_to", 1)):
            most = min(r[axis][-1] for r in by_system.values())
            values = [at(r, axis, most) for r in (by_system["tandem"], by_system["trl"])]
            rows.append([task, str(seed), f"{number(most, digits)} {label}", *(number(v, 3) for v in values)])
    return table(["task", "seed", "at equal", "reward, Tandem", "reward, TRL"], rows)


def at(record: Record, axis: str, most: float) -> float:
    """Mean reward of the last tenth of the run up to where ``axis`` reaches ``most``."""
    reached = [i for i, value in enumerate(record[axis]) if value <= most] or [0]
    curve = record["curves"]["reward"]
    ends = curve[max(0, reached[-1] - max(1, len(curve) // 10) + 1) : reached[-1] + 1]
    return statistics.fmean(ends)


def processes(records: Sequence[Record]) -> str:
    """Memory of each process of long runs."""
    rows = []
    for r in records:
        for life in r.get("processes", ()):
            gb, own = (f"{a:.3f} → {b:.3f}" for a, b in (life["gb"], life["own_gb"]))
            rows.append([r["name"], life["role"], f"{life['steps'][0]} to {life['steps'][1]}", gb, own])
            rows[-1].append("-" if life["growth"] is None else f"{100 * life['growth']:+.1f}")
    head = ["run", "process", "steps", "resident, GB", "its own, GB", "growth of the resident, %"]
    return table(head, rows)


def kills(records: Sequence[Record]) -> str:
    """What was killed, and when."""
    rows = [
        [r["name"], kill["what"], str(kill["step"]), str(r["resumed"])] for r in records for kill in r.get("kills", ())
    ]
    return table(["run", "killed", "at step", "resumes in all"], rows)


def equality(records: Sequence[Record]) -> str:
    """How long runs had the same tokens and weights."""
    rows = [[*r["of"], str(r["answers"]), str(r["weights"]), str(r["last"])] for r in records]
    return table(["one run", "another", "same tokens up to step", "same weights, bit for bit, up to step", "of"], rows)


def commands(records: Sequence[Record]) -> str:
    """How to run each of them."""
    first: Callable[[Record], Any] = lambda r: (r["task"], r["trained"], r["way"], r["system"])  # noqa: E731
    chosen = {first(r): r for r in reversed(records)}
    return "```bash\n" + "\n".join(r["command"] for r in reversed(chosen.values())) + "\n```"
