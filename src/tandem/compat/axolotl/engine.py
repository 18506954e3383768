"""What samples in an Axolotl file, how weights reach it, and how far it may be behind."""

from __future__ import annotations

from tandem.compat.axolotl.draft import Draft

HOST, PORT = "0.0.0.0", 8000
"""Axolotl's defaults of where the server is."""

TIMEOUT = 240.0
"""TRL's trl.vllm_server_timeout, in seconds."""

_ANYWHERE = ("0.0.0.0", "::", "")
"""Addresses to listen at that mean this machine to who connects."""

_STARTED = ("tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization")


def put(recipe: Draft) -> None:
    """Engine, sync, context and lag."""
    file = recipe.file
    mode = file.get("trl.vllm_mode", "server")
    if mode not in ("server", "colocate"):
        file.wrong("trl.vllm_mode", f"expected server or colocate, got {mode}")
    vllm = file.get("trl.use_vllm", False)
    if recipe.serving and (not vllm or mode == "colocate"):
        which = "trl.vllm_mode" if vllm else "trl.use_vllm"
        file.wrong(
            which, "an engine is served alone with use_vllm: true and vllm_mode: server; this file's is no server"
        )
    if not vllm:
        recipe.put("engine.kind", "embedded", "trl.use_vllm")
        _tell_unread(recipe, "trl.use_vllm is false")
    elif mode == "colocate":
        _colocated(recipe)
    else:
        _served(recipe)
    _context(recipe)
    lag = _ahead(recipe) + (_every(recipe) - 1 if vllm and mode == "server" else 0)
    if lag:
        recipe.put("max_lag", lag, "trl.prefetch_depth", "trl.async_prefetch", "trl.vllm_sync_interval")


def _served(recipe: Draft) -> None:
    """An engine in a process of its own, by ``tandem serve engine``."""
    file = recipe.file
    recipe.put("engine.kind", "vllm", "trl.use_vllm")
    if recipe.serving:
        recipe.put("engine.host", file.get("vllm.host", HOST), "vllm.host")
        recipe.put("engine.port", file.get("vllm.port", PORT), "vllm.port")
        _started(recipe, 0.9)
    else:
        host = file.get("trl.vllm_server_host", HOST)
        url = f"http://{'127.0.0.1' if host in _ANYWHERE else host}:{file.get('trl.vllm_server_port', PORT)}"
        recipe.put("engine.urls", [url], "trl.vllm_server_port", "trl.vllm_server_host")
        patience = file.get("trl.vllm_server_timeout", TIMEOUT)
        recipe.put("engine.start_seconds", patience, "trl.vllm_server_timeout")
        file.note("vllm", f"the engine is expected at {url}; it is started by: tandem serve engine FILE")
    for option in ("vllm_gpu_memory_utilization", "vllm_enable_prefix_caching", "vllm_enable_sleep_mode"):
        if f"trl.{option}" in file and file.get(f"trl.{option}") is not False:
            file.note(f"trl.{option}", "changes nothing with vllm_mode: server; the server is the group vllm's")
    lora = file.get("adapter") == "lora"
    swaps = file.get("trl.vllm_lora_sync", False)
    if swaps and not lora:
        file.wrong("trl.vllm_lora_sync", "it needs adapter: lora; leave it out")
    recipe.put("sync.kind", "hotswap" if swaps and lora else "broadcast", "trl.vllm_lora_sync")
    if "trl.vllm_sync_interval" in file:
        recipe.put("sync.every", _every(recipe), "trl.vllm_sync_interval")


def _colocated(recipe: Draft) -> None:
    """An engine that the run starts on its own GPU, one copy of the weights."""
    file = recipe.file
    recipe.put("engine.kind", "vllm", "trl.vllm_mode")
    _started(recipe, 0.3)
    recipe.copy("trl.vllm_gpu_memory_utilization", "engine.gpu_memory_utilization")
    recipe.copy("trl.vllm_enable_prefix_caching", "engine.enable_prefix_caching")
    several = any(file.get(f"vllm.{option}", 1) > 1 for option in ("tensor_parallel_size", "data_parallel_size"))
    recipe.put("sync.kind", "broadcast" if several else "shared", "trl.vllm_mode")
    if file.get("trl.vllm_enable_sleep_mode") and several:
        recipe.put("engine.sleep", 2, "trl.vllm_enable_sleep_mode")
    elif file.get("trl.vllm_enable_sleep_mode"):
        file.note("trl.vllm_enable_sleep_mode", "changes nothing: shared weights are one copy, so none is put to sleep")
    if file.get("trl.vllm_lora_sync"):
        file.wrong("trl.vllm_lora_sync", "it needs vllm_mode: server, in Axolotl too; leave it out")
    if file.get("trl.vllm_sync_interval"):
        why = "changes nothing with vllm_mode: colocate; weights are shared after every step"
        file.note("trl.vllm_sync_interval", why)
    for option in ("vllm_server_host", "vllm_server_port", "vllm_server_timeout"):
        if file.get(f"trl.{option}"):
            file.note(f"trl.{option}", "changes nothing with vllm_mode: colocate; there is no server")


def _started(recipe: Draft, share: float) -> None:
    """Options of an engine that is started here; ``share`` is the default of its memory."""
    recipe.put("engine.gpu_memory_utilization", share, "vllm.gpu_memory_utilization")
    for option in _STARTED:
        recipe.copy(f"vllm.{option}", f"engine.{option}")
    if recipe.file.get("vllm.data_parallel_size", 1) > 1:
        recipe.copy("vllm.data_parallel_size", "engine.replicas")


def _context(recipe: Draft) -> None:
    """Most tokens of prompt and answer. Axolotl bounds generations by the server's length, not by sequence_len."""
    file = recipe.file
    named = ("vllm.max_model_len", "trl.vllm_max_model_len") if file.get("trl.use_vllm") else ()
    bounds = [path for path in named if path in file]
    for path in bounds:
        recipe.copy(path, "context")
    if "sequence_len" in file:
        whose = "max_model_len does" if bounds else "the model's own limit does, or with use_vllm vllm.max_model_len"
        file.note("sequence_len", f"bounds no prompt and no answer, as in Axolotl: {whose}")


def _every(recipe: Draft) -> int:
    """Steps from one publish to the next."""
    every: int = recipe.file.get("trl.vllm_sync_interval", 1)
    if every < 1:
        recipe.file.wrong("trl.vllm_sync_interval", "it must be at least 1")
    return recipe.per_step(every)


def _ahead(recipe: Draft) -> int:
    """Steps by which generation is ahead of training."""
    file, completions = recipe.file, recipe.completions
    depth = file.get("trl.prefetch_depth", 1) if file.get("trl.async_prefetch") else 0
    if depth < 1 and file.get("trl.async_prefetch"):
        file.wrong("trl.prefetch_depth", "it must be at least 1")
    if "trl.prefetch_depth" in file and not file.get("trl.async_prefetch"):
        file.note("trl.prefetch_depth", "changes nothing without async_prefetch")
    batch, micro = file.get("trl.generation_batch_size", completions), file.get("micro_batch_size", 1)
    size = file.get("trl.num_generations", 8)
    if batch < 1 or batch % size or batch % micro:
        file.wrong(
            "trl.generation_batch_size",
            f"{batch} is no multiple of both num_generations {size} and micro_batch_size {micro}",
        )
    elif batch > completions and batch % completions:
        file.wrong("trl.generation_batch_size", f"{batch} is no multiple of the {completions} completions of a step")
    elif batch < completions and recipe.updates > 1:
        file.wrong(
            "trl.generation_batch_size",
            f"with {batch} of a step's {completions} completions and num_iterations {recipe.updates} a step would "
            "train the same completions twice; leave it out",
        )
    elif batch < completions:
        file.note("trl.generation_batch_size", "changes nothing: all of a step is sampled by the same weights anyway")
    ahead: int = max(0, depth) + recipe.generated - 1
    return ahead


def _tell_unread(recipe: Draft, why: str) -> None:
    """Name what is written for an engine that is not used."""
    for path in recipe.file.values:
        if (
            path.startswith(("trl.vllm_", "vllm."))
            and not path.startswith("trl.vllm_importance")
            and recipe.file.get(path)
        ):
            recipe.file.note(path, f"changes nothing: {why}")
