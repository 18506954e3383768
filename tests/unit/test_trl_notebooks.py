"""Cells as public notebooks of TRL's GRPO have them, with rows of their own: only the import is another.

They call what these call: the Hugging Face cookbook's "Post training an LLM for reasoning with GRPO" and "TRL GRPO
reasoning with advanced reward", the Hugging Face course's chapter on GRPO with a small model, and TRL's notebook of
LoRA and QLoRA.
"""

from __future__ import annotations

import asyncio
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

COOKBOOK = r"""
from datasets import Dataset

rows = [{"problem": f"What is {n} + 1?", "solution": f"${n + 1}$", "messages": "-"} for n in range(8)]
train_dataset = Dataset.from_list(rows)

SYSTEM_PROMPT = "Think between <think> and </think>, then answer between <answer> and </answer>."

def make_conversation(example):
    return {"prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": example["problem"]}]}

train_dataset = train_dataset.map(make_conversation)
train_dataset = train_dataset.remove_columns(["messages", "problem"])
# %%
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto", device_map="auto")
# %%
from peft import LoraConfig, get_peft_model

model = get_peft_model(model, LoraConfig(
    task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
model.print_trainable_parameters()
# %%
import re

def format_reward(completions, **kwargs):
    pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
    return [1.0 if re.match(pattern, completion[0]["content"]) else 0.0 for completion in completions]
# %%
from math_verify import LatexExtractionConfig, parse, verify

def accuracy_reward(completions, **kwargs):
    rewards = []
    for completion, solution in zip(completions, kwargs["solution"]):
        gold = parse(solution, extraction_mode="first_match", extraction_config=[LatexExtractionConfig()])
        answer = parse(completion[0]["content"], extraction_mode="first_match")
        rewards.append(float(verify(answer, gold)) if gold else 1.0)
    return rewards
# %%
from tandem.trl import GRPOConfig

training_args = GRPOConfig(
    output_dir="GRPO-test", learning_rate=1e-5, remove_unused_columns=False, gradient_accumulation_steps=1,
    num_train_epochs=1, bf16=True, max_completion_length=4, num_generations=4, report_to=["tensorboard"],
    logging_steps=10, push_to_hub=False, save_strategy="steps", save_steps=10, per_device_train_batch_size=16)
# %%
from tandem.trl import GRPOTrainer

trainer = GRPOTrainer(
    model=model, reward_funcs=[format_reward, accuracy_reward], args=training_args, train_dataset=train_dataset)
# %%
trainer.train()
# %%
trainer.save_model(training_args.output_dir)
# %%
from transformers import AutoTokenizer

trained_model = AutoModelForCausalLM.from_pretrained(training_args.output_dir, dtype="auto", device_map="auto")
trained_tokenizer = AutoTokenizer.from_pretrained(training_args.output_dir)
inputs = trained_tokenizer("What is 1 + 1?", return_tensors="pt").to(trained_model.device)
text = trained_tokenizer.decode(trained_model.generate(**inputs, max_new_tokens=4)[0])
"""

ADVANCED = r"""
import re
from datasets import Dataset
from tandem.trl import GRPOConfig, GRPOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, TaskType, get_peft_model
# %%
model = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=False, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
lora_config = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, bias="none", task_type=TaskType.CAUSAL_LM)
model = get_peft_model(model, lora_config)
before = {name: value.clone() for name, value in model.state_dict().items()}
# %%
start, end = "<SOLUTION>", "</SOLUTION>"
match_format = re.compile(rf"^[\s]{{0,}}.*?{start}(.+?){end}[\s]{{0,}}$", flags=re.MULTILINE | re.DOTALL)
match_numbers = re.compile(rf"{start}.*?([\d\.]{{1,}})", flags=re.MULTILINE | re.DOTALL)

def process_dataset_example(example):
    answer = example["answer"].split("####")[1].strip()
    return {"prompt": [{"role": "system", "content": start}, {"role": "user", "content": example["question"]}],
            "answer": answer}

dataset = Dataset.from_list([{"question": f"{n} + 1?", "answer": f"So #### {n + 1}"} for n in range(8)])
dataset = dataset.map(process_dataset_example)
# %%
def match_format_exactly(completions, **kwargs):
    return [3.0 if match_format.search(c[0]["content"]) is not None else 0.0 for c in completions]

def match_format_approximately(completions, **kwargs):
    return [sum(0.5 if c[0]["content"].count(tag) == 1 else -0.5 for tag in (start, end)) for c in completions]

def check_answer(prompts, completions, answer, **kwargs):
    guesses = [m.group(1) if (m := match_numbers.search(c[0]["content"])) else None for c in completions]
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [0 if guess is None else 3.0 * (guess == gold) for guess, gold in zip(guesses, answer)]

def spread(completions, **kwargs):
    return [float(len(c[0]["content"]) % 3) for c in completions]
# %%
training_args = GRPOConfig(
    learning_rate=0.05, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_prompt_length=1024,
    max_completion_length=6, max_steps=2, logging_steps=1, output_dir="./trl_grpo_outputs", max_grad_norm=0.1,
    report_to="none", num_generations=4)
config = {"learning_rate": training_args.learning_rate, "batch": training_args.per_device_train_batch_size *
          training_args.gradient_accumulation_steps, "prompt": training_args.max_prompt_length}
# %%
trainer = GRPOTrainer(
    model=model, reward_funcs=[match_format_exactly, match_format_approximately, check_answer, spread],
    args=training_args, train_dataset=dataset)
active = len(trainer.reward_funcs)
# %%
trainer.train()
# %%
messages = [{"role": "user", "content": "1 + 1?"}]
text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(text, return_tensors="pt").to(model.device)
outputs = model.generate(**inputs, max_new_tokens=4, do_sample=True, pad_token_id=tokenizer.eos_token_id)
changed = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
"""

COURSE = r"""
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from tandem.trl import GRPOConfig, GRPOTrainer
# %%
rows = [{"prompt": f"Post {n}. TL;DR:", "completion": "-"} for n in range(8)]
dataset = DatasetDict({"train": Dataset.from_list(rows)})
# %%
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto", device_map="auto", attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))
# %%
ideal_length = 50

def reward_len(completions, **kwargs):
    return [-abs(ideal_length - len(completion)) for completion in completions]
# %%
training_args = GRPOConfig(
    output_dir="GRPO", learning_rate=2e-5, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    max_prompt_length=512, max_completion_length=8, num_generations=8, optim="adamw_8bit", num_train_epochs=1,
    bf16=True, report_to=[], remove_unused_columns=False, logging_steps=1)
# %%
trainer = GRPOTrainer(model=model, reward_funcs=[reward_len], args=training_args, train_dataset=dataset["train"])
trainer.train()
# %%
merged_model = trainer.model.merge_and_unload()
merged_model.save_pretrained("SmolGRPO")
# %%
from transformers import pipeline

generator = pipeline("text-generation", model=merged_model, tokenizer=tokenizer)
text = generator([{"role": "user", "content": "A cat."}], max_new_tokens=4, do_sample=True, temperature=0.5, min_p=0.1)
"""

QLORA = r"""
from datasets import Dataset

train_dataset = Dataset.from_list([
    {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "solution": f"${n + 1}$"} for n in range(8)])
# %%
from peft import LoraConfig

peft_config = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
# %%
from tandem.trl.rewards import reasoning_accuracy_reward, think_format_reward
# %%
from tandem.trl import GRPOConfig, GRPOTrainer
from transformers import TrainerCallback

training_args = GRPOConfig(
    model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
    learning_rate=2e-5, max_steps=6, per_device_train_batch_size=8, max_completion_length=4, num_generations=8,
    optim="paged_adamw_8bit", use_liger_kernel=True, output_dir="qlora", logging_steps=10, report_to="none",
    trackio_space_id="qlora", log_completions=False)
training_args.max_steps = 5

class Early(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        seen.append((state.global_step, logs["completions/mean_length"]))

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2

seen = []
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=[think_format_reward, reasoning_accuracy_reward], args=training_args,
    train_dataset=train_dataset, quantization_config=QUANTIZATION, peft_config=peft_config, callbacks=[Early()])
# %%
trainer_stats = trainer.train()
print(f"{trainer_stats.metrics['train_runtime']} seconds used for training.")
stopped, history = trainer_stats.global_step, [row["step"] for row in trainer.state.log_history]
# %%
trainer.callbacks._each.clear()
went_on = trainer.train(resume_from_checkpoint=True).global_step
# %%
trainer.save_model("adapter")
fine_tuned = trainer.model
fine_tuned.merge_and_unload().save_pretrained("merged")
"""


@pytest.fixture
def cells(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the cells of a notebook in order, beside a loop that runs, as a notebook's does."""
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__", "MODEL": str(tiny_model), "QUANTIZATION": object()}

        async def notebook() -> None:
            for number, cell in enumerate(text.split("# %%\n")):
                file = f"<cell-{abs(hash(text))}-{number}>"
                linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
                exec(compile(cell, file, "exec"), names)

        asyncio.run(notebook())
        return names

    return run


def test_the_cookbooks_reasoning_notebook(cells: Any) -> None:
    names = cells(COOKBOOK)
    assert names["trainer"].run.status == "finished"
    assert names["trainer"].run.recipe.options["trainable"]["rank"] == 8
    assert Path("GRPO-test/README.md").read_text().startswith("---\nlibrary_name: peft")
    assert names["text"]


def test_the_cookbooks_notebook_of_several_rewards_trains_the_model_object(cells: Any) -> None:
    names = cells(ADVANCED)
    assert (names["active"], names["config"]["batch"]) == (4, 8)
    assert names["changed"]
    assert all("lora" in name for name in names["changed"])


def test_the_courses_notebook_merges_the_trained_adapter(cells: Any) -> None:
    names = cells(COURSE)
    assert isinstance(names["merged_model"], torch.nn.Module)
    assert Path("SmolGRPO/model.safetensors").is_file()
    assert names["text"]


def test_trls_notebook_of_qlora_with_a_callback_that_ends_it(cells: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = cells(QLORA)
    assert "is trained unquantized" in capsys.readouterr().err
    assert [step for step, _ in names["seen"]] == names["history"] == [1, 2]
    assert (names["stopped"], names["went_on"]) == (2, 5)
    assert Path("adapter/adapter_config.json").is_file()
    assert Path("merged/model.safetensors").is_file()


def test_weights_that_are_no_longer_those_of_the_name_are_what_training_starts_from(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    from tandem.errors import ConfigError
    from tandem.trl import GRPOConfig, GRPOTrainer

    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rows = [{"prompt": "a"}]
    assert GRPOTrainer(model, len, GRPOConfig("out"), rows).recipe.options["model"] == str(tiny_model)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    changed = GRPOTrainer(model, len, GRPOConfig("out"), rows).recipe.options["model"]
    assert AutoModelForCausalLM.from_pretrained(changed).model.norm.weight.equal(model.model.norm.weight)
    with pytest.raises(ConfigError, match="model is a int; give a model of transformers"):
        GRPOTrainer(3, len, GRPOConfig("out"), rows)
