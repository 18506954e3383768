"""Axolotl's files as recipes: what single options come to is in ``test_compat_golden``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from support.compat_cases import axolotl_file, axolotl_files

from tandem.cli import app as cli
from tandem.config.loading import Loaded, load
from tandem.errors import ConfigError
from tandem_compat.axolotl.options import DATASET, GROUPS, TOP, TRL, VLLM
from tandem_compat.axolotl.rules import templates

Read = Callable[..., Loaded]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Load an Axolotl file that differs from the least one as the arguments say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    axolotl_files(tmp_path)

    def call(changes: dict[str, Any] | None = None, *, serving: bool = False) -> Loaded:
        Path("a.yaml").write_text(axolotl_file({"changes": changes or {}}))
        return load(Path("a.yaml"), serving=serving)

    return call


def test_every_option_of_axolotls_own_schema_is_known() -> None:
    """Names as Axolotl 0.21 declares them."""
    assert set(SCHEMA["trl"].split()) <= set(TRL)
    assert set(SCHEMA["vllm"].split()) <= set(VLLM)


SCHEMA = {
    "trl": """beta max_completion_length use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_timeout
        vllm_guided_decoding_regex reward_funcs reward_weights generation_batch_size num_generations log_completions
        num_completions_to_print importance_sampling_level sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        scale_rewards temperature top_p top_k min_p repetition_penalty generation_kwargs chat_template_kwargs
        num_iterations epsilon epsilon_high use_liger_loss loss_type mask_truncated_completions vllm_enable_sleep_mode
        rollout_func multi_objective_aggregation entropy_coef use_adaptive_entropy entropy_target entropy_coef_delta
        entropy_coef_min entropy_coef_max use_data_producer async_prefetch prefetch_depth vllm_sync_interval
        streaming_partial_batch streaming_min_groups vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_importance_sampling_cap vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max
        off_policy_mask_threshold use_bias_correction_kl log_multimodal reward_num_workers replay_buffer_size
        replay_recompute_logps reroll_start_fraction reroll_max_groups skip_zero_advantage_batches vllm_lora_sync""",
    "vllm": """device tensor_parallel_size data_parallel_size gpu_memory_utilization dtype max_model_len
        enable_prefix_caching host port enable_reasoning reasoning_parser enforce_eager serve_module
        worker_extension_cls""",
}


@pytest.mark.parametrize("number", range(3))
def test_values_that_ask_for_nothing_are_passed_over(number: int, read: Read) -> None:
    """Of every option that is refused or idle otherwise: null, and those that its row lists."""
    off = {
        f"{group}.{name}".lstrip("."): ((None, *option.off) * 3)[number]
        for group, options in GROUPS.items()
        for name, option in options.items()
        if not option.becomes and group != "datasets"
    }
    assert read(off).notes == read().notes


def test_a_server_has_no_ranks(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's batches are the trainer's; an engine that a launcher's job starts beside it reads the file too."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "1")
    served = read({"trl.use_vllm": True}, serving=True).written
    assert "ranks" not in served
    assert "distributed" not in served


def test_a_server_may_be_at_an_ipv6_address(read: Read) -> None:
    at = {"trl.use_vllm": True, "trl.vllm_mode": "server", "trl.vllm_server_host": "::1", "trl.vllm_server_port": 9}
    engine = read(at).written["engine"]
    assert isinstance(engine, dict)
    assert engine["urls"] == ["http://[::1]:9"]


RENDERED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
    "alpaca": "<s>S\n\n### Instruction:\nU\n\n### Response:\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma3": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n",
    "phi_35": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n",
    "mistral_v1": "<s> [INST] S\n\nU [/INST]",
    "mistral_v7_tekken": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]",
    "exaone": "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]",
    "deepseek_v3": "<s>S<｜User｜>U<｜Assistant｜>",
}
"""By a template's name: a system message S and a user's U, up to where the policy speaks."""


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def rendered(name: str, *messages: tuple[str, str]) -> str:
    """Messages by a template, as transformers renders them."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    conversation = [{"role": role, "content": content} for role, content in messages]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    env.globals["raise_exception"] = _raise
    return env.from_string(templates()[name]).render(messages=conversation, add_generation_prompt=True, **tokens)


@pytest.mark.parametrize("name", RENDERED)
def test_named_templates(name: str) -> None:
    messages = [("system", "S"), ("user", "U")]
    assert rendered(name, *messages) == RENDERED[name]
    longer = rendered(name, *messages, ("assistant", "A"), ("user", "V"))
    blank = " " if name == "mistral_v1" else ""  # which the policy has to say there
    assert longer.startswith(RENDERED[name] + blank + "A")  # what is before an answer is the policy's prompt
    assert longer.count("V") == 1


@pytest.mark.parametrize("name", sorted(templates().keys() - {"gemma"}))
def test_every_named_template_writes_each_turn_once(name: str) -> None:
    text = rendered(name, ("system", "S1"), ("user", "U1"), ("assistant", "A1"), ("user", "U2"))
    assert [text.count(word) for word in ("S1", "U1", "A1", "U2")] == [1, 1, 1, 1]
    assert text.index("U1") < text.index("A1") < text.index("U2")
    assert "{" not in text


@pytest.mark.parametrize(("name", "role"), [("gemma", "system"), ("mistral_v7_tekken", "user"), ("llava", "tool")])
def test_a_named_template_refuses_what_it_cannot_write(name: str, role: str) -> None:
    with pytest.raises(jinja2.TemplateError, match=f"^{name} "):
        rendered(name, (role, "S"))


def test_merge_keys_are_merged(read: Read) -> None:
    """As by ``yaml.safe_load``, so that several sets share their options."""
    read()
    text = Path("a.yaml").read_text().replace("- path: rows.jsonl\n", "- &one\n  path: rows.jsonl\n")
    more = text.replace("learning_rate:", "- {<<: *one, path: few.jsonl}\nlearning_rate:")
    assert text.count("&one") == more.count("*one") == 1
    Path("a.yaml").write_text(more)
    both = [{"path": path, "type": "rewards.prompt_transform"} for path in ("rows.jsonl", "few.jsonl")]
    options: Any = load(Path("a.yaml")).written
    assert options["env"]["cfg"]["datasets"] == both


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "option",
    ["num_epochs", "warmup_ratio", "save_steps", "eval_steps", "logging_steps", "saves_per_epoch", "evals_per_epoch"],
)
def test_steps_are_not_counted_by_what_is_not_finite(option: str, number: float, read: Read) -> None:
    with pytest.raises(ConfigError, match=f"{option}: .*{number}"):
        read({"max_steps": None, option: number})


@pytest.mark.slow
def test_special_tokens_must_be_the_tokenizers(read: Read, tiny_model: Path) -> None:
    own = {"base_model": str(tiny_model), "special_tokens": {"pad_token": "any", "eos_token": "<|im_end|>"}}
    assert read(own).written is not None
    with pytest.raises(ConfigError, match=r"eos_token '</s>' is not the tokenizer's, '<\|im_end\|>'"):
        read({**own, "special_tokens": {"eos_token": "</s>"}})


def test_show_prints_a_recipe_of_the_same_run(read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read({"trl.num_iterations": 2})
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "a.yaml", "steps=3", "loss.clip_high=0.5", "--show"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# ")
    (tmp_path / "b.yaml").write_text(printed)
    again = load(tmp_path / "b.yaml").config
    assert again == load(tmp_path / "a.yaml", ["steps=3", "loss.clip_high=0.5"]).config
    assert (again.steps, again.updates_per_batch, again.loss.clip_high) == (3, 2, 0.5)  # type: ignore[attr-defined]


def test_show_refuses_what_cannot_be_had_together(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    read({})
    assert cli_code("train", "a.yaml", "--show") == 0
    assert cli_code("train", "a.yaml", "engine=embedded", "sync=shared", "sampling.regex=a", "--show") != 0
    assert "vLLM alone has grammars" in capsys.readouterr().err


def cli_code(*words: str) -> Any:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*words])
    return stopped.value.code


def test_the_page_lists_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/axolotl.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    assert {*TOP, *TRL, *VLLM, *DATASET} - named == set()
