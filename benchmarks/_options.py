"""What the sync benchmarks may be told, and what they do where they are not told."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _models import SHAPES

WAYS = ("plain", "shared", "merged", "shared-lora", "hotswap", "broadcast", "broadcast-lora")


def options(about: str) -> argparse.ArgumentParser:
    """What every use of an engine here may be told."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2.5-3b")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--python", help="interpreter that has vLLM; by default this one")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--requests", type=int, help="kept in flight; 128, on a CPU 8")
    parser.add_argument("--tokens", type=int, help="of each request; 256, on a CPU 32")
    parser.add_argument("--publishes", type=int, help="100, on a CPU 5")
    parser.add_argument("--between", type=float, default=0.1, help="seconds between two publishes")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds of load before the first")
    parser.add_argument("--waves", type=int, default=1, help="requests one after another in a measurement of speed")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of speed")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--versions", type=int, default=4, help="adapters that requests in flight may need at once")
    parser.add_argument("--swaps", type=int, help="of the way swaps; 1000, on a CPU 20")
    parser.add_argument("--swap-seconds", type=float, default=420.0, help="the most that swaps may take")
    parser.add_argument("--samples", type=int, default=64, help="answers of swaps that are compared")
    parser.add_argument("--verify-every", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.0, help="nats of a probe; random deep models are noisy")
    parser.add_argument("--utilization", type=float, default=0.4, help="gpu_memory_utilization")
    parser.add_argument("--kv-cache-gb", type=float, default=0.0, help="instead of what utilization leaves")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, help="no CUDA graphs")
    parser.add_argument("--devices", default="", help="CUDA_VISIBLE_DEVICES of the engine")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="of a broadcast")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="for the model and what travels through files")
    parser.add_argument("--json", type=Path, help="append results here")
    parser.add_argument("--verbose", action="store_true")
    return parser


def completed(args: argparse.Namespace) -> argparse.Namespace:
    """Defaults that depend on the machine."""
    cuda = torch.cuda.is_available()
    defaults = {"requests": (128, 8), "tokens": (256, 32), "publishes": (100, 5), "swaps": (1000, 20)}
    for name, (gpu, cpu) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, gpu if cuda else cpu)
    args.eager = not cuda if args.eager is None else args.eager
    if cuda and args.backend == "auto" and torch.cuda.device_count() < 2:
        args.backend = "gloo"  # NCCL refuses two ranks on one card
    return args
