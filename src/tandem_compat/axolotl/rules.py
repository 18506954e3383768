"""Rules for Axolotl options that a row of the table cannot translate: Tandem's recipe, part by part.

Defaults are Axolotl's, and TRL's where it has none of its own.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.resources import files
from pathlib import Path

from tandem.config.loading import RunConfig
from tandem.config.tree import plain
from tandem.errors import TandemError
from tandem.ports import http_url
from tandem.types import Json
from tandem_compat import objective
from tandem_compat.axolotl import rollout
from tandem_compat.axolotl.datasets import AxolotlDatasets
from tandem_compat.axolotl.ranks import read_ranks, read_replicas
from tandem_compat.axolotl.recipe import AxolotlRecipe
from tandem_compat.generation import put_generation
from tandem_compat.schedules import put_loggers, put_optimizer

ENV = "tandem_compat.axolotl.datasets:AxolotlDatasets"
"""The environment that plays an Axolotl file's data sets."""

FASTER = ("liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin")
"""Plug-ins that change no result: what they switch on is a matter of speed."""

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
_NARROWING = {"trl.top_p": (1.0,), "trl.top_k": (0, -1), "trl.min_p": (0.0,)}
"""Options that narrow what may be sampled, and their values that do not."""
_ANYWHERE = ("0.0.0.0", "::", "")
"""Addresses to listen at that mean this machine to a client."""
_STARTED = ("tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization")


def make(recipe: AxolotlRecipe, environ: Mapping[str, str]) -> None:
    """All of it; ``environ`` has the launcher's variables."""
    recipe.settle_all(_conditions(recipe))
    read_ranks(recipe, environ)
    _model(recipe)
    groups = _batch(recipe)
    _rewards(recipe)
    put_generation(recipe, "trl.")
    _advantage(recipe)
    _loss(recipe)
    objective.put_reference(recipe, "trl.", ratio_corrected=_ratio_corrected(recipe))
    _differences(recipe)
    _again(recipe)
    _engine(recipe)
    read_replicas(recipe)
    _data(recipe)
    steps = _steps(recipe, groups)
    _optimizer(recipe, steps)
    _saved(recipe, steps)
    _shown(recipe, steps)
    _loggers(recipe)
    order = [option.name for option in fields(RunConfig)]
    recipe.tree.entries = dict(sorted(recipe.tree.entries.items(), key=lambda entry: order.index(entry[0])))


def _conditions(recipe: AxolotlRecipe) -> dict[str, bool]:
    """Conditions under which options count, and whether they hold."""
    return {
        **objective.trl_conditions(recipe, "trl."),
        "adapter: lora": bool(recipe["adapter"]),
        "use_trackio": bool(recipe["use_trackio"]),
        "use_wandb": bool(recipe["use_wandb"] or recipe["wandb_project"]),
        "async_prefetch": bool(recipe["trl.async_prefetch"]),
        "lr_scheduler: cosine": recipe["lr_scheduler"] == "cosine",
        "warm-up": recipe["lr_scheduler"] != "constant",
    }


def _model(recipe: AxolotlRecipe) -> None:
    model = recipe["base_model"] or ""
    if recipe["tokenizer_config"] not in (None, model):
        recipe.wrong("tokenizer_config", f"the tokenizer is the model's own, {model}; leave it out")
    for plugin in recipe["plugins"]:
        if str(plugin).removeprefix("axolotl.integrations.") in FASTER:
            recipe.nothing("plugins", f"{plugin} makes Axolotl faster, and Tandem has kernels of its own")
        else:
            recipe.wrong("plugins", f"{plugin} patches Axolotl; leave it out")
    _template(recipe)
    tokens = {key: text for key, text in recipe["special_tokens"].items() if key != "pad_token" and text is not None}
    if tokens:
        _check_tokens(recipe, tokens)
    _adapter(recipe)
    _precision(recipe)


def _template(recipe: AxolotlRecipe) -> None:
    template, jinja = recipe["chat_template"], recipe["chat_template_jinja"]
    if template == "jinja" and jinja:
        recipe.copy("chat_template_jinja", "chat_template")
    elif template == "jinja":
        recipe.wrong("chat_template", "jinja needs the template in chat_template_jinja, as text or the path of a file")
    elif jinja:
        recipe.wrong("chat_template_jinja", "it is read with chat_template: jinja alone; write that, or leave this out")
    elif template.startswith("tokenizer_default") or _brought_by(recipe["base_model"] or "", template):
        return
    elif template in templates():
        recipe.put("chat_template", templates()[template], "chat_template")
    else:
        known = ", ".join(templates())
        recipe.wrong("chat_template", f"{template} is not known; write tokenizer_default, jinja or one of {known}")


@cache
def templates() -> dict[str, str]:
    """Jinja templates by Axolotl's names, for conversations of text."""
    folder = files(__package__)
    turns = (folder / "turns.jinja").read_text(encoding="utf-8")
    formats = tomllib.loads((folder / "templates.toml").read_text(encoding="utf-8"))
    texts = {name: json.dumps({"name": name, **of}, ensure_ascii=False) for name, of in formats.items()}
    return {name: f"{{%- set f = {text} -%}}\n{turns}" for name, text in texts.items()}


def _brought_by(model: str, template: str) -> bool:
    """True if the model is of the family that a template is named after, and so brings that template itself."""
    family = "commandr" if template == "cohere" else "mistral" if template.startswith("mistral_") else template
    return _letters(family) in _letters(model)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _check_tokens(recipe: AxolotlRecipe, tokens: Mapping[str, Json]) -> None:
    """Special tokens must be the tokenizer's: what ends an answer is what the engine and the model were told."""
    from tandem.model.policy import load_tokenizer

    tokenizer = load_tokenizer(recipe["base_model"] or "")
    for key, text in tokens.items():
        if (expected := getattr(tokenizer, key, None)) != text:
            recipe.wrong("special_tokens", f"{key} {text!r} is not the tokenizer's, {expected!r}; leave it out")


def _adapter(recipe: AxolotlRecipe) -> None:
    adapter = recipe["adapter"]
    if adapter not in ("", "lora"):
        recipe.wrong("adapter", f"{adapter} is not trained here; write lora with bfloat16 weights, or leave it out")
        return
    recipe.put("trainable.kind", adapter or "full", "adapter")
    if not adapter:
        return
    modules = recipe["lora_target_modules"]
    if recipe["lora_target_linear"] or modules == "all-linear":
        recipe.put("trainable.target_modules", "all-linear", "lora_target_linear", "lora_target_modules")
        if modules and modules != "all-linear":
            recipe.nothing("lora_target_modules", "lora_target_linear adapts every linear layer")
    else:
        recipe.copy("lora_target_modules", "trainable.target_modules")


def _precision(recipe: AxolotlRecipe) -> None:
    half = recipe.get("bf16", not recipe["float32"])
    if half and recipe["float32"]:
        recipe.nothing("float32", "bf16 says the type of the weights; leave one of them out")
    recipe.put("dtype", "bfloat16" if half else "float32", "bf16", "float32")
    if recipe["fp8"]:
        recipe.put("matmul", "fp8", "fp8")
    if (checkpointing := recipe["gradient_checkpointing"]) is not None:
        recipe.put("checkpointing", "full" if checkpointing else "none", "gradient_checkpointing")


def _batch(recipe: AxolotlRecipe) -> int:
    """Groups of a step."""
    micro, accumulated = recipe["micro_batch_size"], recipe["gradient_accumulation_steps"]
    size: int = recipe["trl.num_generations"]
    tokens = max(recipe["sequence_len"], recipe["trl.max_completion_length"])
    factors = f"micro_batch_size {micro} x gradient_accumulation_steps {accumulated}"
    factors += f" x {recipe.batches} ranks" if recipe.batches > 1 else ""
    groups = objective.put_groups(recipe, "trl.num_generations", size, recipe.completions, factors)
    shared_by = recipe.ranks // recipe.batches  # ranks that compute one sequence together
    recipe.put("micro_batch_tokens", -(-micro * tokens // shared_by), "micro_batch_size")
    return groups


def _steps(recipe: AxolotlRecipe, groups: int) -> int:
    """Steps of the run: those that are said, or as many as the rows are enough for."""
    if recipe["max_steps"] > 0:
        steps = recipe.per_step(recipe["max_steps"])
        recipe.put("steps", steps, "max_steps")
    elif recipe.serving or not recipe["datasets"] or recipe.problems:
        recipe.put("steps", steps := 1, "num_epochs")  # an engine alone takes none, and mistakes are told first
    else:
        epochs = recipe["num_epochs"]
        try:
            rows = AxolotlDatasets(cfg=recipe.plain).count("train")
        except TandemError as error:
            recipe.wrong("num_epochs", f"its rows cannot be counted; mend that, or give max_steps: {error}")
            return 1
        together = recipe.generated  # of rows that do not fill a batch of so many steps TRL makes none
        steps = max(1, math.ceil(epochs * (rows // (groups * together) * together)))
        recipe.put("steps", steps, "num_epochs", "datasets")
        batches = f", in batches of {together} steps" if together > 1 else ""
        recipe.note("num_epochs", f"{rows} rows, {groups} of them a step{batches}, {epochs:g} times: {steps} steps")
    return steps


def _optimizer(recipe: AxolotlRecipe, steps: int) -> None:
    offload = "the offload" if recipe.sharding.offload_optimizer else ""
    put_optimizer(recipe, "optimizer", "lr_scheduler", recipe["learning_rate"], offload)
    if recipe["optimizer"] == "adafactor":
        recipe.note("optimizer", "the rate is relative here: a tensor moves by it times its root mean square")
    if "learning_rate" not in recipe.places:
        recipe.problems.add(recipe.file.where, "missing 'learning_rate'")
    if recipe["lr_scheduler"] != "constant" and (warmup := _warmup(recipe, steps)):
        recipe.put("optimizer.warmup_steps", warmup, "warmup_steps", "warmup_ratio")


def _warmup(recipe: AxolotlRecipe, steps: int) -> int:
    """Steps of warm-up; by default Axolotl's with rl: grpo, three in a hundred.

    It does not know there how many steps there are, so that the share is rounded up, and has no bound.
    """
    if (updates := recipe["warmup_steps"]) is not None:
        return recipe.per_step(2 if updates == 1 else updates)  # Axolotl, whose first rate is 0, makes one step two
    warmup: int = math.ceil(recipe["warmup_ratio"] * steps)
    return warmup


def _rewards(recipe: AxolotlRecipe) -> None:
    names: list[str] = recipe["trl.reward_funcs"]
    weights: list[float] = recipe.get("trl.reward_weights", [1.0] * len(names))
    recipe.note("trl.reward_funcs", "an answer of which every reward is None is left out; in TRL it counts as 0")
    if not names:
        recipe.wrong("trl.reward_funcs", "name at least one function, such as rewards.accuracy_reward")
    if len(names) != len(weights):
        recipe.wrong("trl.reward_weights", f"there are {len(weights)} for {len(names)} reward_funcs")
        return
    models = 0
    for name, weight in zip(names, weights, strict=True):
        if names.count(name) > 1:
            recipe.wrong("trl.reward_funcs", f"{name} is given twice; add up its weights")
        elif _FUNCTION.match(name) and not Path(name).exists():
            played = {"kind": rollout.REWARD, "path": name, "weight": weight}
            recipe.put(("rewards", name), played if recipe["trl.rollout_func"] else weight, "trl.reward_funcs")
        else:
            models += 1
            part = {"kind": "reward_model", "weight": weight, "model": name}
            recipe.put(("rewards", "reward_model" + (f"_{models}" if models > 1 else "")), part, "trl.reward_funcs")


def _advantage(recipe: AxolotlRecipe) -> None:
    usual = "normalize_then_sum" if recipe["rl"] == "gdpo" else "sum_then_normalize"
    aggregation, scale = recipe.get("trl.multi_objective_aggregation", usual), recipe["trl.scale_rewards"]
    if aggregation == "normalize_then_sum":
        if scale not in (True, "group"):
            recipe.nothing("trl.scale_rewards", "normalize_then_sum standardises each reward by itself")
        recipe.put("advantage", "gdpo", "trl.multi_objective_aggregation", "rl")
    else:
        recipe.put("advantage", objective.SCALES[str(scale)], "trl.scale_rewards")


def _loss(recipe: AxolotlRecipe) -> None:
    kind = objective.put_loss(recipe, "trl.")
    if kind in ("cispo", "sapo") and recipe["trl.importance_sampling_level"] == "sequence":
        recipe.wrong("trl.importance_sampling_level", f"of {kind} ratios are the token's; leave it out")
    sampled = _against_the_sampler(recipe)
    differ = recipe["trl.num_iterations"] > 1 or sampled
    objective.put_clips(recipe, kind, "trl.", differ=differ)
    read = ("trl.epsilon_high" if "trl.epsilon_high" in recipe else "trl.epsilon") if kind == "cispo" else ""
    for option in ("trl.epsilon", "trl.epsilon_high") if kind in ("cispo", "sapo") or not differ else ():
        if option in recipe and option != read:
            recipe.nothing(option, f"with {kind} and num_iterations {recipe['trl.num_iterations']} it clips nothing")
    whence = ("generation_batch_size", "replay_buffer_size", "vllm_importance_sampling_correction")
    recipe.put("old_logprobs", "sampled" if sampled else "recomputed", *(f"trl.{option}" for option in whence))
    usual = "token_truncate" if recipe.asynchronous else "sequence_mask"
    objective.put_trl_corrections(recipe, "trl.", usual=usual, sampled=sampled)
    if recipe["trl.mask_truncated_completions"]:
        recipe.put("truncated", "mask", "trl.mask_truncated_completions")


def _against_the_sampler(recipe: AxolotlRecipe) -> bool:
    """Whether ratios are to the logprobs that were sampled with.

    Only they tell how old an answer is that is replayed, or that was sampled together with those of earlier steps.
    """
    recomputed, several = recipe["trl.replay_recompute_logps"], recipe.generated > 1
    weighed = objective.weighs_trl(recipe, "trl.")
    if several:
        recipe.note("trl.generation_batch_size", f"{recipe.generated} steps at once, with ratios to the sampler")
    replays = bool(recipe["trl.replay_buffer_size"])
    if replays and recomputed and not weighed:
        recipe.note("trl.replay_recompute_logps", "ratios are to the sampler: no correction weighs their age")
    elif not replays and not recomputed:
        recipe.nothing("trl.replay_recompute_logps", "nothing is replayed")
    return several or (replays and not (recomputed and weighed))


def _ratio_corrected(recipe: AxolotlRecipe) -> bool:
    """Whether the penalty has the ratio before it."""
    return bool(recipe.get("trl.use_bias_correction_kl", not recipe.asynchronous))


def _differences(recipe: AxolotlRecipe) -> None:
    """What is computed otherwise than in TRL on purpose, in a line each where it matters to this file."""
    loss, masked = recipe["trl.loss_type"], "trl.mask_truncated_completions"
    if narrow := [path for path, off in _NARROWING.items() if recipe.get(path, off[0]) not in off]:
        recipe.note(narrow[0], "logprobs are of the tokens that may be sampled; TRL's of the whole vocabulary")
    if recipe[masked] and loss in ("grpo", "dr_grpo"):
        recipe.note(masked, f"with {loss} the loss is divided by the answers left; TRL counts the masked ones, too")
    if recipe["trl.importance_sampling_level"] == "sequence" and recipe["trl.beta"] and _ratio_corrected(recipe):
        recipe.note("trl.importance_sampling_level", "each token's KL is weighed by its own ratio; TRL: the sequence's")


def _again(recipe: AxolotlRecipe) -> None:
    """Groups that are trained again, tasks that come again, and groups that are not trained."""
    if size := recipe["trl.replay_buffer_size"]:
        recipe.put("replay.size", size, "trl.replay_buffer_size")
    start, most, skips = "trl.reroll_start_fraction", "trl.reroll_max_groups", "trl.skip_zero_advantage_batches"
    if recipe[start] != 1:
        recipe.copy(start, "reroll.start_fraction")
        recipe.copy(most, "reroll.max_groups")
    elif most in recipe:
        recipe.nothing(most, "reroll_start_fraction is 1, so no task comes again")
    recipe.put("zero_variance_groups", "drop" if recipe[skips] else "keep", skips)


def _engine(recipe: AxolotlRecipe) -> None:
    """What samples, how weights reach it, and how far it may be behind."""
    vllm, mode = recipe["trl.use_vllm"], recipe["trl.vllm_mode"]
    if recipe.serving and (not vllm or mode == "colocate"):
        recipe.wrong("trl.vllm_mode" if vllm else "trl.use_vllm", "only vllm_mode: server with use_vllm is served")
    recipe.put("engine.kind", "vllm" if vllm else "embedded", "trl.vllm_mode" if mode == "colocate" else "trl.use_vllm")
    if vllm:
        (_colocated if mode == "colocate" else _served)(recipe)
    for path in ("vllm.max_model_len", "trl.vllm_max_model_len") if vllm else ():
        recipe.copy(path, "context")  # Axolotl bounds generations by the server's length, not by sequence_len
    if "trl.generation_batch_size" in recipe:
        _check_generated(recipe, "trl.generation_batch_size")
    ahead = recipe["trl.prefetch_depth"] if recipe["trl.async_prefetch"] else 0
    if lag := ahead + recipe.generated - 1 + (_every(recipe) - 1 if vllm and mode == "server" else 0):
        recipe.put("max_lag", lag, "trl.prefetch_depth", "trl.async_prefetch", "trl.vllm_sync_interval")


def _served(recipe: AxolotlRecipe) -> None:
    """An engine in a process of its own, by ``tandem serve engine``."""
    if recipe.serving:
        recipe.put("engine.host", recipe["vllm.host"], "vllm.host")
        recipe.put("engine.port", recipe["vllm.port"], "vllm.port")
        _started(recipe, 0.9)
    else:
        host = recipe["trl.vllm_server_host"]
        url = http_url("127.0.0.1" if host in _ANYWHERE else host, recipe["trl.vllm_server_port"])
        recipe.put("engine.urls", [url], "trl.vllm_server_port", "trl.vllm_server_host")
        recipe.put("engine.start_seconds", recipe["trl.vllm_server_timeout"], "trl.vllm_server_timeout")
        recipe.note("vllm", f"the engine is expected at {url}; it is started by: tandem serve engine FILE")
    lora, swaps = recipe["adapter"] == "lora", recipe["trl.vllm_lora_sync"]
    if swaps and not lora:
        recipe.wrong("trl.vllm_lora_sync", "it needs adapter: lora; leave it out")
    recipe.put("sync.kind", "hotswap" if swaps and lora else "broadcast", "trl.vllm_lora_sync")
    if "trl.vllm_sync_interval" in recipe:
        recipe.put("sync.every", _every(recipe), "trl.vllm_sync_interval")


def _colocated(recipe: AxolotlRecipe) -> None:
    """An engine that the run starts on its own GPUs; one copy of the weights, where it divides them as the ranks do."""
    _started(recipe, 0.3)
    recipe.copy("trl.vllm_gpu_memory_utilization", "engine.gpu_memory_utilization")
    recipe.copy("trl.vllm_enable_prefix_caching", "engine.enable_prefix_caching")
    engines, workers = "vllm.data_parallel_size", "vllm.tensor_parallel_size"
    if recipe.ranks > 1 and recipe[engines] != 1:
        recipe.put("engine.replicas", 1, engines)
        recipe.nothing(engines, "each rank's weights are shared with an engine")
    if recipe.ranks > 1 and recipe.sharding.shard == "states" and recipe.engine_gpus > 1:
        recipe.put("engine.tensor_parallel_size", 1, workers)
        recipe.note(workers, "1: each rank has whole weights, which its own engine shares")
    elif recipe.ranks > 1 and recipe.sharding.shard == "weights" and workers not in recipe:
        group = max(recipe["dp_shard_size"], recipe.sharding.group)
        recipe.put("engine.tensor_parallel_size", group, "dp_shard_size")
    shared = recipe.ranks > 1 or (recipe.engine_gpus == 1 and recipe[engines] == 1)
    recipe.put("sync.kind", "shared" if shared else "broadcast", "trl.vllm_mode")
    if recipe["trl.vllm_enable_sleep_mode"] and not shared:
        recipe.put("engine.sleep", 2, "trl.vllm_enable_sleep_mode")
    elif recipe["trl.vllm_enable_sleep_mode"]:
        recipe.nothing("trl.vllm_enable_sleep_mode", "shared weights are one copy, so none is put to sleep")


def _started(recipe: AxolotlRecipe, share: float) -> None:
    """Options of an engine that is started here; ``share`` is the default of its memory."""
    recipe.put("engine.gpu_memory_utilization", share, "vllm.gpu_memory_utilization")
    for option in _STARTED:
        recipe.copy(f"vllm.{option}", f"engine.{option}")
    if recipe["vllm.data_parallel_size"] != 1:
        recipe.copy("vllm.data_parallel_size", "engine.replicas")


def _every(recipe: AxolotlRecipe) -> int:
    """Steps from one publish to the next."""
    return recipe.per_step(recipe["trl.vllm_sync_interval"])


def _check_generated(recipe: AxolotlRecipe, option: str) -> None:
    """How many completions are sampled together: of whole groups, passes and steps."""
    batch, completions = recipe[option], recipe.completions
    if batch % (completions if batch > completions else recipe["trl.num_generations"]):
        recipe.wrong(option, f"{batch} is no multiple of the {completions} completions of a step")
    elif batch < completions and recipe["trl.num_iterations"] > 1:
        recipe.wrong(option, f"{batch} of a step's {completions} completions would be trained twice; leave it out")
    elif batch < completions:
        recipe.nothing(option, "all of a step is sampled by the same weights anyway")


def _data(recipe: AxolotlRecipe) -> None:
    """The environment."""
    if not recipe["datasets"]:
        recipe.problems.add(recipe.file.where, "missing 'datasets': a list of mappings with path and type")
    recipe.put("env.kind", ENV, "datasets")
    recipe.put("env.cfg", recipe.plain, "datasets")
    if recipe["trl.rollout_func"]:
        recipe.put("env.kind", rollout.ENV, "trl.rollout_func")
        recipe.copy("trl.rollout_func", "env.rollout_func")
        if (template := recipe.tree.entries.get("chat_template")) is not None:
            recipe.put("env.chat_template", plain(template), "chat_template")


def _saved(recipe: AxolotlRecipe, steps: int) -> None:
    """What is evaluated and saved."""
    evaluated = recipe.every("eval_steps", "evals_per_epoch", steps)
    if not (recipe["val_set_size"] or recipe["test_datasets"]):
        recipe.put("evaluate.tasks", 0, "val_set_size")
        if evaluated:
            by = "evals_per_epoch" if recipe["evals_per_epoch"] else "eval_steps"
            recipe.nothing(by, "val_set_size and test_datasets hold no rows out")
    elif evaluated:
        recipe.put("evaluate.every", evaluated, "eval_steps")
    if saved := recipe.every("save_steps", "saves_per_epoch", steps):
        recipe.put("checkpoint.every", saved, "save_steps")


def _shown(recipe: AxolotlRecipe, steps: int) -> None:
    """Answers that are printed, as often as TRL logs."""
    shown, count = "trl.log_completions", "trl.num_completions_to_print"
    every = recipe.every("logging_steps", "", steps)
    if recipe[shown]:
        recipe.put("print_completions.every", max(1, every), "logging_steps", shown)
        recipe.put("print_completions.count", recipe[count], count, shown)
        return
    if shown in recipe:
        recipe.put("print_completions.every", 0, shown)
    if recipe["logging_steps"] != 1:
        recipe.nothing("logging_steps", "every step is logged")


def _loggers(recipe: AxolotlRecipe) -> None:
    """Where numbers go."""
    boards: dict[str, dict[str, Json]] = {}
    if (recipe["use_wandb"] or recipe["wandb_project"]) and recipe["wandb_mode"] != "disabled":
        boards["wandb"] = {key: recipe[f"wandb_{key}"] for key in ("project", "entity", "mode")}
    if recipe["use_tensorboard"]:
        boards["tensorboard"] = {}
    if recipe["use_trackio"]:
        boards["trackio"] = {"project": recipe["trackio_project_name"], "space": recipe["trackio_space_id"]}
    put_loggers(recipe, boards, "wandb_project", "use_wandb", "use_tensorboard", "use_trackio")
