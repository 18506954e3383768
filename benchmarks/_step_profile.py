"""Where each millisecond of a profiled step goes, by kind of kernel, beside the least that it could take."""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _versus import PEAK_FLOPS

PEAK_BYTES = 4.8e12
"""Of an H200's memory, a second, by its datasheet."""
LARGEST = 15 << 20
"""Bytes of a trace that is kept."""
RANGES = {
    "optimizer": re.compile(r"^optimizer$"),
    "logprobs": re.compile(r"logprob|crossentropy", re.IGNORECASE),
    "gradients": re.compile(r"AccumulateGrad"),
}
"""Kernels launched within such a range of the host's are of this kind."""
KINDS = {
    "collectives": re.compile(r"nccl", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|attention|sdpa|varlen", re.IGNORECASE),
    "products": re.compile(
        r"gemm|nvjet|cutlass|cublas|xmma|wgmma|matmul|splitk|scaled_mm|aten::(mm|addmm)", re.IGNORECASE
    ),
    "copies": re.compile(r"memcpy|memset|copy|CatArray|aten::cat", re.IGNORECASE),
}
"""The rest goes by the kernel's name; what is left are norms and elementwise kernels."""
REST = "elementwise"


def measured(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds by kind, and the gaps in which the device had nothing to do."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")] or _leaves(events)
    if not device:
        raise SystemExit("the profile holds no kernels")
    within = _within(events)
    totals: dict[str, float] = defaultdict(float)
    names: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for event in device:
        kind = within(event) or _kind(event)
        totals[kind] += event["dur"] / 1e3
        entry = names[kind][event["name"]]
        entry[0] += event["dur"] / 1e3
        entry[1] += 1
    busy, span = _busy(device)
    largest = {
        kind: [
            {"kernel": name[:100], "ms": round(ms, 3), "times": int(times)}
            for name, (ms, times) in sorted(kernels.items(), key=lambda item: -item[1][0])[:6]
        ]
        for kind, kernels in names.items()
    }
    return {"ms": dict(totals), "idle_ms": span - busy, "span_ms": span, "launches": len(device), "largest": largest}


def _kind(event: Mapping[str, Any]) -> str:
    if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
        return "copies"
    return next((kind for kind, pattern in KINDS.items() if pattern.search(event["name"])), REST)


def _within(events: Iterable[Mapping[str, Any]]) -> Any:
    """A function from a kernel to the kind of the host's range that launched it, if it is one that counts."""
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launches[event.get("args", {}).get("correlation")] = event
        elif event.get("cat") in ("cpu_op", "user_annotation"):
            kind = next((kind for kind, pattern in RANGES.items() if pattern.search(event["name"])), None)
            if kind is not None:
                ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], kind))
    for of_thread in ranges.values():
        of_thread.sort()

    def within(event: Mapping[str, Any]) -> str | None:
        launch = launches.get(event.get("args", {}).get("correlation"), event)
        thread_ranges = ranges.get(launch["tid"], [])
        at = bisect.bisect_right(thread_ranges, (launch["ts"], float("inf"), ""))
        # Ranges of one kind lie within one another: the latest that began before may have ended.
        return next(
            (kind for begin, end, kind in reversed(thread_ranges[max(0, at - 4) : at]) if launch["ts"] <= end), None
        )

    return within


def _leaves(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """On a CPU: operators that call no other."""
    ops = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    return [
        op
        for op, after in zip(ops, [*ops[1:], {"tid": None, "ts": 0}], strict=True)
        if not (after["tid"] == op["tid"] and after["ts"] < op["ts"] + op["dur"])
    ]


def _busy(device: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Milliseconds in which anything ran, and from the first beginning to the last end."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in device)
    busy, end = 0.0, spans[0][0]
    for begin, until in spans:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return busy / 1e3, (end - spans[0][0]) / 1e3


def floor(config: Any, work: Mapping[str, int]) -> dict[str, float]:
    """Least milliseconds of each kind: operations over the card's peak, or bytes over its memory's.

    Args:
        config: of the model (transformers).
        work: tokens (computed), pairs (of a token and one that it sees), trained (tokens), parameters (trained),
            state_bytes (of the optimizer), weight_bytes, micro_batches.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    linear = layers * (hidden * (2 * queries + 2 * keys) + 3 * hidden * inner)
    # Forward, and twice as much backward: norms, residuals, rotation, gate; each input read and output written once.
    values = 3 * layers * (10 * hidden + 2 * (queries + 2 * keys) + 3 * inner)
    return {
        "products": 1e3 * 6 * linear * work["tokens"] / PEAK_FLOPS,
        "attention": 1e3 * 12 * queries * layers * work["pairs"] / PEAK_FLOPS,
        "logprobs": 1e3 * 6 * hidden * config.vocab_size * work["trained"] / PEAK_FLOPS,
        REST: 1e3 * 2 * values * work["tokens"] / PEAK_BYTES,
        "gradients": 1e3 * 10 * work["parameters"] * work["micro_batches"] / PEAK_BYTES,
        "optimizer": 1e3 * (2 * work["state_bytes"] + 2 * work["weight_bytes"] + 4 * work["parameters"]) / PEAK_BYTES,
    }


def pairs(lengths: Sequence[int], parents: Sequence[int | None]) -> int:
    """Pairs of a token of a packed row and one that it sees, itself included."""
    before: list[int] = []
    for parent in parents:
        before.append(0 if parent is None else before[parent] + lengths[parent])
    return sum(n * b + n * (n + 1) // 2 for n, b in zip(lengths, before, strict=True))


def kept(trace: Mapping[str, Any], file: Path) -> int:
    """Write the device's own events, gzipped, as many as there is room for; their number."""
    wanted = [
        {"ph": "X", "pid": 0, "tid": e.get("tid", 0), "name": e["name"][:120], "ts": e["ts"], "dur": e["dur"]}
        for e in trace["traceEvents"]
        if e.get("ph") == "X"
        and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation", "cpu_op")
        and (e["cat"] != "cpu_op" or any(p.search(e["name"]) for p in RANGES.values()))
    ]
    while True:
        file.write_bytes(gzip.compress(json.dumps({"traceEvents": wanted}).encode(), 6))
        if file.stat().st_size <= LARGEST:
            return len(wanted)
        wanted = wanted[: len(wanted) // 2]


def table(profile: Mapping[str, Any]) -> str:
    """Kinds by their time, with the least that each could take."""
    ms, least = profile["ms"], profile["floor_ms"]
    rows = [f"{'kind':<14}{'ms':>10}{'share':>9}{'floor ms':>10}{'over':>8}"]
    for kind, took in sorted(ms.items(), key=lambda item: -item[1]):
        floor_ms = least.get(kind)
        over = f"{floor_ms:>10.1f}{took / floor_ms:>7.2f}x" if floor_ms else f"{'-':>10}{'-':>8}"
        rows.append(f"{kind:<14}{took:>10.1f}{100 * took / profile['span_ms']:>8.1f}%{over}")
    rows.append(f"{'idle':<14}{profile['idle_ms']:>10.1f}{100 * profile['idle_ms'] / profile['span_ms']:>8.1f}%")
    rows.append(f"{'in all':<14}{profile['span_ms']:>10.1f}{'':>9}{sum(least.values()):>10.1f}")
    rows += [
        f"   {kind}: {top['ms']:.1f} ms in {top['times']}, {top['kernel']}"
        for kind, tops in profile["largest"].items()
        for top in tops[:2]
    ]
    return "\n".join(rows)
