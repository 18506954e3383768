"""Rules for fields of ``GRPOConfig`` that a row of the table cannot translate: a recipe, part by part."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from tandem.config.registry import did_you_mean
from tandem.config.tree import Problems
from tandem.ports import http_url
from tandem_compat import objective
from tandem_compat.generation import put_generation
from tandem_compat.schedules import every, put_loggers, put_optimizer, put_saves, put_warmup
from tandem_compat.sharding import started_ranks
from tandem_compat.table import Reader
from tandem_compat.trl.options import OPTIONS


class TrlRecipe(Reader):
    """The fields of one configuration, made a recipe."""

    updates = "num_iterations"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TrlRecipe:
        """Read fields; None leaves one out.

        Raises:
            ConfigError: with every field that is unknown, of another type, or cannot be had.
        """
        recipe = cls(OPTIONS, Problems())
        newer = {old: row.name for row in OPTIONS.values() for old in row.also}
        for name, value in fields.items():
            row = newer.get(name, name)
            if row not in OPTIONS:
                hint = did_you_mean(name, OPTIONS) or "; leave it out"
                recipe.wrong(name, f"it is no field of GRPOConfig that Tandem knows{hint}")
            elif value is not None:
                plain = getattr(value, "value", value)  # transformers has enumerations of texts
                recipe.read(row, list(plain) if isinstance(plain, tuple) else plain)
        recipe.settle_all(recipe._conditions())
        recipe._batch()
        put_generation(recipe)
        recipe._objective()
        recipe._engine()
        recipe.problems.raise_if_any("GRPOConfig")
        return recipe

    def finish(self, rows: int, *, held_out: int) -> None:
        """Set what depends on the data.

        Args:
            rows: of it.
            held_out: rows to evaluate on.
        """
        epochs = self["num_train_epochs"]
        steps = self.per_step(self["max_steps"]) or max(1, math.ceil(epochs * rows / self.recipe["groups_per_step"]))
        self.put("steps", steps)
        put_optimizer(self, "optim", "lr_scheduler_type", self["learning_rate"])
        put_warmup(self, steps)
        put_saves(self, steps)
        if not held_out or self["eval_strategy"] == "no":
            self.put("evaluate.tasks", 0)
            if held_out:
                self.nothing("eval_dataset", "eval_strategy is 'no'")
        else:
            period = every(self, "eval_steps" if self["eval_steps"] else "logging_steps", self["eval_strategy"], steps)
            self.put("evaluate", {"tasks": held_out, "samples": 1, "every": period})
        self.problems.raise_if_any("GRPOConfig")

    def _conditions(self) -> dict[str, bool]:
        """Conditions under which fields count, and whether they hold."""
        loss = self["loss_type"]
        return {
            **objective.trl_conditions(self),
            "loss_type: sapo": loss == "sapo",
            "clipped ratios": self._differ and loss not in ("cispo", "sapo"),
            "eval_strategy: steps": self["eval_strategy"] == "steps",
        }

    @property
    def _completions(self) -> int:
        """Completions of one step, of all ranks that a launcher started."""
        each = self["per_device_train_batch_size"] * self["gradient_accumulation_steps"]
        return int(each * (started_ranks(os.environ) or 1))

    @property
    def _rounds(self) -> int:
        """Steps that one round of generation is for."""
        if steps := self["steps_per_generation"]:
            return max(1, int(steps) // int(self["gradient_accumulation_steps"]))
        return max(1, int(self["generation_batch_size"] or 1) // self._completions)

    @property
    def _differ(self) -> bool:
        """True if a ratio may be other than 1."""
        return self["num_iterations"] > 1 or self._rounds > 1

    def _batch(self) -> None:
        factors = "per_device_train_batch_size x gradient_accumulation_steps"
        objective.put_groups(self, "num_generations", self["num_generations"], self._completions, factors)
        if self._rounds > 1:
            self.put("max_lag", self._rounds - 1)
            self.note("steps_per_generation", f"{self._rounds} steps are sampled ahead, by weights that are shared")
        self.put("zero_variance_groups", "keep")
        self.put("checkpointing", "full" if self["gradient_checkpointing"] else "none")
        loading = dict(self["model_init_kwargs"] or {})
        dtype = str(loading.pop("dtype", loading.pop("torch_dtype", "auto"))).removeprefix("torch.")
        if dtype not in ("auto", "bfloat16", "float32"):
            self.wrong("model_init_kwargs", f"dtype {dtype}: Tandem trains bfloat16 or float32")
        if unknown := loading.keys() - {"attn_implementation", "device_map", "use_cache", "trust_remote_code"}:
            self.wrong("model_init_kwargs", f"{', '.join(sorted(unknown))}: it has no counterpart here; leave it out")
        self.put("dtype", {None: dtype, True: "bfloat16", False: "float32"}[self["bf16"]])
        names = [self["report_to"]] if isinstance(self["report_to"], str) else self["report_to"] or ()
        options = {"wandb": {"project": self["project"]}}
        options["trackio"] = {**options["wandb"], "space": self["trackio_space_id"]}
        put_loggers(self, {name: options.get(name, {}) for name in names if name not in ("none", "all")})
        if self["log_completions"]:
            self.put("print_completions.every", max(1, int(self["logging_steps"])))

    def _objective(self) -> None:
        if self.get("multi_objective_aggregation", "") == "normalize_then_sum":
            self.put("advantage", "gdpo")
        else:
            kind = objective.SCALES[str(self["scale_rewards"])]
            self.put("advantage", {"kind": kind, **({} if kind == "dr_grpo" else {"eps": 1e-4})})
        objective.put_clips(self, objective.put_loss(self), differ=self._differ, dual_clip=self["delta"])
        if self["mask_truncated_completions"]:
            self.put("truncated", "mask")
        sampled = self._rounds > 1
        self.put("old_logprobs", "sampled" if sampled else "recomputed")
        objective.put_trl_corrections(self, sampled=sampled)
        objective.put_reference(self, ratio_corrected=bool(self["use_bias_correction_kl"]))

    def _engine(self) -> None:
        if not self["use_vllm"]:
            return
        self.put("engine.kind", "vllm")
        if self["vllm_mode"] == "colocate":
            self.put("engine.gpu_memory_utilization", self.get("vllm_gpu_memory_utilization", 0.3))
            self.put("sync.kind", "shared" if (self["vllm_tensor_parallel_size"] or 1) == 1 else "broadcast")
            return
        host = {"0.0.0.0": "127.0.0.1"}.get(self["vllm_server_host"], self["vllm_server_host"])
        self.put("engine.urls", [self["vllm_server_base_url"] or http_url(host, self["vllm_server_port"])])
        self.put("engine.start_seconds", self["vllm_server_timeout"])
        self.put("sync.kind", "broadcast")
