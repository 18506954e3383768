"""Translation of ms-swift's GRPO arguments to a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial

from tandem.distributed.placement import visible_accelerators
from tandem.errors import ConfigError
from tandem_compat.objective import SCALES, put_clips, put_corrections, put_groups, put_loss, put_reference
from tandem_compat.schedules import OPTIMIZERS, every, put_optimizer, put_saves, put_warmup
from tandem_compat.sharding import Shard, Sharding, of_accelerate, of_deepspeed, of_fsdp_file, shard_of, wanted_ranks
from tandem_compat.swift import parts
from tandem_compat.table import Reader, Translation

_MODE = "rollout_importance_sampling_mode"
_SCALES = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
"""scale_rewards of each estimator, where it is left out."""


class SwiftRecipe(Reader):
    """One command line, made a recipe part by part."""

    environ: Mapping[str, str]
    updates = "num_iterations"

    def translation(self, environ: Mapping[str, str]) -> Translation:
        """The whole recipe.

        Args:
            environ: the ranks of a launcher and CUDA_VISIBLE_DEVICES are read.

        Raises:
            ConfigError: with every argument that is wrong.
        """
        self.environ = environ
        self.settle_all(self._conditions())
        self._check()
        self._check_batch()
        self.raise_if_wrong()
        parts.datasets(self)
        if "env" in self.recipe:
            self.put("rewards", parts.rewards(self))
        if lag := self._rounds - 1 + (self.mode != "none" and self["async_generate"]):
            self.put("max_lag", lag)
        if self["top_k"] > 0:
            self.put("sampling.top_k", self["top_k"])
        if self["overlong_filter"]:
            self.put("truncated", "mask")
        self.put("zero_variance_groups", "drop" if self["dynamic_sample"] else "keep")
        self._objective()
        self.raise_if_wrong()  # steps are needed from here on
        self.put("steps", steps := self._steps())
        self._optimizer(steps)
        self._trainable()
        parts.engine(self, self.mode, self._rounds, visible_accelerators(environ), ranks=self.ranks, shard=self._shard)
        self._ranks()
        self._evaluated(steps)
        put_saves(self, steps)
        parts.loggers(self)
        parts.folder(self)
        return self.translated()

    @cached_property
    def mode(self) -> str:
        """none, colocate or server: where the engine is."""
        if not self["use_vllm"]:
            return "none"
        named = "vllm_server_host" in self or "vllm_server_base_url" in self
        return self["vllm_mode"] or ("server" if named else "colocate")

    @cached_property
    def _completions(self) -> int:
        """Completions of one optimizer step, of all ranks."""
        return int(self["per_device_train_batch_size"] * self["gradient_accumulation_steps"]) * self._batches

    @cached_property
    def _batches(self) -> int:
        """Ranks, or groups of them that share a sequence: as many batches are in a step."""
        return max(1, self.ranks // int(self["sequence_parallel_size"]))

    @cached_property
    def ranks(self) -> int:
        """Ranks that a launcher started, or that NPROC_PER_NODE and NNODES ask for; each has a batch of its own."""
        try:
            return wanted_ranks(self.environ, self.problems.add)
        except ConfigError as error:
            self.problems.add("launcher", str(error))
            return 1

    @cached_property
    def sharding(self) -> Sharding:
        """What ranks share, and where states are."""
        read: Mapping[str, Callable[..., Sharding | None]] = {"deepspeed": of_deepspeed, "fsdp": of_fsdp_file}
        for name, sharding_of in read.items():
            if self[name]:
                sharding = sharding_of(self[name], partial(self.wrong, name)) or Sharding(shard="states")
                for note in sharding.notes:
                    self.nothing(name, note)
                if self.ranks == 1:
                    self.note(name, "with one rank there is nothing to divide")
                return sharding
        launcher = partial(self.problems.add, "the launcher's file")
        return of_accelerate(self.environ, launcher) or Sharding(shard="states")

    @cached_property
    def _shard(self) -> Shard:
        """What ranks keep a share of."""
        beside = self.mode == "colocate" and not parts.devices(self, visible_accelerators(self.environ))
        return shard_of(
            self,
            self.sharding,
            self.ranks,
            full=self["train_type"] == "full",
            moving_reference=bool(self["beta"] and self["sync_ref_model"]),
            optimizer="adamw_cpu" if self["offload_optimizer"] else OPTIMIZERS[self["optim"]],
            workers=self["vllm_tensor_parallel_size"] if beside else 0,
        )

    def _ranks(self) -> None:
        """How a step is divided among ranks and passes."""
        if self.ranks > 1:
            self.put("ranks", self.ranks)
            self.put("distributed.shard", self._shard)
        if self["sequence_parallel_size"] > 1:
            self.put("distributed.context_parallel", self["sequence_parallel_size"])
        if self["gradient_checkpointing"] or self.sharding.checkpointing:
            self.put("checkpointing", "full")
        batch = self["per_device_train_batch_size"]
        part = self["mini_batch_size"] or batch
        if batch % part:
            self.wrong("mini_batch_size", f"per_device_train_batch_size {batch} is no multiple of it")
        if self["max_length"]:
            context = self["max_length"] + self["max_completion_length"]
            self.put("context", context)
            self.put("micro_batch_tokens", -(-part * context // (self.ranks // self._batches)))

    @cached_property
    def _rounds(self) -> int:
        """Steps that one round of generation is for."""
        batch = self["per_device_train_batch_size"] * self._batches
        size = (self["steps_per_generation"] or 0) * batch or self["generation_batch_size"] or 1
        return max(1, size // self._completions)

    @cached_property
    def _at_ratio_one(self) -> bool:
        """True if every ratio to the old policy is 1, which is then the policy itself."""
        return self._recomputes and self["num_iterations"] == 1 and self._rounds == 1

    @property
    def _recomputes(self) -> bool:
        """Whether the old policy's logprobs are computed, and not those that the engine tells."""
        grammar = self.mode != "none" and self["structured_outputs_regex"]
        return bool(grammar or (self[_MODE] and self._rounds == 1))

    def _conditions(self) -> dict[str, bool]:
        """Conditions under which arguments count, and whether they hold."""
        loss, differ, saves = self["loss_type"], not self._at_ratio_one, self["save_strategy"]
        clips, evaluates = loss not in ("cispo", "sapo"), parts.evaluation_strategy(self)
        held_out = bool(self["split_dataset_ratio"] or self["val_dataset"])
        by_save_steps = held_out and evaluates == "steps" and "eval_steps" not in self
        set_at_all = ("dynamic_sample", "max_length", "beta")
        return {
            "vllm": self.mode != "none",
            "server": self.mode == "server",
            "colocate": self.mode == "colocate",
            "corrections": bool(self[_MODE]),
            "clipped ratios": differ and clips,
            "a high clip": loss == "cispo" or (differ and clips),
            "grpo's clipped ratios": differ and clips and self["importance_sampling_level"] == "token",
            "loss_type sapo": differ and loss == "sapo",
            "clipping": clips,
            "sync_ref_model": bool(self["beta"] and self["sync_ref_model"]),
            "lora": self["train_type"] == "lora",
            "an Adam optimizer": self["optim"] != "adafactor",
            "warm-up": self["lr_scheduler_type"] != "constant",
            "an eval_strategy": evaluates != "no",
            "held-out rows": held_out and evaluates != "no",
            "eval_strategy steps": held_out and evaluates == "steps",
            "a save_strategy": saves != "no",
            "save_strategy steps": saves == "steps" or by_save_steps,
            **{name: bool(self[name]) for name in set_at_all},
            **{name: name in self["reward_funcs"] for name in ("cosine", "repetition", "soft_overlong")},
        }

    def _check(self) -> None:
        """What no other argument decides."""
        self.require("model", "a Hugging Face id or a folder")
        if self["train_type"] == "lora" and "lora_dropout" not in self:
            self.note("lora_dropout", "ms-swift's default of 0.05 is left out, for Tandem has no dropout")
        if "ref_model" in self and self["ref_model"] != self["model"]:
            self.wrong("ref_model", "the reference is the model as the run begins; it must be --model, or left out")

    def _check_batch(self) -> None:
        group, step = self["num_generations"], self._completions
        batch = self["per_device_train_batch_size"] * self._batches
        factors = "per_device_train_batch_size x gradient_accumulation_steps"
        factors += f" x {self._batches} ranks" if self._batches > 1 else ""
        remedy = f"--gradient_accumulation_steps {group // math.gcd(group, batch)} makes it one"
        put_groups(self, "num_generations", group, step, factors, remedy)
        size = self["generation_batch_size"] or (self["steps_per_generation"] or 0) * batch
        name = "generation_batch_size" if self["generation_batch_size"] else "steps_per_generation"
        if size % step:
            self.wrong(name, f"{size} completions are no whole number of steps of {step}")
        elif self._rounds > 1:
            how = "together" if self.mode == "server" or self["vllm_device"] else "ahead, by weights that are shared"
            self.note(name, f"{self._rounds} steps are sampled {how}, and ratios are to the engine's logprobs")

    def _steps(self) -> int:
        """Steps of the run; each is as many optimizer updates as num_iterations."""
        if self["max_steps"] > 0:
            return self.per_step(self["max_steps"])
        sources = self.recipe.get("envs", {}).values()
        count: int = sum(source["weight"] for source in sources) if sources else parts.rows(self.recipe["env"])
        epochs = float(self["num_train_epochs"])
        return max(1, math.ceil(epochs * count * int(self["num_generations"]) / self._completions))

    def _objective(self) -> None:
        """The advantage, the loss, the corrections and the reference."""
        estimator = self["advantage_estimator"]
        rloo, kind = estimator == "rloo", SCALES[self["scale_rewards"] or _SCALES[estimator]]
        if rloo and kind != "dr_grpo":
            self.wrong("scale_rewards", "rloo scales nothing; leave it out")
        self.put("advantage.kind", "rloo" if rloo else kind)
        if not rloo and kind != "dr_grpo":
            self.put("advantage.eps", 1e-4)
        if estimator == "reinforce_plus_plus" and kind == "batch_std":
            self.put("advantage.std_of", "deviations")
        loss = put_loss(self)
        put_clips(self, loss, differ=not self._at_ratio_one, dual_clip=self["delta"])
        if loss == "cispo" and (self["epsilon_high"] or 0) < 1:
            self.wrong("epsilon_high", "of cispo it is the largest weight of a token, at least 1, such as 5")
        if self._recomputes:
            self.put("old_logprobs", "recomputed")
        bounds = {"high": self["rollout_importance_sampling_threshold"]}
        threshold = "off_policy_sequence_mask_delta"
        put_corrections(self, _MODE, self[_MODE] or "", bounds, threshold, sampled=self._rounds > 1)
        in_reward = self.get("kl_in_reward", estimator != "grpo") and kind != "gdpo"
        put_reference(self, **({"in_reward": True} if in_reward else {"estimator": "k3", "ratio_corrected": False}))

    def _optimizer(self, steps: int) -> None:
        lora = self["train_type"] == "lora"
        self.put("optimizer.lr", rate := self["learning_rate"] or (1e-4 if lora else 1e-5))
        offload = "offload_optimizer" if self["offload_optimizer"] else ""
        if self.sharding.offload_optimizer:
            offload = "deepspeed" if self["deepspeed"] else "fsdp"
        put_optimizer(self, "optim", "lr_scheduler_type", rate, offload)
        put_warmup(self, steps)

    def _trainable(self) -> None:
        """Beside an engine of its own an adapter's sum travels, unless the engine takes adapters."""
        if self["train_type"] == "lora":
            modules = self["target_modules"]
            linear = "all-linear" if modules == ["all-linear"] else modules
            self.put("trainable.target_modules", self["target_regex"] or linear)
            if self.mode != "none" and not self["vllm_enable_lora"]:
                self.put("trainable.merged", True)

    def _evaluated(self, steps: int) -> None:
        """Nothing without held-out rows."""
        strategy = parts.evaluation_strategy(self)
        if strategy == "no" or not (self["split_dataset_ratio"] or self["val_dataset"]):
            self.put("evaluate.tasks", 0)
            return
        option = "eval_steps" if "eval_steps" in self else "save_steps"
        self.put("evaluate.every", every(self, option, strategy, steps))
        if self["val_dataset"] and (tasks := parts.sampled(self, "val_dataset", self["val_dataset"][0])[1]):
            self.put("evaluate.tasks", tasks)
        self.put("evaluate.samples", self["num_generations_eval"] or self["num_generations"])
        self.recipe["evaluate"] |= {"temperature": self["temperature"], "top_p": self["top_p"], "before": False}
