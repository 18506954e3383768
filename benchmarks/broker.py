"""Tandem's broker and Atropos' ``run-api`` beside each other, by the same client on the same machine.

    python benchmarks/broker.py [--parts rates,status,memory] [--minutes 10] [--json FILE]

``rates`` are of groups of 8 x 1,024 tokens with logprobs, as JSON and as JSON in gzip: accepted, served to a trainer
that polls, and both at once. ``status`` is the time of ``/status-env`` while 200 environments ask
ten times a second, with few and many groups queued. ``memory`` is that of the server while an environment produces ten
times what is trained. Tandem's ledger is on disk: what is accepted there survives the broker's death, while run-api has
no disk. Atropos' server is the one of ``.venv-atropos`` (bash scripts/setup).

The client is a process of its own; ``client`` is the share of a core that it used. ``a core second`` is the number of
groups for each second of a core that the server used, which other work on the machine changes less than the rate.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from _broker_client import Apart, Outcome, flood, poll
from _broker_servers import GZIP, JSON, SEQUENCES, Lane, Server, group, status_request

BATCH = 64
"""Sequences of a batch."""
FEW, MANY = 16, 10**9
SENDERS = 16
"""Connections that submit at once, each waiting for an answer before its next group."""
Row = dict[str, Any]


def bodies(lane: Lane, env_id: int) -> list[bytes]:
    """Some different groups, written in a lane."""
    return [lane.post("/scored_data", group(env_id, seed)) for seed in range(FEW)]


def report(row: Row, file: Path | None) -> Row:
    """Say a result, and keep it."""
    print("  " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
    return row


def checked(outcome: Outcome, server: Server, *fine: int) -> Outcome:
    """An outcome without refusals but those that are ``fine``."""
    if set(outcome.statuses) - {200, *fine}:
        raise RuntimeError(f"{server.name} answered {dict(outcome.statuses)}: {outcome.first!r}; {server.log_tail()}")
    return outcome


def rates(args: argparse.Namespace, name: str, lane: Lane) -> list[Row]:
    """Groups a second of one server in one lane: accepted, served, and both at once."""
    per_batch, seconds = BATCH // SEQUENCES, args.seconds
    rows: list[Row] = []

    def measured(what: str, begin: float, cpu: float, groups: int, *clients: Outcome) -> None:
        took = time.perf_counter() - begin
        row: Row = {"server": name, "lane": lane.name, "what": what, "rate": round(groups / took, 1)}
        row["a core second"] = round(groups / (server.cpu() - cpu), 1)
        row["client"] = round(sum(client.cpu for client in clients), 2)
        row["KB a group"] = round(clients[-1].received / 1e3 / max(groups, 1))
        rows.append(report(row, args.json))

    for both in (False, True):
        with Server(name, args.options) as server:
            (env_id,) = server.start_run(BATCH)
            posts, gets = bodies(lane, env_id), [lane.get("/batch")]
            flood(server.address, posts[:1], lines=1, count=per_batch, seconds=60)  # warm
            flood(server.address, gets, lines=1, count=1, seconds=60)
            now = (time.perf_counter(), server.cpu())
            most = MANY if both else args.groups  # what is served must not end with what was submitted
            putting = Apart(flood, server.address, posts, lines=SENDERS, count=most, seconds=seconds)
            if both:
                taking = Apart(flood, server.address, gets, lines=1, count=MANY, seconds=seconds, rate=200.0)
                # More may come than is taken, until the queue is full.
                took, put = checked(taking.result(), server), checked(putting.result(), server, 503)
                measured("end to end/s", *now, took.answers * per_batch, put, took)
                continue
            put = checked(putting.result(), server)
            measured("accepted/s", *now, put.answers, put)
            now = (time.perf_counter(), server.cpu())
            ready = put.answers // per_batch
            took = Apart(flood, server.address, gets, lines=1, count=ready, seconds=seconds).result()
            measured("served/s", *now, checked(took, server).answers * per_batch, took)
    return rows


def fill(server: Server, env_id: int, number: int, tokens: int = 8) -> int:
    """Queue small groups; how many are queued then."""
    size = min(number, 1000)
    groups = [group(env_id, seed, tokens=tokens) for seed in range(size)]
    whole, rest = divmod(number, size)
    made = flood(server.address, [JSON.post("/scored_data_list", groups)], lines=1, count=whole, seconds=600)
    if rest:
        flood(server.address, [JSON.post("/scored_data_list", groups[:rest])], lines=1, count=1, seconds=60)
    checked(made, server)
    return int(server.ask("/status", seconds=120)["queue_size"])


def status(args: argparse.Namespace, name: str, queued: int, fresh: bool) -> Row:
    """Times of /status-env of 200 environments, with so many groups queued."""
    with Server(name, args.options) as server:
        ids = server.start_run(BATCH, environments=200)  # nobody asks for a batch, so nothing leaves the queue
        filled = fill(server, ids[0], queued)
        requests = [status_request(i) for i in ids]
        cpu = server.cpu()
        seen = Apart(poll, server.address, requests, every=0.1, seconds=args.seconds, fresh=fresh).result()
        core = (server.cpu() - cpu) / seen.seconds
        checked(seen, server)
        ordered = sorted(seen.latencies) or [float("inf")]
        p50, p99 = (round(1e3 * ordered[int(share * (len(ordered) - 1))], 2) for share in (0.5, 0.99))
    row = {"server": name, "what": "/status-env", "queued": filled, "connections": "new" if fresh else "kept"}
    times = {"p50 ms": p50, "p99 ms": p99, "asked/s": round(seen.answers / seen.seconds)}
    times["of a core"] = round(core, 2)
    return report({**row, **times, "client": round(seen.cpu, 2)}, args.json)


def memory(args: argparse.Namespace, name: str) -> Row:
    """Megabytes of a server over time, while ten times as much is produced as is trained."""
    seconds, trained = args.minutes * 60, args.trained
    per_batch = BATCH // SEQUENCES
    with Server(name, [*args.options, *args.bounds]) as server:
        (env_id,) = server.start_run(BATCH)
        before = server.memory()
        posts = bodies(GZIP, env_id)
        putter = Apart(flood, server.address, posts, lines=2, count=MANY, seconds=seconds, rate=10 * trained)
        taker = Apart(
            flood, server.address, [JSON.get("/batch")], lines=1, count=MANY, seconds=seconds, rate=trained / per_batch
        )
        begin, samples = time.monotonic(), []
        while (passed := time.monotonic() - begin) < seconds:
            samples.append((round(passed), round(server.memory()), round(server.stored())))
            time.sleep(max(seconds / 40, 0.25))
        took, put = taker.result(), putter.result()
    half = samples[len(samples) // 2 :]
    row: Row = {"server": name, "what": "memory", "minutes": args.minutes, "before MB": round(before)}
    row |= {"accepted": put.answers, "put off": put.statuses[429] + put.statuses[503]}
    row |= {"served": took.answers * per_batch, "most MB": max(sample[1] for sample in samples)}
    row |= {"second half MB": (min(s[1] for s in half), max(s[1] for s in half)), "disk MB": samples[-1][2]}
    report(row, args.json)
    print("    seconds, MB, MB on disk: " + " ".join(str(s) for s in samples[:: max(1, len(samples) // 10)]))
    return row


def table(rows: list[Row]) -> None:
    """Rates side by side, and the goals."""
    rate = {(row["server"], row["lane"], row["what"]): row for row in rows if "lane" in row}
    head = ("run-api", "tandem", "ratio", "by CPU", "goal")
    print(f"\n{'groups of 8 x 1,024 a second':<32}" + "".join(f"{word:>10}" for word in head))
    for (name, lane, what), row in rate.items():
        if name != "tandem":
            continue
        base = rate.get(("run-api", lane, what), {})
        ratios = [f"{row[by] / base[by]:.1f}" if base else "" for by in ("rate", "a core second")]
        cells = (base.get("rate", ""), row["rate"], *ratios, ">= 2" if what == "end to end/s" else "")
        print(f"{lane + ', ' + what:<32}" + "".join(f"{cell:>10}" for cell in cells))
    for row in rows:
        if row["what"] == "/status-env":
            where = f"{row['queued']} queued, {row['connections']} connections"
            times = f"p50 {row['p50 ms']:>8} ms, p99 {row['p99 ms']:>8} ms (<= 20)"
            print(f"/status-env, {row['server']:<8} {where:<36} {times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="rates,status,memory", help="comma-separated")
    parser.add_argument("--servers", default="run-api,tandem", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement, at most")
    parser.add_argument(
        "--groups", type=int, default=3500, help="of a measurement of what is accepted and then served, at most"
    )
    parser.add_argument("--queued", default="10,1000,100000", help="groups, comma-separated")
    parser.add_argument("--minutes", type=float, default=0.5, help="of the measurement of memory")
    parser.add_argument("--trained", type=float, default=8.0, help="groups a second, in the measurement of memory")
    parser.add_argument("--options", default="", help="of tandem serve broker, space-separated")
    parser.add_argument("--bounds", default="", help="the same, of the measurement of memory")
    parser.add_argument("--json", type=Path, help="append results here")
    args = parser.parse_args()
    args.options, args.bounds = args.options.split(), args.bounds.split()
    rows: list[Row] = []
    for part in args.parts.split(","):
        for name in args.servers.split(","):
            print(f"== {part}, {name}", flush=True)
            if part == "rates":
                for lane in (JSON, GZIP):
                    rows += rates(args, name, lane)
            elif part == "status":
                for queued in args.queued.split(","):
                    rows += [status(args, name, int(queued), fresh) for fresh in (False, True)]
            else:
                rows.append(memory(args, name))
    table(rows)


if __name__ == "__main__":
    main()
