"""What the options of an Axolotl file come to: Tandem's recipe, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from tandem.compat.axolotl import engine as engine
from tandem.compat.axolotl import logs
from tandem.compat.axolotl import objective as objective
from tandem.compat.axolotl import rollout as rollout
from tandem.compat.axolotl.draft import Draft
from tandem.compat.axolotl.templates import TEMPLATES, brought_by
from tandem.config.loading import RunConfig
from tandem.config.tree import plain
from tandem.errors import TandemError
from tandem.types import Json

ENV = "tandem.compat.axolotl.datasets:AxolotlDatasets"
"""The environment that plays an Axolotl file's data sets."""

OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw8bit"),
    "adafactor": "adafactor",
}
"""By Axolotl's names."""

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
"""By Axolotl's names."""


def make(recipe: Draft) -> None:
    """All of it."""
    recipe.tree.where = recipe.file.tree.where
    _model(recipe)
    groups = _batch(recipe)
    objective.put(recipe)
    engine.put(recipe)
    steps = _steps(recipe, groups)
    _optimizer(recipe, steps)
    _run(recipe, steps)
    order = [option.name for option in fields(RunConfig)]
    recipe.tree.entries = dict(sorted(recipe.tree.entries.items(), key=lambda entry: order.index(entry[0])))


def _model(recipe: Draft) -> None:
    file = recipe.file
    recipe.copy("base_model", "model")
    named = file.get("tokenizer_config")
    if named not in (None, file.get("base_model")):
        file.wrong("tokenizer_config", f"the tokenizer is the model's own, {file.get('base_model')}; leave it out")
    _template(recipe)
    recipe.copy("trl.chat_template_kwargs", "chat_template_kwargs")
    own = {key: text for key, text in file.get("special_tokens", {}).items() if key != "pad_token"}
    if own:
        _check_tokens(recipe, own)
    _adapter(recipe)
    _precision(recipe)


def _template(recipe: Draft) -> None:
    file = recipe.file
    template, jinja = file.get("chat_template", "tokenizer_default"), file.get("chat_template_jinja")
    if template == "jinja" and jinja:
        recipe.copy("chat_template_jinja", "chat_template")
    elif template == "jinja":
        file.wrong("chat_template", "jinja needs the template in chat_template_jinja, as text or the path of a file")
    elif jinja:
        file.wrong("chat_template_jinja", "it is read with chat_template: jinja alone; write that, or leave this out")
    elif template in TEMPLATES:
        recipe.put("chat_template", TEMPLATES[template], "chat_template")
    elif brought_by(file.get("base_model", ""), template):
        file.note("chat_template", f"{template} is what the model's own tokenizer has, which is used")
    elif not template.startswith("tokenizer_default"):
        file.wrong(
            "chat_template",
            f"there is no {template} here; write tokenizer_default for the model's own, one of {', '.join(TEMPLATES)}, "
            "or jinja with the template in chat_template_jinja",
        )


def _check_tokens(recipe: Draft, own: Mapping[str, Json]) -> None:
    """Special tokens must be the tokenizer's: what ends an answer is what the engine and the model were told."""
    from tandem.model.policy import load_tokenizer

    file = recipe.file
    try:
        tokenizer = load_tokenizer(file.get("base_model", ""))
    except TandemError as error:
        file.wrong("special_tokens", f"they cannot be compared with the tokenizer's: {error}")
        return
    for key, text in own.items():
        if (its := getattr(tokenizer, key, None)) != text:
            file.wrong("special_tokens", f"{key} {text!r} is not the tokenizer's, {its!r}; leave it out")


def _adapter(recipe: Draft) -> None:
    file = recipe.file
    adapter = file.get("adapter", "")
    if adapter not in ("", "lora"):
        file.wrong("adapter", f"{adapter} is not trained here; write lora with bfloat16 weights, or leave it out")
        return
    recipe.put("trainable.kind", adapter or "full", "adapter")
    if not adapter:
        for option in ("lora_r", "lora_alpha", "lora_target_linear", "lora_target_modules", "peft_layers_to_transform"):
            if file.get(option):
                file.note(option, "changes nothing without adapter: lora")
        return
    recipe.copy("peft_layers_to_transform", "trainable.layers")
    for option, path in {"lora_r": "trainable.rank", "lora_alpha": "trainable.alpha"}.items():
        if option not in file:
            file.wrong("adapter", f"lora needs {option}")
        recipe.copy(option, path)
    modules = file.get("lora_target_modules")
    if file.get("lora_target_linear") or modules == "all-linear":
        recipe.put("trainable.target_modules", "all-linear", "lora_target_linear", "lora_target_modules")
    elif isinstance(modules, list) and modules:
        recipe.copy("lora_target_modules", "trainable.target_modules")
    elif modules:
        file.wrong("lora_target_modules", "expected a list of names such as [q_proj, v_proj], or all-linear")
    else:
        file.wrong("adapter", "lora needs lora_target_linear: true or lora_target_modules: [q_proj, ...]")


def _precision(recipe: Draft) -> None:
    file = recipe.file
    half = file.get("bf16", not file.get("float32", False))
    if half not in (True, False, "auto", "full"):
        file.wrong("bf16", f"expected true, false, auto or full, got {half!r}")
    recipe.put("dtype", "bfloat16" if half else "float32", "bf16", "float32")
    for option in ("vllm.dtype", "trl.vllm_dtype"):
        asked = file.get(option, "auto")
        if asked not in ("auto", "bfloat16" if half else "float32"):
            file.wrong(option, f"the engine samples from the weights that are trained; write auto, not {asked}")
    if file.get("fp8"):
        recipe.put("matmul", "fp8", "fp8")
    recipe.copy("torch_compile", "compile")
    checkpointing = file.get("gradient_checkpointing")
    if checkpointing in ("offload", "offload_disk"):
        file.note("gradient_checkpointing", "what is kept stays on the device, as with true")
    if checkpointing not in (None, True, False, "offload", "offload_disk"):
        file.wrong("gradient_checkpointing", f"expected true, false or offload, got {checkpointing!r}")
    elif checkpointing is not None:
        recipe.put("checkpointing", "full" if checkpointing else "none", "gradient_checkpointing")


def _batch(recipe: Draft) -> int:
    """Groups of a step."""
    file = recipe.file
    micro, accumulated = file.get("micro_batch_size", 1), file.get("gradient_accumulation_steps", 1)
    size: int = file.get("trl.num_generations", 8)
    tokens = max(file.get("sequence_len", 512), file.get("trl.max_completion_length", 512))
    for path, number in {
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulated,
        "trl.num_generations": size,
        "sequence_len": tokens,
    }.items():
        if number < 1:
            file.wrong(path, "it must be at least 1")
            return 1
    groups, rest = divmod(recipe.completions, size)
    if size < 2:
        file.wrong("trl.num_generations", "it must be at least 2: an answer is judged against its siblings")
    elif rest or not groups:
        file.wrong(
            "trl.num_generations",
            f"a step has micro_batch_size {micro} x gradient_accumulation_steps {accumulated} = {recipe.completions} "
            f"completions, which are no whole number of groups of {size}; change one of the three",
        )
    recipe.put("groups_per_step", max(groups, 1), "gradient_accumulation_steps", "micro_batch_size")
    recipe.put("group_size", size, "trl.num_generations")
    recipe.put("micro_batch_tokens", micro * tokens, "micro_batch_size")
    return max(groups, 1)


def _steps(recipe: Draft, groups: int) -> int:
    """Steps of the run: those that are said, or as many as the rows are enough for."""
    from tandem.compat.axolotl.datasets import AxolotlDatasets

    file = recipe.file
    if file.get("max_steps", 0) > 0:
        steps = recipe.per_step(file.get("max_steps"))
        recipe.put("steps", steps, "max_steps")
    elif recipe.serving or "datasets" not in file or file.problems:
        recipe.put("steps", steps := 1, "num_epochs")  # an engine alone takes none, and mistakes are told first
    else:
        epochs = file.get("num_epochs", 1)
        try:
            rows = AxolotlDatasets(cfg=recipe.plain).count("train")
        except TandemError as error:
            file.wrong("num_epochs", f"rows cannot be counted, so give max_steps instead: {error}")
            return 1
        steps = max(1, math.ceil(epochs * (rows // groups)))
        recipe.put("steps", steps, "num_epochs", "datasets")
        file.note("num_epochs", f"{rows} rows, {groups} of them a step, {epochs:g} times: {steps} steps")
    if recipe.updates > 1:
        file.note("trl.num_iterations", f"a step has {recipe.updates} updates, each of which Axolotl counts as a step")
    return steps


def _optimizer(recipe: Draft, steps: int) -> None:
    file = recipe.file
    name = file.get("optimizer", "adamw_torch_fused")
    if name not in OPTIMIZERS:
        file.wrong("optimizer", f"there is no {name} here; choose from {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS.get(name, "adamw")
    recipe.put("optimizer.kind", kind, "optimizer")
    if kind == "adafactor":
        file.note("optimizer", "the rate is relative here: a tensor moves by it times its root mean square")
    if "learning_rate" not in file:
        file.problems.add(file.tree.where, "missing 'learning_rate'")
    recipe.copy("learning_rate", "optimizer.lr")
    scheduler = file.get("lr_scheduler", "cosine")
    if scheduler not in SCHEDULES:
        file.wrong("lr_scheduler", f"there is no {scheduler} here; choose from {', '.join(SCHEDULES)}")
    recipe.put("optimizer.schedule", SCHEDULES.get(scheduler, "cosine"), "lr_scheduler")
    if scheduler == "cosine":
        recipe.copy("cosine_min_lr_ratio", "optimizer.min_lr_ratio")
    elif "cosine_min_lr_ratio" in file:
        file.note("cosine_min_lr_ratio", "changes nothing without lr_scheduler: cosine")
    if scheduler == "constant":
        for option in ("warmup_steps", "warmup_ratio"):
            if file.get(option):
                file.note(option, "changes nothing with lr_scheduler: constant, which has no warm-up in Axolotl, too")
    elif warmup := _warmup(recipe, steps):
        recipe.put("optimizer.warmup_steps", warmup, "warmup_steps", "warmup_ratio")
    for option, path in {
        "weight_decay": "weight_decay",
        "adam_epsilon": "eps",
        "max_grad_norm": "max_grad_norm",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
    }.items():
        recipe.copy(option, f"optimizer.{path}")


def _warmup(recipe: Draft, steps: int) -> int:
    """Steps of warm-up; by default Axolotl's with rl: grpo, three in a hundred."""
    file = recipe.file
    if file.get("warmup_steps") and file.get("warmup_ratio"):
        file.wrong("warmup_ratio", "Axolotl takes it or warmup_steps, not both; leave one of them out")
    if "warmup_steps" in file:
        asked = file.get("warmup_steps")
        return recipe.per_step(2 if asked == 1 else asked)  # Axolotl, whose first rate is 0, makes one step two
    warmup: int = math.ceil(file.get("warmup_ratio", 0.03) * steps)
    if "warmup_ratio" not in file:
        file.note("warmup_steps", f"{warmup}, Axolotl's default: three steps in a hundred")
    return warmup


def _run(recipe: Draft, steps: int) -> None:
    """Data, what is measured and written down."""
    file = recipe.file
    if "datasets" not in file:
        file.problems.add(file.tree.where, "missing 'datasets': a list of mappings with path and type")
    recipe.put("env.kind", ENV, "datasets")
    recipe.put("env.cfg", recipe.plain, "datasets")
    if file.get("trl.rollout_func"):
        recipe.put("env.kind", rollout.ENV, "trl.rollout_func")
        recipe.copy("trl.rollout_func", "env.rollout_func")
        template = recipe.tree.entries.get("chat_template")
        if template is not None:
            recipe.put("env.chat_template", plain(template), "chat_template")
    for entry in [*file.get("datasets", []), *file.get("test_datasets", [])]:
        if isinstance(entry, dict) and entry.get("name") and Path(str(entry.get("path"))).exists():
            file.note("datasets", f"name {entry['name']} changes nothing: {entry['path']} is a local file")
    evaluated = recipe.every("eval_steps", "evals_per_epoch", steps)
    saved = recipe.every("save_steps", "saves_per_epoch", steps)
    if not (file.get("val_set_size") or file.get("test_datasets")):
        recipe.put("evaluate.tasks", 0, "val_set_size")
        if evaluated:
            by = "evals_per_epoch" if file.get("evals_per_epoch") else "eval_steps"
            file.note(by, "changes nothing: val_set_size and test_datasets hold no rows out")
    elif evaluated:
        recipe.put("evaluate.every", evaluated, "eval_steps")
    if saved:
        recipe.put("checkpoint.every", saved, "save_steps")
    recipe.copy("save_total_limit", "checkpoint.keep")
    recipe.copy("trl.reward_num_workers", "grading.workers")
    recipe.copy("seed", "seed")
    recipe.copy("wandb_name", "name")
    recipe.put("runs", file.get("output_dir", "model-out"), "output_dir")
    logs.put(recipe, steps)
