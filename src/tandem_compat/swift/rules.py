"""Translation of ms-swift's GRPO arguments to a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from tandem.distributed.placement import visible_accelerators
from tandem.errors import ConfigError
from tandem.types import Json
from tandem_compat.sharding import (
    Sharding,
    of_accelerate,
    of_deepspeed,
    of_fsdp_file,
    wanted_ranks,
)
from tandem_compat.swift.parts import (
    OPTIMIZERS,
    SCHEDULES,
    checkpoint,
    datasets,
    engine,
    evaluated,
    folder,
    interval_places,
    loggers,
    optimizer,
    per_step,
    rewards,
    rows,
    trained,
)
from tandem_compat.table import Reader

_REDUCTIONS = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}
_CORRECTIONS = {
    None: None,
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
_SCALES = {
    "group": "grpo", "true": "grpo", "True": "grpo", "batch": "batch_std", "none": "dr_grpo", "false": "dr_grpo",
    "False": "dr_grpo", "gdpo": "gdpo",
}  # fmt: skip


class SwiftRecipe:
    """One command line, read part by part."""

    def __init__(self, args: Reader, environ: Mapping[str, str]) -> None:
        """Read nothing yet.

        Args:
            args: the arguments.
            environ: the ranks of a launcher and CUDA_VISIBLE_DEVICES are read.
        """
        self.args = args
        self.environ = environ

    def recipe(self) -> tuple[dict[str, Json], list[str]]:
        """The whole recipe, and what to tell of it."""
        args = self.args
        notes = args.notes
        args.settle_all(self._places())
        self._check()
        if args.problems:
            return {}, notes
        data, thinks = datasets(args), args["enable_thinking"]
        options: dict[str, Json] = {
            "model": args["model"],
            "steps": self._steps(data),
            **data,
            **({"rewards": rewards(args)} if "env" in data else {}),
            "groups_per_step": self._completions // args["num_generations"],
            "group_size": args["num_generations"],
            **({"max_lag": self._lag} if self._lag else {}),
            "sampling": self._sampling(),
            **({} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}),
            **({"truncated": "mask"} if args["overlong_filter"] else {}),
            "zero_variance_groups": "drop" if args["dynamic_sample"] else "keep",
            **({"max_resample_times": args["max_resample_times"]} if args["dynamic_sample"] else {}),
            "advantage": self._advantage(),
            "loss": self._loss(),
            **self._correction(),
            **self._reference(),
            **({"updates_per_batch": args["num_iterations"]} if args["num_iterations"] > 1 else {}),
        }
        if args.problems:  # steps are needed from here on
            return {}, notes
        return options | self._running(options["steps"]), notes

    def _running(self, steps: int) -> dict[str, Json]:
        """How those steps are computed, saved and shown."""
        args = self.args
        context = args["max_length"] and args["max_length"] + args["max_completion_length"]
        part, shared_by = self._micro_batch, self.ranks // self._batches
        return {
            "optimizer": optimizer(args, steps, offloaded=self.sharding.offload_optimizer),
            "trainable": trained(args, self.mode),
            **engine(args, self.mode, self._rounds, visible_accelerators(self.environ), parts=self._parts),
            "dtype": args["torch_dtype"],
            **({"context": context, "micro_batch_tokens": -(-part * context // shared_by)} if context else {}),
            **({"checkpointing": "full"} if self._recomputes else {}),
            **self._distributed(),
            "seed": args["seed"],
            "evaluate": evaluated(args, steps),
            "checkpoint": checkpoint(args, steps),
            "loggers": loggers(args),
            **folder(args),
        }

    @cached_property
    def mode(self) -> str:
        """none, colocate or server: where the engine is."""
        args = self.args
        if not args["use_vllm"]:
            return "none"
        named = "vllm_server_host" in args or "vllm_server_base_url" in args
        return args["vllm_mode"] or ("server" if named else "colocate")

    @cached_property
    def _lora(self) -> bool:
        return bool(self.args["train_type"] == "lora")

    @cached_property
    def _completions(self) -> int:
        """Completions of one optimizer step, of all ranks."""
        return int(self.args["per_device_train_batch_size"] * self.args["gradient_accumulation_steps"]) * self._batches

    @cached_property
    def _batches(self) -> int:
        """Ranks, or groups of them that share a sequence: as many batches are in a step."""
        shared = self.args["sequence_parallel_size"]
        if shared < 1 or self.ranks % shared:
            self.args.wrong("sequence_parallel_size", f"{self.ranks} ranks are no multiple of {shared}")
            return self.ranks
        return self.ranks // int(shared)

    @cached_property
    def ranks(self) -> int:
        """Ranks that a launcher started, or that NPROC_PER_NODE and NNODES ask for; each has a batch of its own."""
        try:
            return wanted_ranks(self.environ, self.args.problems.add)
        except ConfigError as error:
            self.args.problems.add("launcher", str(error))
            return 1

    @cached_property
    def sharding(self) -> Sharding:
        """What ranks share, and where states are."""
        args = self.args
        if args["deepspeed"] and args["fsdp"]:
            args.wrong("fsdp", "ms-swift takes it or --deepspeed, not both; leave one of them out")
        read: Mapping[str, Callable[..., Sharding | None]] = {"deepspeed": of_deepspeed, "fsdp": of_fsdp_file}
        for name, sharding_of in read.items():
            if args[name]:
                sharding = sharding_of(args[name], partial(args.wrong, name)) or Sharding(shard="states")
                for note in sharding.notes:
                    args.nothing(name, note)
                if self.ranks == 1:
                    args.note(name, "with one rank there is nothing to divide")
                return sharding
        launcher = partial(args.problems.add, "the launcher's file")
        return of_accelerate(self.environ, launcher) or Sharding(shard="states")

    @property
    def _recomputes(self) -> bool:
        return bool(self.args["gradient_checkpointing"] or self.sharding.checkpointing)

    @property
    def _parts(self) -> int:
        """Ranks among which the weights are divided."""
        return self.ranks if self.sharding.shard == "weights" else 1

    def _distributed(self) -> dict[str, Json]:
        """Ranks, and what they share."""
        context = self.args["sequence_parallel_size"]
        shared = {"shard": self.sharding.shard} if self.ranks > 1 else {}
        options = {**shared, **({"context_parallel": context} if context > 1 else {})}
        return {
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
            **({"distributed": options} if options else {}),
        }

    @cached_property
    def _micro_batch(self) -> int:
        """Completions of one pass over the model."""
        args = self.args
        batch, part = int(args["per_device_train_batch_size"]), args["mini_batch_size"]
        if part is None:
            return batch
        if batch % part:
            args.wrong("mini_batch_size", f"per_device_train_batch_size {batch} is no multiple of it")
        if not args["max_length"]:
            args.note("mini_batch_size", "changes nothing without --max_length: micro_batch_tokens bounds the memory")
        return int(part)

    @cached_property
    def _rounds(self) -> int:
        """Steps that one round of generation is for."""
        args = self.args
        size = args["generation_batch_size"]
        if args["steps_per_generation"]:
            size = args["steps_per_generation"] * args["per_device_train_batch_size"] * self._batches
        return max(1, (size or self._completions) // max(1, self._completions))

    @property
    def _lag(self) -> int:
        """Steps by which generation may be ahead of training."""
        return self._rounds - 1 + (self.mode != "none" and bool(self.args["async_generate"]))

    @cached_property
    def _regex(self) -> str:
        """What the engine's grammar holds answers to; empty: nothing."""
        return (self.args["structured_outputs_regex"] or "") if self.mode != "none" else ""

    @cached_property
    def _at_ratio_one(self) -> bool:
        """True if every ratio to the old policy is 1, which is then the policy itself."""
        corrected = self.args["rollout_importance_sampling_mode"] is not None or bool(self._regex)
        return bool(corrected and self.args["num_iterations"] == 1 and self._rounds == 1)

    def _places(self) -> dict[str, str]:
        """Why arguments of each place change nothing; empty where they count."""
        args, mode, loss = self.args, self.mode, self.args["loss_type"]
        away = {
            "none": "without --use_vllm true",
            "server": "with --vllm_mode server, whose engine has options of its own (tandem swift deploy)",
            "colocate": "with --vllm_mode colocate, whose engine is started here",
        }
        family = loss in _REDUCTIONS
        at_one = "where rollout_importance_sampling_mode makes every ratio 1"
        clipless = f"with --loss_type {loss}, which does not clip"
        names = args["reward_funcs"]
        reference = "" if args["beta"] else "with --beta 0, which has no reference"
        return {
            "vllm": away["none"] if mode == "none" else "",
            "server": "" if mode == "server" else away.get(mode, ""),
            "colocate": "" if mode == "colocate" else away.get(mode, ""),
            "clipped": at_one if self._at_ratio_one else "" if family else clipless,
            "clipped high": at_one if self._at_ratio_one and family else clipless if loss == "sapo" else "",
            "grpo's loss": at_one
            if self._at_ratio_one
            else ""
            if family and args["importance_sampling_level"] == "token"
            else "with that loss, which has no second clip",
            "sapo": at_one if self._at_ratio_one else "" if loss == "sapo" else f"with --loss_type {loss}",
            "ratio": "" if family else f"with --loss_type {loss}, which has a ratio of its own",
            "correction": ""
            if args["rollout_importance_sampling_mode"]
            else "without --rollout_importance_sampling_mode",
            "reference": reference,
            "average": reference or ("" if args["sync_ref_model"] else "without --sync_ref_model true"),
            "lora": "" if self._lora else f"with --train_type {args['train_type']}, which trains no adapter",
            "reward model": "" if args["reward_model"] else "without --reward_model",
            "scheduler": "" if args["multi_turn_scheduler"] else "without --multi_turn_scheduler",
            "dynamic_sample": "" if args["dynamic_sample"] else "without --dynamic_sample true",
            **interval_places(args),
            **{
                name: "" if name in names else f"without {name} among --reward_funcs"
                for name in ("cosine", "repetition", "soft_overlong")
            },
        }

    def _check(self) -> None:
        """What no other argument decides."""
        args = self.args
        if not args["model"]:
            args.wrong("model", "it is missing: a Hugging Face id or a folder")
        if args["rlhf_type"] != "grpo":
            args.wrong("rlhf_type", f"Tandem trains by grpo, not {args['rlhf_type']}")
        for name, choices in _CHOICES.items():
            args.only(name, choices)
        strategies = {"delete": "left out", "left": "cut", "right": "cut", "raise": ""}
        if happens := args.only("truncation_strategy", strategies):
            args.note("truncation_strategy", f"a prompt without room is an error here, not {happens}")
        if args["loss_scale"] not in ("last_round", "default"):
            args.wrong("loss_scale", "every sampled token counts as one; write last_round, or leave it out")
        if self._lora and "lora_dropout" not in args:
            args.note("lora_dropout", "ms-swift's default of 0.05 is left out, for Tandem has no dropout")
        if "ref_model" in args and args["ref_model"] != args["model"]:
            args.wrong("ref_model", "the reference is the model as the run begins; it must be --model, or left out")
        in_reward, rloo = args["kl_in_reward"], args["advantage_estimator"] == "rloo"
        if "kl_in_reward" in args and not args["beta"]:
            args.note("kl_in_reward", "changes nothing with --beta 0, which has no penalty")
        elif args["beta"] and (in_reward or (rloo and in_reward is None)):
            why = "where rloo puts it unless this is false" if in_reward is None else "not of the reward"
            args.wrong("kl_in_reward", f"the penalty is a term of the loss, {why}; write false, or --beta 0")
        if args["reward_model_plugin"] not in (None, ["default"]):
            args.wrong("reward_model_plugin", "the reward is the model's own output; write a reward function instead")
        if "max_resample_times" in args and args["dynamic_sample"] and args["max_resample_times"] < 1:
            args.wrong("max_resample_times", "it must be at least 1")
        self._check_batch()

    def _check_batch(self) -> None:
        args = self.args
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations",
                 "max_completion_length", "num_train_epochs", "save_steps", "save_total_limit", "max_length",
                 "generation_batch_size", "steps_per_generation", "eval_steps", "ref_model_sync_steps",
                 "mini_batch_size", "num_infer_workers", "max_turns", "vllm_tensor_parallel_size")  # fmt: skip
        if not args.positive(*names):
            return
        if "generation_batch_size" in args and "steps_per_generation" in args:
            args.wrong("generation_batch_size", "steps_per_generation says the same; leave one of them out")
        group, step, batch = (
            args["num_generations"],
            self._completions,
            args["per_device_train_batch_size"] * self._batches,
        )
        each = f" x {self._batches} ranks" if self._batches > 1 else ""
        if group < 2:
            args.wrong("num_generations", "it must be at least 2: an answer is judged against its siblings")
        elif step % group:
            args.wrong(
                "num_generations",
                f"per_device_train_batch_size x gradient_accumulation_steps{each} is {step}, which is no "
                f"whole number of groups of {group}; --gradient_accumulation_steps {group // math.gcd(group, batch)} "
                "makes it one",
            )
        size = args["generation_batch_size"] or (args["steps_per_generation"] or 0) * batch
        name = "generation_batch_size" if args["generation_batch_size"] else "steps_per_generation"
        if size % step:
            args.wrong(name, f"{size} completions are no whole number of steps of {step}")
        elif self._rounds > 1:
            how = "together" if self.mode == "server" or args["vllm_device"] else "ahead, by weights that are shared"
            args.note(name, f"{self._rounds} steps are sampled {how}, and ratios are to the engine's logprobs")

    def _steps(self, data: Mapping[str, Json]) -> int:
        """Steps of the run; each is as many optimizer updates as num_iterations."""
        args = self.args
        if args["max_steps"] > 0:
            return per_step(args, args["max_steps"])
        if "env" not in data and "envs" not in data:
            return 1
        sources = data.get("envs", {}).values()
        count = sum(source["weight"] for source in sources) if sources else rows(data["env"])
        return max(
            1, math.ceil(float(args["num_train_epochs"]) * count * int(args["num_generations"]) / self._completions)
        )

    def _sampling(self) -> Json:
        args = self.args
        options: dict[str, Json] = {"temperature": args["temperature"]}
        options |= {"top_p": args["top_p"]} if args["top_p"] != 1 else {}
        options |= {"top_k": args["top_k"]} if args["top_k"] > 0 else {}
        options |= {"min_p": args["min_p"]} if args["min_p"] else {}
        penalty = args["repetition_penalty"]
        options |= {"repetition_penalty": penalty} if penalty != 1 else {}
        options |= {"regex": self._regex} if self._regex else {}
        options |= {"max_tokens": args["max_completion_length"]}
        return options | ({"stop": args["stop_words"]} if args["stop_words"] else {})

    def _advantage(self) -> Json:
        args = self.args
        estimator, scale = args["advantage_estimator"], args["scale_rewards"]
        if estimator == "rloo":
            if _SCALES.get(scale or "none") != "dr_grpo":
                args.wrong("scale_rewards", "rloo scales nothing; leave it out")
            return {"kind": "rloo"}
        if estimator != "grpo":
            args.wrong("advantage_estimator", f"there is no {estimator!r} here; choose from grpo, rloo")
        kind = _SCALES.get(scale or "group")
        if kind is None:
            args.wrong("scale_rewards", f"there is no {scale!r}; choose from group, batch, none, gdpo")
        return {"kind": kind, **({"eps": 1e-4} if kind != "dr_grpo" else {})}

    def _loss(self) -> Json:
        args, kind = self.args, self.args["loss_type"]
        low = args["epsilon"]
        high = args["epsilon_high"] if args["epsilon_high"] is not None else low
        if kind == "cispo":
            if args["epsilon_high"] is None or high < 1:
                args.wrong("epsilon_high", "of cispo it is the largest weight of a token, at least 1, such as 5")
            return {"kind": "cispo", "cap": high, "reduction": "token"}
        if kind == "sapo":
            ends = {"temperature_positive": args["tau_pos"], "temperature_negative": args["tau_neg"]}
            return {"kind": "sapo", **({} if self._at_ratio_one else ends), "reduction": "sequence"}
        token = args["importance_sampling_level"] == "token"
        clips = {"clip_low": low, "clip_high": high, **({"dual_clip": args["delta"]} if token else {})}
        reduction = _REDUCTIONS[kind]
        return {"kind": "grpo" if token else "gspo", **({} if self._at_ratio_one else clips), "reduction": reduction}

    def _correction(self) -> dict[str, Json]:
        args = self.args
        correction, delta = (
            _CORRECTIONS[args["rollout_importance_sampling_mode"]],
            args["off_policy_sequence_mask_delta"],
        )
        corrections: list[Json] = []
        recomputed = correction is not None and self._rounds == 1
        if correction is not None and not recomputed and correction[1] == "truncate":
            why = "is left out: ratios to the engine, clipped by epsilon, hold its weights"
            args.note("rollout_importance_sampling_mode", f"{args['rollout_importance_sampling_mode']} {why}")
        elif correction is not None:
            kind, beyond = correction
            bound = args["rollout_importance_sampling_threshold"]
            corrections.append({"kind": kind, "beyond": beyond, "high": bound})
        if delta is not None:
            corrections.append({"kind": "opsm", "threshold": delta})
        return {
            **({"old_logprobs": "recomputed"} if recomputed or self._regex else {}),
            **({"corrections": corrections} if corrections else {}),
        }

    def _reference(self) -> dict[str, Json]:
        args = self.args
        if not args["beta"]:
            return {}
        penalty = {"beta": args["beta"], "estimator": "k3", "ratio_corrected": False}
        if not args["sync_ref_model"]:
            return {"reference": {"kind": "start", **penalty}}
        moving = {"mixup": args["ref_model_mixup_alpha"], "every": per_step(args, args["ref_model_sync_steps"])}
        return {"reference": {"kind": "average", **penalty, **moving}}


_CHOICES: dict[str, Mapping[Any, Any]] = {
    "vllm_mode": dict.fromkeys((None, "colocate", "server")),
    "train_type": dict.fromkeys(("lora", "full")),
    "torch_dtype": dict.fromkeys(("bfloat16", "float32")),
    "optim": OPTIMIZERS,
    "lr_scheduler_type": SCHEDULES,
    "loss_type": dict.fromkeys((*_REDUCTIONS, "cispo", "sapo")),
    "importance_sampling_level": dict.fromkeys(("token", "sequence", "sequence_token")),
    "rollout_importance_sampling_mode": _CORRECTIONS,
    "save_strategy": dict.fromkeys(("steps", "epoch", "no")),
    "eval_strategy": dict.fromkeys((None, "steps", "epoch", "no")),
}
