"""Parts of a recipe by ms-swift's arguments: data, rewards and engine, optimizer and what is saved and shown."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from tandem.errors import RewardError, raised
from tandem.ports import http_url
from tandem.types import Json
from tandem_compat.schedules import put_loggers
from tandem_compat.sharding import Shard
from tandem_compat.swift.datasets import KIND as ROWS
from tandem_compat.swift.datasets import TAGGED, SwiftDataset
from tandem_compat.swift.plugin import KIND as PLUGIN
from tandem_compat.swift.plugin import registered
from tandem_compat.swift.rewards import NAMES, built_in
from tandem_compat.table import Reader

COMPLETIONS = "tandem_compat.swift.completions:CompletionsFile"
"""The logger that writes completions.jsonl."""


def datasets(args: Reader) -> None:
    """Set ``env``, or ``envs`` of several data sets, drawn from as if they were one: in proportion to their rows."""
    names, validation = args["dataset"] or [], args["val_dataset"] or []
    args.require("dataset", "a .jsonl file or a data set's name")
    if len(validation) > 1 or (validation and len(names) > 1):
        args.wrong("val_dataset", "one data set has one other to be evaluated on")
    if validation and args["split_dataset_ratio"]:
        args.note("split_dataset_ratio", "changes nothing beside --val_dataset, which is held out")
    system = _system(args)
    envs = [_dataset(args, name, validation) | ({"system": system} if system else {}) for name in names]
    if len(envs) == 1:
        args.put("env", envs[0])
    if len(envs) < 2:
        return
    scored_by = rewards(args)
    args.raise_if_wrong()
    known = [_of(env).column_names() for env in envs]
    for i, (env, names) in enumerate(zip(envs, known, strict=True), 1):
        more = sorted({name for others in known for name in others} - set(names))
        env |= {"more_columns": more} if more else {}
        word = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(env["path"]).stem)
        args.put(f"envs.{word}-{i}", {"env": env, "weight": rows(env), "rewards": scored_by})


def rows(env: Mapping[str, Json]) -> int:
    """Rows that a data set trains on.

    Raises:
        EnvError: it cannot be read.
    """
    return len(_of(env).tasks("train"))


def _of(env: Mapping[str, Json]) -> SwiftDataset:
    return SwiftDataset(**{name: value for name, value in env.items() if name != "kind"})


def _system(args: Reader) -> str:
    r"""The system message: a text, in which \n is a line's end, or what is in a .txt file; empty: none."""
    text = str(args["system"] or "")
    if not text.endswith(".txt"):
        return text.replace("\\n", "\n")
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        args.wrong("system", f"{text} cannot be read: {error}")
        return ""


def _dataset(args: Reader, name: str, validation: list[str]) -> dict[str, Json]:
    """Options of one data set's environment."""
    path, count = sampled(args, "dataset", name)
    hub = re.fullmatch(r"(?:(HF|MS)::)?([\w.-]+/[\w.-]+)(?::([\w.-]+))?", path)
    env: dict[str, Json] = {"kind": ROWS, "path": path}
    if hub is not None and not Path(path).exists() and not Path(path).suffix.lower().startswith(".json"):
        if hub[1] == "MS":
            args.wrong("dataset", f"{name}: only the Hugging Face hub is read; download it and name the file")
        env |= {"path": hub[2], **({"subset": hub[3]} if hub[3] else {})}
    env |= {"max_rows": count} if count else {}
    env |= {"columns": args["columns"]} if args["columns"] else {}
    share = 0.0 if evaluation_strategy(args) == "no" else args["split_dataset_ratio"]
    held_out = sampled(args, "val_dataset", validation[0])[0] if validation else ""
    env |= {"test_path": held_out} if validation else {"test_share": share}
    env |= {"gold_reply": TAGGED} if "format" in args["reward_funcs"] else {}
    return env


def sampled(args: Reader, option: str, name: str) -> tuple[str, int | None]:
    """Path of a data set's name such as ``rows.jsonl#100``, and how many rows are taken; None: all."""
    path, _, count = name.partition("#")
    if count and not (count.isdecimal() and int(count)):
        args.wrong(option, f"{name}: what follows # is a number of rows, at least 1")
        count = ""
    return path, int(count) if count else None


def rewards(args: Reader) -> dict[str, Json]:
    """Every reward by ms-swift's name for it, with its weight; reward models come last."""
    names, models, weights = args["reward_funcs"], args["reward_model"], args["reward_weights"]
    total = len(names) + len(models)
    if not total:
        args.wrong("reward_funcs", "neither it nor --reward_model names a reward")
    if weights is not None and len(weights) != total:
        args.wrong("reward_weights", f"there are {len(weights)} for {total} rewards; write one for each")
        weights = None
    plugged = _plugged(args)
    kinds = {name: _reward(args, name, plugged) for name in names}
    if len(kinds) < len(names):
        args.wrong("reward_funcs", "a reward is named twice; give it a greater weight instead")
    for i, model in enumerate(models, 1):
        kinds["reward_model" if len(models) == 1 else f"reward_model_{i}"] = {"kind": "reward_model", "model": model}
    return {
        name: {"weight": weight * options.pop("scale", 1.0), **options}
        for (name, options), weight in zip(kinds.items(), weights or [1.0] * len(kinds), strict=False)
    }


def _reward(args: Reader, name: str, plugged: Collection[str]) -> dict[str, Json]:
    """One reward function's kind and options; ``scale`` multiplies its weight."""
    if name in plugged:  # a plug-in may put one of its own in the place of a built-in one
        files = list(args["external_plugins"])
        return {"kind": PLUGIN, "registered": name, "files": files, "arguments": dict(args.values)}
    if name not in NAMES:
        known = ", ".join(dict.fromkeys((*NAMES, *plugged)))
        more = "" if args["external_plugins"] else ", or name its file by --external_plugins"
        args.wrong("reward_funcs", f"there is no {name!r}; choose from {known}{more}")
        return {}
    if name == "soft_overlong" and args["soft_cache_length"] is None:
        args.wrong("soft_cache_length", "soft_overlong needs it: tokens over which the punishment grows")
    return built_in(name, args)


def _plugged(args: Reader) -> Collection[str]:
    """Names of rewards that plug-in files register; a file of which none is asked for would change nothing."""
    files, names = list(args["external_plugins"]), list(args["reward_funcs"])
    if not files:
        return ()
    try:
        with redirect_stdout(sys.stderr):  # what it prints is no part of a recipe
            known = registered(files)
    except Exception as error:  # user code may raise anything while it is run
        why = str(error) if isinstance(error, RewardError) else f"running {', '.join(files)} {raised(error)}"
        args.wrong("external_plugins", why)
        return names
    if known.keys().isdisjoint(names):
        args.nothing("external_plugins", f"none of --reward_funcs is registered ({', '.join(known) or 'nothing'} is)")
    return tuple(known)


def engine(args: Reader, mode: str, rounds: int, visible: Sequence[str], *, ranks: int, shard: Shard) -> None:
    """Set the engine's kind and place, and ``sync`` as weights have to travel.

    Args:
        args: the command line.
        mode: none, server or colocate.
        rounds: steps from one publish to the next.
        visible: this process' GPUs.
        ranks: how many there are.
        shard: what they keep a share of: an engine beside ranks that have whole weights is of one of them.
    """
    args.put("engine.kind", "embedded" if mode == "none" else "vllm")
    shared = mode == "none"
    if mode == "server":
        args.put("engine.urls", _urls(args))
    elif mode == "colocate":
        gpus, size = devices(args, visible), args["vllm_tensor_parallel_size"]
        if not all(map(str.isdecimal, gpus)) or len(gpus) % size:
            args.wrong("vllm_device", f"write GPUs such as cuda:1, a multiple of vllm_tensor_parallel_size ({size})")
        if gpus:
            groups = [",".join(gpus[i : i + size]) for i in range(0, len(gpus), size)]
            args.put("engine.devices", groups)
            if len(groups) > 1:
                args.put("engine.replicas", len(groups))
        elif "vllm_gpu_memory_utilization" not in args:
            args.note("vllm_gpu_memory_utilization", "0.5 where it is left out, for the trainer is on the same GPU")
        shared = not gpus and (ranks > 1 or size == 1)
        if shared and shard == "states" and size > 1:
            args.put("engine.tensor_parallel_size", 1)
            args.note("vllm_tensor_parallel_size", "1: each rank has whole weights, which its own engine shares")
        _sleep(args, gpus, shared=shared)
    args.put("sync.kind", "shared" if shared else "broadcast")
    if rounds > 1 and not shared:
        args.put("sync.every", rounds)


def devices(args: Reader, visible: Sequence[str]) -> list[str]:
    """GPUs of an engine that is not on the trainer's; none if it is.

    By ``auto`` it is the last ``num_infer_workers`` of the visible ones where one is left for the trainer.
    """
    named = [word.removeprefix("cuda:") for word in args["vllm_device"] or []]
    workers = args["num_infer_workers"]
    if not named and workers is None:
        return []
    if named not in ([], ["auto"]):
        if workers not in (None, len(named)):
            args.nothing("num_infer_workers", f"vllm_device names {len(named)}")
        return named
    count = int(workers or 1)
    if count < len(visible):
        return list(visible[-count:])
    if count > max(1, len(visible)):
        args.wrong("num_infer_workers", f"{len(visible)} GPUs are visible; write 1 where the trainer has one alone")
    return []


def _sleep(args: Reader, gpus: list[str], *, shared: bool) -> None:
    """How deep an engine beside the trainer sleeps while a step is trained."""
    beside = not shared and (not gpus or "0" in gpus)
    if args["sleep_level"] and beside and not args["async_generate"]:
        args.put("engine.sleep", args["sleep_level"])
    elif args["sleep_level"]:
        args.nothing("sleep_level", "no second copy of the weights waits on the trainer's GPU while a step is trained")


def _urls(args: Reader) -> list[str]:
    """Addresses of engines that run already; one that listens everywhere is asked at this machine."""
    if args["vllm_server_base_url"]:
        for name in ("vllm_server_host", "vllm_server_port"):
            if name in args:
                args.note(name, "changes nothing beside --vllm_server_base_url, which has it")
        return [url.rstrip("/").removesuffix("/v1") for url in args["vllm_server_base_url"]]
    hosts, ports = args["vllm_server_host"] or [], args["vllm_server_port"]
    if not hosts:
        args.wrong("vllm_server_host", "--vllm_mode server needs it: where tandem swift deploy listens")
    if odd := [host for host in hosts if "/" in host or host.count(":") == 1]:
        args.wrong("vllm_server_host", f"{odd[0]} is more than a host; write --vllm_server_base_url http://HOST:PORT")
    if not all(port.isdecimal() for port in ports) or len(ports) not in (1, len(hosts)):
        args.wrong("vllm_server_port", f"{' '.join(ports)}: write one port, or one for each of the {len(hosts)} hosts")
        return []
    pairs = zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=True)
    return [http_url("127.0.0.1" if host == "0.0.0.0" else host, port) for host, port in pairs]


def evaluation_strategy(args: Reader) -> str:
    """steps, epoch or no: when held-out rows are looked at; where it is left out, when checkpoints are saved."""
    return str(args["eval_strategy"] or args["save_strategy"])


def loggers(args: Reader) -> None:
    """Set ``loggers``: the terminal, boards, and completions.jsonl."""
    if "swanlab" in args["report_to"]:
        args.note("report_to", "there is no logger for swanlab; numbers are in metrics.jsonl of the run's folder")
    boards: dict[str, dict[str, Json]] = {name: {} for name in args["report_to"] if name not in ("none", "swanlab")}
    put_loggers(args, boards, files=[{"kind": COMPLETIONS}] if args["log_completions"] else [])


def folder(args: Reader) -> None:
    """Set the run's folder."""
    path = Path(args["output_dir"] or Path("output") / Path(args["model"]).name)
    args.put("runs", str(path if args["add_version"] else path.parent))
    if not args["add_version"]:
        args.put("name", path.name)
        if args["run_name"]:
            args.wrong("run_name", "with --add_version false the run's folder is output_dir; leave it out")
    elif args["run_name"]:
        args.put("name", args["run_name"])
