"""What a publish over a process group costs, phase by phase, without an engine: a trainer and a worker, one card each.

    python benchmarks/_wire.py                         # two cards, NCCL, the shape of Qwen2.5-3B
    python benchmarks/_wire.py --device cpu --layers 2 # here and now, gloo, a small shape

The worker's end is the one that runs in vLLM, on weights that are fused as vLLM fuses them; in place of HTTP there is a
pipe. Every publish of the last round is compared with what was sent. Lines of JSON; milliseconds are medians, phases:
ready (until everybody stands ready), wire (until the last byte is here), done (until everybody has said so).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from tandem.engines.vllm.worker.extension import WorkerExtension
from tandem.engines.vllm.worker.parameter_map import TensorPlace
from tandem.transport.buckets import manifest
from tandem.transport.collective import Member, _from_rank_0
from tandem.transport.rendezvous import Rendezvous

RANK = 32
"""Of the adapter."""
FUSED = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"), "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Parts of a layer's name, and what they are in vLLM."""


def shapes(layers: int, scale: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of Qwen2.5-3B, every width divided by ``scale``."""
    hidden, wide, keys = 2048 // scale, 11008 // scale, 256 // scale
    yield "model.embed_tokens.weight", (151936 // scale, hidden)
    for i in range(layers):
        at = f"model.layers.{i}"
        for part, rows in (("q", hidden), ("k", keys), ("v", keys)):
            yield f"{at}.self_attn.{part}_proj.weight", (rows, hidden)
            yield f"{at}.self_attn.{part}_proj.bias", (rows,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}.mlp.gate_proj.weight", (wide, hidden)
        yield f"{at}.mlp.up_proj.weight", (wide, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, wide)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def adapter_shapes(layers: int, scale: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Its adapter on all linear layers."""
    for name, shape in shapes(layers, scale):
        if "_proj.weight" in name:
            at = f"base_model.model.{name.removesuffix('.weight')}"
            yield f"{at}.lora_A.default.weight", (RANK, shape[1])
            yield f"{at}.lora_B.default.weight", (shape[0], RANK)


class Fused(nn.Module):
    """Storage as vLLM has it: queries, keys and values are rows of one tensor, and so are gate and up."""

    def __init__(self, named: list[tuple[str, tuple[int, ...]]], device: torch.device):
        super().__init__()
        groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in named:
            fused = name
            for part, one in FUSED.items():
                fused = fused.replace(part, one)
            groups.setdefault(fused, []).append((name, shape))
        self.tensors = nn.ParameterList()
        self.places: dict[str, list[TensorPlace]] = {}
        for fused, parts in groups.items():
            whole = torch.zeros(sum(s[0] for _, s in parts), *parts[0][1][1:], dtype=torch.bfloat16, device=device)
            self.tensors.append(nn.Parameter(whole, requires_grad=False))
            row = 0
            for name, shape in parts:
                view = self.tensors[-1].data[row : row + shape[0]]
                place = TensorPlace(tensor=view, parameter=fused, first=(0, 0), shape=shape, counted=True)
                self.places[name] = [place]
                row += shape[0]


class Adapters:
    """In place of vLLM's adapter slots."""

    def __init__(self, named: list[tuple[str, tuple[int, ...]]], device: torch.device):
        self.views = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in named}

    def put(self, lora_id: int, config: Any, tensors: dict[str, Tensor]) -> None:
        torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()))


class Receiver(WorkerExtension):
    """The engine's worker, around such storage."""

    tandem_rank, tandem_world = 0, 1

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.fused = Fused(list(shapes(args.layers, args.scale)), device)
        self.adapters = Adapters(list(adapter_shapes(args.layers, args.scale)), device)

    @property
    def tandem_model(self) -> nn.Module:
        return self.fused

    def tandem_places(self) -> dict[str, list[TensorPlace]]:
        return self.fused.places

    def _tandem_in_place(self) -> Any:
        return self.adapters

    def held(self, adapter: bool) -> dict[str, Tensor]:
        """What it samples from."""
        return self.adapters.views if adapter else {name: p[0].tensor for name, p in self.fused.places.items()}


def where(args: argparse.Namespace, rank: int) -> torch.device:
    if args.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def worker(args: argparse.Namespace, pipe: Any) -> None:
    """The other process: publishes until it is told to end."""
    receiver = Receiver(args, where(args, 1))
    receiver.tandem_connect(pipe.recv(), 1)
    while receiver.tandem_connection()["state"] == "connecting":
        time.sleep(0.01)
    pipe.send(receiver.tandem_connection())
    while (message := pipe.recv()) is not None:
        method, arguments = message
        if method == "sums":
            pipe.send(sums(receiver.held(arguments)))
            continue
        begin = time.perf_counter()
        receiver.tandem_receive(*arguments)
        joining = receiver._tandem_joining
        assert joining is not None
        assert joining.member is not None
        pipe.send({**joining.member.last._asdict(), "call": time.perf_counter() - begin})
    receiver.tandem_disconnect()


def sums(named: dict[str, Tensor]) -> dict[str, int]:
    """Of the bytes, each weighted by its place."""
    out = {}
    for name, tensor in named.items():
        bits = tensor.detach().bfloat16().contiguous().view(torch.int16).reshape(-1).long()
        out[name] = int((bits * (torch.arange(bits.numel(), device=bits.device) % 8191 + 1)).sum())
    return out


def trained(named: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in named}


def publishes(args: argparse.Namespace, device: torch.device, tell: Callable[..., None]) -> None:
    """A pair in two processes, and what they say."""
    backend: Any = "nccl" if device.type == "cuda" else "gloo"
    here, there = mp.Pipe()
    process = mp.get_context("spawn").Process(target=worker, args=(args, there), daemon=True)
    process.start()
    member = Member.host(Rendezvous(host="127.0.0.1", world=2, backend=backend, seconds=60), device)
    here.send(json.dumps(asdict(member.rendezvous)))
    member.connect()
    state = here.recv()
    assert state["state"] == "connected", state
    cases = [("weights", shapes, torch.bfloat16), ("adapter", adapter_shapes, torch.float32)]
    cases.append(("adapter, bfloat16", adapter_shapes, torch.bfloat16))
    for case, kind, dtype in cases:
        adapter = kind is adapter_shapes
        named = trained(list(kind(args.layers, args.scale)), dtype, device)
        rows: list[dict[str, float]] = []
        for _ in range(args.publishes + 2):
            for tensor in named.values():
                tensor.neg_()
            if device.type == "cuda":
                torch.cuda.synchronize()
            rows.append(publish(args, member, here, named, adapter))
        here.send(("sums", adapter))
        assert here.recv() == sums(named), f"{case}: what arrived is not what was sent"
        size = sum(t.nbytes for t in named.values())
        ms = {key: round(1000 * median(row[key] for row in rows[2:]), 3) for key in rows[0]}
        rate = {f"GB_per_s_{key}": round(size / ms[key] / 1e6, 1) for key in ("all", "wire")}
        first = round(1000 * rows[0]["all"], 1)
        tell(case=case, tensors=len(named), MB=round(size / 1e6, 1), ms=ms, first_ms=first, **rate)
    here.send(None)
    process.join(30)
    member.close()


def publish(args: argparse.Namespace, member: Any, pipe: Any, named: dict[str, Tensor], adapter: bool) -> Any:
    """One publish; seconds by phase, of both ends."""
    begin = time.perf_counter()
    entries = json.dumps([(e.name, e.shape, e.dtype) for e in manifest(named.items())])
    pipe.send(("receive", (entries, args.bucket_mb << 20, int(adapter), "{}" if adapter else "null")))
    announced = time.perf_counter() - begin
    member.send(named.items(), args.bucket_mb << 20)
    sent = time.perf_counter() - begin
    there = pipe.recv()
    seconds = {
        "all": time.perf_counter() - begin,
        "telling": announced,
        "send": sent - announced,
        **member.last._asdict(),
    }
    return seconds | {f"worker {key}": value for key, value in there.items()}


# The wire alone


def bare(rank: int, args: argparse.Namespace, address: str) -> None:
    """torch's broadcast of the same weights: in large buckets, tensor by tensor, and tensors in one call of NCCL."""
    import torch.distributed as dist

    device = where(args, rank)
    kind: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=2, **kind)
    sizes = [2 * torch.Size(shape).numel() for _, shape in shapes(args.layers, args.scale)]
    whole = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    group: Any = dist.distributed_c10d._get_default_group()._get_backend(device)

    def each(pieces: tuple[Tensor, ...]) -> None:
        for piece in pieces:
            dist.broadcast(piece, 0)

    def together(pieces: tuple[Tensor, ...]) -> None:
        bucket: list[Tensor] = []
        for last, piece in zip(range(len(pieces), 0, -1), pieces, strict=True):
            bucket.append(piece)
            if last == 1 or sum(map(Tensor.numel, bucket)) >= args.bucket_mb << 20:
                group._start_coalescing()
                for some in bucket:
                    _from_rank_0(group, some)
                group._end_coalescing().wait()
                bucket.clear()

    cases = {f"bare, pieces of {mb} MiB": (each, whole.split(mb << 20)) for mb in (8, 32, 64, 256, 1024)}
    cases["bare, tensor by tensor"] = (each, whole.split(sizes))
    if device.type == "cuda":
        cases[f"bare, tensors in calls of {args.bucket_mb} MiB"] = (together, whole.split(sizes))
    for case, (send, pieces) in cases.items():
        seconds = []
        for _ in range(args.publishes // 2 + 2):
            dist.barrier()
            begin = time.perf_counter()
            send(pieces)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        if rank == 0:
            ms = median(seconds[2:])
            print_line(args)(case=case, ms=round(1000 * ms, 3), GB_per_s=round(whole.nbytes / ms / 1e9, 1))
    dist.destroy_process_group()


def print_line(args: argparse.Namespace) -> Callable[..., None]:
    def tell(**data: Any) -> None:
        line = json.dumps({"part": "wire", **data})
        print("  ", line, flush=True)
        if args.out is not None:
            with (args.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    return tell


def main() -> int:
    from tandem.ports import free_port

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--scale", type=int, default=0, help="widths are divided by it; by default 1, on a CPU 16")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--publishes", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.scale = args.scale or (16 if args.device == "cpu" else 1)
    publishes(args, where(args, 0), print_line(args))
    spawn(bare, args=(args, f"tcp://127.0.0.1:{free_port()}"), nprocs=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
