"""Recipes: every mistake is found at once, each with its place, and what is written loads again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import registry as resolve
from tandem.config.build import Builder, encode
from tandem.config.loading import RunConfig, as_json, digest, dump, from_options, load
from tandem.config.tree import Branch, Problems, from_plain, parse, plain, render
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import ConfigError, RewardError
from tandem.types import Json

MINIMAL = "model: m\nsteps: 3\nenv: arithmetic\n"


def read(text: str, *overrides: str) -> RunConfig:
    Path("recipe.yaml").write_text(text)
    return load(Path("recipe.yaml"), list(overrides)).config


def wrong(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return str(caught.value)


# What loads


def test_a_minimal_recipe_gets_every_default_as_live_parts(here: Path) -> None:
    config = read(MINIMAL)
    assert config == RunConfig(model="m", steps=3, env=Arithmetic())
    assert isinstance(config.env, Arithmetic)
    kinds = {
        "advantage": ("advantages", "dr_grpo"),
        "loss": ("losses", "grpo"),
        "optimizer": ("optimizers", "adamw"),
        "trainable": ("trainable", "full"),
        "engine": ("engines", "embedded"),
        "sync": ("sync", "shared"),
    }
    for name, (category, kind) in kinds.items():
        assert resolve.kind_of(category, getattr(config, name)) == kind
    assert [resolve.kind_of("loggers", logger) for logger in config.loggers] == ["console"]


def test_rewards_default_to_the_environments_own(here: Path) -> None:
    assert {name: spec.weight for name, spec in read(MINIMAL).rewards.items()} == {"number": 1.0}
    assert read(MINIMAL + "rewards: {}\n") == read(MINIMAL)


def test_options_of_a_default_kind_need_no_kind(here: Path) -> None:
    config = read(MINIMAL + "optimizer: {lr: 1e-6}\n")
    assert resolve.kind_of("optimizers", config.optimizer) == "adamw"
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize("text", ["1e-6", "1.0e-06", "0.000001", "1E-6"])
def test_numbers_are_numbers_however_they_are_written(here: Path, text: str) -> None:
    assert read(f"{MINIMAL}optimizer: {{lr: {text}}}\n").optimizer.lr == 1e-6


def test_a_whole_number_will_do_for_a_number(here: Path) -> None:
    temperature = read(MINIMAL + "sampling: {temperature: 1}\n").sampling.temperature
    assert temperature == 1.0
    assert isinstance(temperature, float)


def test_shorthand_and_mapping_mean_the_same(here: Path) -> None:
    long = (
        MINIMAL.replace("env: arithmetic", "env: {kind: arithmetic}")
        + "loss: {kind: grpo}\nloggers: [{kind: console}]\n"
    )
    assert read(long) == read(MINIMAL)


def test_a_part_outside_the_tree(here: Path) -> None:
    Path("own_env.py").write_text(
        "from dataclasses import dataclass\nfrom tandem.envs.arithmetic import Arithmetic\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Arithmetic):\n    extra: int = 1\n"
    )
    config = read(MINIMAL.replace("arithmetic", "{kind: 'own_env:Mine', extra: 4}"))
    assert config.env.extra == 4  # type: ignore[attr-defined]
    assert config.env.name == "own_env"
    assert read(dump(config)) == config


def test_rewards_by_name_by_kind_and_by_import_path(here: Path) -> None:
    Path("own_rewards.py").write_text(
        "from dataclasses import dataclass\nfrom tandem.rewards.base import Reward\n"
        "def plain(rollout): return 1.0\n"
        "@dataclass(frozen=True)\nclass Part(Reward):\n    scale: float = 1.0\n"
        "    def __call__(self, rollout): return self.scale\n"
    )
    config = read(
        MINIMAL + "rewards:\n  number: 1\n  strict: {kind: exact, weight: 0.5, ignore_case: true}\n"
        "  own_rewards:plain: 0.1\n  scaled: {kind: 'own_rewards:Part', scale: 3}\n"
    )
    specs = config.rewards
    assert [(name, spec.kind, spec.weight) for name, spec in specs.items()] == [
        ("number", "number", 1.0),
        ("strict", "exact", 0.5),
        ("own_rewards:plain", "own_rewards:plain", 0.1),
        ("scaled", "own_rewards:Part", 1.0),
    ]
    assert specs["strict"].reward.ignore_case is True
    assert specs["scaled"].reward.scale == 3.0
    assert specs["own_rewards:plain"].reward == "own_rewards:plain"  # a grading process imports it
    again = read(dump(config))
    assert as_json(again) == as_json(config)
    assert list(again.rewards) == list(specs)


@pytest.mark.slow
def test_yaml_that_is_nested_too_deep_is_refused(here: Path) -> None:
    (here / "recipe.yaml").write_text("model: m\nsteps: 1\nenv: arithmetic\nchat_template_kwargs: {a: " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"recipe.yaml: this is not YAML: maximum recursion depth"):
        load(Path("recipe.yaml"))


def test_aliases_are_understood(here: Path) -> None:
    config = read(MINIMAL + "groups_per_step: &n 4\ngroup_size: *n\n")
    assert (config.groups_per_step, config.group_size) == (4, 4)


# Mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("group_sise: 4", "recipe.yaml:4: unknown option 'group_sise'; did you mean 'group_size'?"),
        (
            "loss:\n  kind: grpo\n  clip_hihg: 0.3",
            "recipe.yaml:6: unknown option 'clip_hihg' of loss (grpo); did you mean 'clip_high'?",
        ),
        ("checkpoint: {zzz: 1}", "recipe.yaml:4: unknown option 'zzz' of checkpoint; known: save, every, keep"),
        (
            "engine: {kind: embedded, tensor_parallel_size: 2}",
            "recipe.yaml:4: unknown option 'tensor_parallel_size' of engine (embedded); known: ",
        ),
        (
            "corrections: [{kind: opsm, delta: 1}]",
            "unknown option 'delta' of corrections (opsm); known: threshold; from TRL or ms-swift? here it is",
        ),
        ("lr: 1e-5", "unknown option 'lr'; did you mean 'optimizer.lr'?"),
        ("max_tokens: 9", "unknown option 'max_tokens'; did you mean 'sampling.max_tokens'?"),
        ("steps: 4", "recipe.yaml:4: duplicate key 'steps', already given at recipe.yaml:2; remove one"),
        ("<<: 3", "recipe.yaml:4: this is not YAML: while constructing a mapping, expected a mapping or list"),
        (
            "truncated: maks",
            "truncated: expected one of keep, mask, penalise, got the text 'maks'; did you mean 'mask'?",
        ),
        ("---\nmodel: m", "expected a single document"),
        ("seed: ten", "recipe.yaml:4: seed: expected a whole number, got the text 'ten'"),
        ("seed: 1.5", "recipe.yaml:4: seed: expected a whole number, got the number 1.5"),
        ("seed: true", "recipe.yaml:4: seed: expected a whole number, got true"),
        ("seed:", "recipe.yaml:4: seed: expected a whole number, got nothing"),
        ("seed: [1]", "recipe.yaml:4: seed: expected a whole number, got a list"),
        ("seed: '1'", "recipe.yaml:4: seed: expected a whole number, got the text '1'"),
        ("name: 2024", "recipe.yaml:4: name: expected text or null, got the number 2024; put it in quotes: '2024'"),
        ("truncated_penalty: yes", "recipe.yaml:4: truncated_penalty: expected a number, got yes"),
        ("truncated_penalty: .nan", "recipe.yaml:4: truncated_penalty: expected a number, got the number .nan"),
        ("sampling: {stop: END}", "sampling.stop: expected a list (of text), got the text 'END'; write [END]"),
        (
            "sampling: {stop: [1]}",
            "sampling.stop: expected a list (of text), got a list: Expected `str`, got `int` - at `$[0]`",
        ),
        ("sampling: 3", "sampling: expected a mapping of temperature, top_p, "),
        ("evaluate: {before: 1}", "recipe.yaml:4: evaluate.before: expected true or false, got the number 1"),
        ("loss: 3", "recipe.yaml:4: loss: expected a name ("),
        ("loss: {kind: 3}", "recipe.yaml:4: loss.kind: expected one of "),
        (
            "loggers: console",
            "recipe.yaml:4: loggers: expected a list of loggers, such as [console, tensorboard], got the text",
        ),
        (
            "rewards: [exact]",
            "rewards: expected a mapping of reward names to weights, such as {exact: 1.0}, got a list",
        ),
        ("rewards: {exact: yes}", "rewards.exact: expected a number, got yes"),
        (
            "rewards: {exact: [1]}",
            "rewards.exact: expected a weight, or a mapping of weight, kind and options, got a list",
        ),
        ("rewards: {exact: .inf}", "rewards.exact: expected a finite weight, got the number .inf"),
        (
            "chat_template_kwargs: 3",
            "chat_template_kwargs: expected a mapping (of names to anything), got the number 3",
        ),
        ("threads: !!python/none x", "recipe.yaml:4: the tag 'tag:yaml.org,2002:python/none' is not understood"),
        ("[a]: 3", "recipe.yaml:4: a key must be a word, not a list or a mapping"),
        ("chat_template_kwargs: &a {b: *a}", "recipe.yaml: this is not YAML: maximum recursion depth"),
        ("group_size: 1", "recipe.yaml:4: group_size must be at least 2"),
        ("groups_per_step: 0", "recipe.yaml:4: groups_per_step must be at least 1"),
        ("max_lag: -1", "recipe.yaml:4: max_lag must be at least 0"),
        ("sampling: {temperature: 0}", "recipe.yaml:4: sampling.temperature must be at least 0.01"),
        ("sampling: {temperature: 0.001}", "recipe.yaml:4: sampling.temperature must be at least 0.01"),
        ("sampling: {top_p: 0}", "recipe.yaml:4: sampling.top_p must be above 0 and at most 1"),
        ("sampling: {top_p: 1.1}", "sampling.top_p must be"),
        ("sampling: {min_p: 1}", "sampling.min_p must be"),
        ("sampling: {repetition_penalty: 0}", "sampling.repetition_penalty must be above 0; 1 is off"),
        ("sampling: {presence_penalty: 3}", "sampling.presence_penalty must be from -2 to 2"),
        ("sampling: {frequency_penalty: -2.1}", "sampling.frequency_penalty must be from -2 to 2"),
        ("sampling: {min_tokens: 9, max_tokens: 8}", "sampling.min_tokens must be from 0 to max_tokens"),
        ("sampling: {stop_token_ids: [-1]}", "sampling.stop_token_ids must be token ids"),
        ("replay: {size: -1}", "replay.size must be at least 0"),
        ("replay: {size: 3, max_age: 0}", "replay.max_age must be at least 1"),
        (
            "replay: {size: 3}\nold_logprobs: recomputed",
            "recipe.yaml:4: replay must be given with corrections that weigh",
        ),
        ("replay: {size: 3}\nloss: reinforce", "replay must be given with corrections that weigh"),
        (
            "replay: {size: 3}\nold_logprobs: recomputed\ncorrections: [opsm]",
            "replay must be given with corrections that weigh",
        ),
        ("reroll: {start_fraction: 1.1}", "reroll.start_fraction must be at least 0 and at most 1"),
        ("reroll: {start_fraction: 0, max_groups: 0}", "reroll.max_groups must be at least 1"),
        ("max_resample_times: -1", "max_resample_times must be at least 0"),
        ("oversample: 0.5", "oversample must be at least 1, or a word"),
        ("oversample: yes", "oversample: expected a number or one of auto, keep, off"),
        ("curriculum: {kind: solve_rate, floor: 0}", "curriculum.floor must be above 0 and at most 1"),
        ("curriculum: {kind: solve_rate, sharpness: 9}", "curriculum.sharpness must be at least 0 and at most 8"),
        ("sampling: {max_tokens: 0}", "sampling.max_tokens must be at least 1"),
        ("sampling: {stop: ['']}", "sampling.stop must be texts that are not empty"),
        ("optimizer: {lr: -1}", "recipe.yaml:4: optimizer.lr must be above 0"),
        ("optimizer: {schedule: linear, min_lr_ratio: 2}", "optimizer.min_lr_ratio must be at least 0 and at most 1"),
        ("evaluate: {samples: 0}", "recipe.yaml:4: evaluate.samples must be at least 1"),
        ("evaluate: {temperature: -0.1}", "evaluate.temperature must be at least 0"),
        ("checkpoint: {keep: 0}", "checkpoint.keep must be at least 1"),
        ("grading: {timeout_seconds: 0}", "grading.timeout_seconds must be above 0"),
        ("context: 1", "recipe.yaml:4: context must be at least 2"),
        ("name: a/b", "recipe.yaml:4: name must be a folder's name, not a path"),
        ("truncated: penalise\ntruncated_penalty: -1", "recipe.yaml:5: truncated_penalty must be at least 0"),
        ("env2: 1", "unknown option 'env2'; did you mean 'env'?"),
        (
            "truncated_penalty: 1.0",
            "recipe.yaml:4: truncated_penalty changes nothing: it is read by truncated: penalise alone; remove it",
        ),
        (
            "evaluate: {tasks: 0, every: 5}",
            "recipe.yaml:4: evaluate.every changes nothing: tasks is 0, so nothing is evaluated",
        ),
        ("evaluate: {tasks: 0, before: true}", "recipe.yaml:4: evaluate.before changes nothing"),
        (
            "evaluate: {temperature: 0, top_p: 0.9, samples: 1}",
            "recipe.yaml:4: evaluate.top_p changes nothing: temperature is 0",
        ),
        ("evaluate:\n  temperature: 0\n  samples: 8", "recipe.yaml:6: evaluate.samples changes nothing"),
        (
            "evaluate: {before: false, after: false, tasks: 9}",
            "recipe.yaml:4: evaluate.tasks changes nothing: before and",
        ),
        ("optimizer: {min_lr_ratio: 0.1}", "recipe.yaml:4: optimizer.min_lr_ratio changes nothing: schedule: constant"),
    ],
)
def test_a_mistake_has_its_line_and_says_what_was_expected(here: Path, line: str, message: str) -> None:
    assert message in wrong(MINIMAL + line + "\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing", "missing 'model'"),
        ("- model", "recipe.yaml:1: a recipe is a mapping of options, such as 'model: ...' on a line of its own"),
        ("model: m\nsteps: [1\nenv: arithmetic", "recipe.yaml:3: this is not YAML: "),
        ("model: m\n\tsteps: 1", "recipe.yaml:2: this is not YAML: "),
        ("model: 'a\x00b'", "recipe.yaml: this is not YAML: "),
        ("model: m\nsteps: 1\nenv: dataset", "recipe.yaml:3: env (dataset) needs 'path': A local"),
        ("model: m\nsteps: 1\nenv: {size: 3}", "recipe.yaml:3: env needs a kind; known: agent, arithmetic, "),
        (
            "model: m\nsteps: 1\nenv: arithmetik",
            "recipe.yaml:3: env: there is no 'arithmetik' in envs; did you mean 'arithmetic'?",
        ),
        ("model: m\nenv: arithmetic\ngroup_size: 1", "recipe.yaml: missing 'steps'"),
        ("model: m\nsteps: 1\nbroker: null", "env must be given, such as gsm8k"),
        ("model: m\nsteps: 4\nbroker: http://h:1", "max_lag must be at least 1 with broker"),
    ],
)
def test_a_recipe_as_a_whole_may_be_wrong(here: Path, text: str, message: str) -> None:
    assert message in wrong(text + "\n")


MERGES = """\
one: &one {a: 1, b: [1], deep: {x: 1}}
two: &two {a: 2, b: [2], c: 2}
over:
  a: 3
  <<: *one
under: {<<: *one, deep: {y: 2}}
both: {<<: [*one, *two], d: 4}
"""


def test_merge_keys_are_read_as_yaml_reads_them() -> None:
    problems = Problems()
    tree = parse(MERGES, "a.yaml", problems)
    assert tree is not None
    assert (plain(tree), list(problems)) == (yaml.safe_load(MERGES), [])
    assert plain(tree)["both"] == {"a": 1, "b": [1], "deep": {"x": 1}, "c": 2, "d": 4}
    assert isinstance(tree, Branch)
    over = tree.entries["over"]
    assert isinstance(over, Branch)
    assert (over.key_where["a"], over.key_where["b"]) == ("a.yaml:4", "a.yaml:1")


def test_missing_keys_are_described(here: Path) -> None:
    message = wrong("seed: 1\n")
    assert message.startswith("recipe.yaml has 3 problems:")
    assert "recipe.yaml: missing 'model': Hugging Face id or a local folder." in message
    assert "recipe.yaml: missing 'steps': " in message
    assert "recipe.yaml: missing 'env': " in message


def test_all_mistakes_are_told_at_once(here: Path) -> None:
    message = wrong(
        "model: m\nstepps: 3\nenv: {kind: arithmetic, terms: two}\nloss: {clip_hihg: 1}\nseed: x\n", "foo=1"
    )
    assert message.startswith("recipe.yaml has 6 problems:\n")
    for part in (
        "recipe.yaml:2: ",
        "missing 'steps'",
        "recipe.yaml:3: env.terms",
        "recipe.yaml:4: ",
        "recipe.yaml:5: seed",
    ):
        assert part in message
    assert "command line: foo: unknown option 'foo'" in message


def test_what_is_out_of_range_is_told_at_once_in_every_part_and_beside_it(here: Path) -> None:
    """Each option by itself, once anything is wrong: what it should be beside a wrong one is not known."""
    message = wrong(
        MINIMAL + "optimizer: {lr: -1, warmup_steps: -3, min_lr_ratio: 5}\ngroup_size: 1\nseed: x\n"
        "sync: {kind: broadcast, port: 65536, timeout_seconds: 0, every: 0}\nengine: vllm\n"
        "evaluate: {every: x, samples: 0}\nsampling: {temperature: -1, top_p: 0}\nthreads: -1\n"
        "reference: {kind: average, every: 10, mixups: 3}\n"
    )
    expected = [
        "recipe.yaml:4: optimizer.lr must be above 0",
        "recipe.yaml:4: optimizer.warmup_steps must be at least 0",
        "recipe.yaml:4: optimizer.min_lr_ratio must be",
        "recipe.yaml:5: group_size must be at least 2",
        "recipe.yaml:6: seed: expected a whole number",
        "recipe.yaml:7: sync.port must be at least 0 and at most 65535",
        "recipe.yaml:7: sync.timeout_seconds must be above 0",
        "recipe.yaml:7: sync.every must be at least 1",
        "recipe.yaml:9: evaluate.every: expected a whole number",
        "recipe.yaml:9: evaluate.samples must be at least 1",
        "recipe.yaml:10: sampling.temperature must be",
        "recipe.yaml:10: sampling.top_p must be",
        "recipe.yaml:11: threads must be at least 0",
        "recipe.yaml:12: unknown option 'mixups' of reference (average)",
    ]
    problems = message.splitlines()[1:]
    assert [line for line in expected if not any(line in problem for problem in problems)] == []
    assert len(problems) == len(expected), problems


@pytest.mark.parametrize(
    "recipe",
    [
        "model: m\nsteps: 0\nenv: arithmetic\n",
        # Beside a wrong option nothing is judged that speaks of it: here the broker, and the corrections.
        "model: m\nsteps: 9\nbroker: {url: x}\nmax_lag: 3\n",
        MINIMAL
        + "updates_per_batch: 2\nold_logprobs: recomputed\nreplay: {size: 4}\ncorrections: [{kind: token, highs: x}]\n",
        # Nor what would change nothing.
        MINIMAL + "replay: {size: -1, max_age: 4}\n",
        MINIMAL.replace("steps: 3", "steps: 0") + "reference: {kind: average, every: 10}\n",
    ],
)
def test_one_mistake_is_told_as_one(here: Path, recipe: str) -> None:
    assert "problems" not in wrong(recipe)


def test_finish_is_inert_where_nothing_is_in_flight(here: Path) -> None:
    lines = MINIMAL + "engine: vllm\nsync: {kind: shared, in_flight: finish}\n"
    assert "recipe.yaml:5: sync.in_flight changes nothing: with max_lag: 0 no request is in flight" in wrong(lines)
    assert "sync.in_flight changes nothing" in wrong(MINIMAL + "sync: {kind: shared, in_flight: finish}\n")
    for more in ("max_lag=1", "engine.urls=[http://here:1]", "sync.in_flight=continue"):
        read(lines, more)


def test_an_override_leaves_out_what_it_makes_useless_in_the_file(here: Path) -> None:
    text = MINIMAL + "evaluate: {every: 5, tasks: 20, samples: 2}\noptimizer: {schedule: cosine, min_lr_ratio: 0.1}\n"
    config = read(text, "evaluate.tasks=0", "optimizer.schedule=constant")
    assert not config.evaluates
    assert "evaluate: {tasks: 0}" in dump(config)
    assert "command line: evaluate.every changes nothing" in wrong(text, "evaluate.tasks=0", "evaluate.every=4")
    assert "recipe.yaml:4: evaluate.every changes nothing" in wrong(
        MINIMAL + "evaluate: {every: 5, tasks: 0}\n", "seed=1"
    )


def test_a_learning_rate_that_trains_nothing_is_refused(here: Path) -> None:
    assert "recipe.yaml:4: optimizer.lr must be above 0" in wrong(MINIMAL + "optimizer: {lr: 0}\n")


def test_the_same_options_are_fine_where_they_count(here: Path) -> None:
    config = read(
        MINIMAL + "truncated: penalise\ntruncated_penalty: 0.5\nevaluate: {tasks: 3, every: 5}\n"
        "optimizer: {schedule: cosine, min_lr_ratio: 0.1}\n"
    )
    assert config.truncated_penalty == 0.5
    assert read(MINIMAL + "evaluate: {temperature: 0}\n").evaluate.samples == 4


def test_a_reward_that_cannot_be_imported_has_its_own_error(here: Path) -> None:
    with pytest.raises(RewardError, match=r"recipe\.yaml:4: rewards\.no_mod:fn: cannot import no_mod:fn"):
        read(MINIMAL + "rewards: {'no_mod:fn': 1.0}\n")
    with pytest.raises(RewardError, match=r"rewards\.mine: cannot import"):
        read(MINIMAL + "rewards: {mine: {kind: 'no_mod:fn'}}\n")
    with pytest.raises(ConfigError, match="2 problems"):
        read(MINIMAL + "rewards: {'no_mod:fn': 1.0}\nsed: 1\n")


def test_rewards_that_are_no_rewards(here: Path) -> None:
    Path("own_things.py").write_text("def fn(rollout): return 1.0\nVALUE = 3\nclass Plain: ...\n")
    assert "there is no 'exat' in rewards; did you mean 'exact'?" in wrong(MINIMAL + "rewards: {exat: 1}\n")
    with pytest.raises(RewardError, match="own_things:VALUE is a int, not a function"):
        read(MINIMAL + "rewards: {'own_things:VALUE': 1}\n")
    with pytest.raises(RewardError, match="own_things:Plain is a type, not a dataclass"):
        read(MINIMAL + "rewards: {'own_things:Plain': 1}\n")
    message = wrong(MINIMAL + "rewards: {'own_things:fn': {weight: 1, scale: 2}}\n")
    assert "a plain function takes no option 'scale'" in message


def test_an_environment_without_rewards_of_its_own_needs_some(here: Path) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    message = wrong(MINIMAL.replace("arithmetic", "{kind: dataset, path: rows.jsonl}"))
    assert "rewards must name at least one, since dataset has none of its own; known: " in message


def test_a_missing_recipe_names_those_nearby(here: Path) -> None:
    Path("recipes").mkdir()
    Path("recipes/gsm8k.yaml").write_text(MINIMAL)
    Path("mkdocs.yml").write_text("site_name: no recipe\n")
    with pytest.raises(ConfigError, match=r"there is no recipe recipes/gsm8.yaml; did you mean recipes/gsm8k.yaml\?"):
        load(Path("recipes/gsm8.yaml"))
    with pytest.raises(ConfigError, match=r"there is no recipe gsm8; did you mean recipes/gsm8k.yaml"):
        load(Path("gsm8"))
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/config.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"there is no recipe runs/frist; did you mean runs/first\?"):
        load(Path("runs/frist"))
    with pytest.raises(ConfigError, match=r"there is no recipe steps=2: it is an option, which comes after a recipe"):
        load(Path("steps=2"))
    with pytest.raises(ConfigError, match=r"there is no recipe zzz.yaml; tandem recipes lists"):
        load(Path("zzz.yaml"))


def test_a_runs_folder_stands_for_its_recipe(here: Path) -> None:
    Path("run").mkdir()
    with pytest.raises(ConfigError, match=r"there is no recipe run/config.yaml"):
        load(Path("run"))
    Path("run/config.yaml").write_text(MINIMAL)
    assert load(Path("run")).config == read(MINIMAL)


def test_a_file_that_is_no_text(here: Path) -> None:
    Path("recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read the recipe recipe.yaml: .*codec"):
        load(Path("recipe.yaml"))


# Overrides


def test_overrides_reach_every_depth(here: Path) -> None:
    config = read(
        MINIMAL,
        "steps=7", "optimizer.lr=1e-4", "env.terms=3", "sampling.stop=[END, '#']", "evaluate.every=5", "name=2024",
        "chat_template_kwargs.enable_thinking=false", "loggers=[console, tensorboard]", "context=null",
    )  # fmt: skip
    assert (config.steps, config.optimizer.lr, config.sampling.stop) == (7, 1e-4, ("END", "#"))
    assert config.env.terms == 3  # type: ignore[attr-defined]
    assert (config.evaluate.every, config.name, config.context) == (5, "2024", None)
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert len(config.loggers) == 2


def test_text_on_the_command_line_needs_no_quotes(here: Path) -> None:
    config = read(MINIMAL, "model=a: b, {c} & *d", "env.prompt=Was ist {expression}? #1")
    assert config.model == "a: b, {c} & *d"
    assert config.env.prompt == "Was ist {expression}? #1"  # type: ignore[attr-defined]


def test_another_kind_replaces_the_part_and_the_same_kind_keeps_its_options(here: Path) -> None:
    text = MINIMAL.replace("arithmetic", "{kind: arithmetic, terms: 3}")
    assert read(text, "env=arithmetic").env == Arithmetic(terms=3)
    assert read(text, "env.kind=arithmetic").env == Arithmetic(terms=3)
    assert read(text, "env=calculator").env == resolve.find("envs", "calculator")()
    assert read(text, "env.kind=calculator", "env.terms=4").env == resolve.find("envs", "calculator")(terms=4)
    assert read(text, "env={kind: arithmetic, size: 9}").env == Arithmetic(size=9)
    assert read(MINIMAL + "optimizer: {lr: 1e-4}\n", "optimizer=adamw").optimizer.lr == 1e-4
    assert read(MINIMAL, "trainable=lora", "trainable.rank=4").trainable.rank == 4  # type: ignore[attr-defined]


def test_overrides_of_rewards(here: Path) -> None:
    text = MINIMAL + "rewards: {number: {weight: 1, after: '='}, exact: 0.5}\n"
    rewards = read(text, "rewards.number=2", "rewards.exact.ignore_case=true", "rewards.repetition=0.1").rewards
    assert {name: spec.weight for name, spec in rewards.items()} == {"number": 2.0, "exact": 0.5, "repetition": 0.1}
    assert rewards["number"].reward.after == "="
    assert rewards["exact"].reward.ignore_case is True
    assert list(read(text, "rewards={exact: 1}").rewards) == ["exact"]


def test_overrides_of_rewards_build_on_the_environments_own(here: Path) -> None:
    rewards = read(MINIMAL, "rewards.repetition=0.1").rewards
    assert {name: spec.weight for name, spec in rewards.items()} == {"number": 1.0, "repetition": 0.1}
    assert read(MINIMAL, "rewards.number=3").rewards["number"].weight == 3.0
    assert list(read(MINIMAL, "rewards={exact: 1}").rewards) == ["exact"]


def test_an_import_path_may_be_overridden(here: Path) -> None:
    Path("pkg_a").mkdir()
    Path("pkg_a/own.py").write_text("def fn(rollout): return 1.0\n")
    assert read(MINIMAL, "rewards.pkg_a.own:fn=0.5").rewards["pkg_a.own:fn"].weight == 0.5
    assert read(MINIMAL, "rewards.pkg_a.own:fn.weight=0.25").rewards["pkg_a.own:fn"].weight == 0.25


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.clip_hihg=0.3", "command line: loss.clip_hihg: unknown option 'clip_hihg' of loss (grpo); did you mean"),
        ("los.clip=3", "command line: los.clip: unknown option 'los'; did you mean 'loss'?"),
        ("seed=ten", "command line: seed: expected a whole number, got the text 'ten'"),
        ("seed", "command line: seed: an override is written option=value, such as seed=..."),
        ("--seed=3", "command line: --seed: an override has no dashes; write seed=3"),
        (".seed=3", "command line: .seed: unknown option ''"),
        ("steps.foo=3", "command line: steps.foo: steps is a single value at recipe.yaml:2; it has no options"),
        ("loggers.0=console", "command line: loggers.0: loggers is a list; give the whole of it, such as loggers=["),
        ("loggers=[console", "command line: loggers: this is not YAML: "),
        ("sampling.regex=[0-9]+", "a text that begins so is written in quotes of its own, as in '\"[0-9]+\"'"),
        ("sampling={top_p: 1, top_p: 1}", "command line: sampling: duplicate key 'top_p'"),
        ("evaluate.samples=0", "command line: evaluate.samples must be at least 1"),
        ("truncated_penalty=2", "command line: truncated_penalty changes nothing"),
        ("group_size=1", "command line: group_size must be at least 2"),
    ],
)  # fmt: skip
def test_mistakes_in_overrides(here: Path, override: str, message: str) -> None:
    assert message in wrong(MINIMAL, override)


def test_an_override_given_twice(here: Path) -> None:
    assert "command line: seed: given twice; remove one" in wrong(MINIMAL, "seed=1", "seed=2")


# What is written


def test_dump_is_complete_and_loads_to_an_equal_config(here: Path) -> None:
    config = read(
        MINIMAL, "trainable=lora", "rewards.exact.ignore_case=true", "optimizer.lr=1e-7", "evaluate.tasks=0",
        "sampling.stop=['1e-6', 'no']", "chat_template_kwargs={a: [1, {b: null}]}",
    )  # fmt: skip
    text = dump(config)
    assert read(text) == config
    inert = ("truncated_penalty", "envs")
    for option in resolve.options(RunConfig):
        assert f"{option.name}:" in text or option.name in inert


# Several environments

MIXED = """model: m
steps: 3
envs:
  arithmetic: 2
  small: {env: {kind: arithmetic, max_number: 5}, rewards: {exact: 1.0, repetition: 0.2}, weight: 0.5, min_share: 0.25}
"""


def test_several_environments_each_have_rewards_and_shares(here: Path) -> None:
    config = read(MIXED)
    assert config.env is None
    assert not config.rewards
    assert config.sources == config.envs
    small = config.envs["small"]
    assert config.envs["arithmetic"].env == Arithmetic(), "without an env the name is the kind"
    assert (config.envs["arithmetic"].weight, config.envs["arithmetic"].min_share) == (2.0, 0.0)
    assert list(config.envs["arithmetic"].rewards) == ["number"], "the environment's own"
    assert (small.env, small.weight, small.min_share) == (Arithmetic(max_number=5), 0.5, 0.25)
    assert {name: spec.weight for name, spec in small.rewards.items()} == {"exact": 1.0, "repetition": 0.2}
    assert config.plays
    assert config.evaluates


def test_one_environment_is_a_mixture_of_one(here: Path) -> None:
    config = read(MINIMAL)
    ((name, source),) = config.sources.items()
    assert (name, source.env, source.rewards) == ("arithmetic", config.env, config.rewards)


def test_a_mixture_reads_back_what_it_writes(here: Path) -> None:
    config = read(MIXED)
    text = dump(config)
    assert "\nenv:" not in text
    assert read(text) == config
    assert "\nenvs:" not in dump(read(MINIMAL))
    assert digest(config) != digest(read(MIXED, "envs.small.weight=0.6"))
    assert as_json(config)["envs"]["small"]["min_share"] == 0.25


def test_an_entry_is_overridden_like_a_recipe(here: Path) -> None:
    config = read(
        MIXED, "envs.small=4", "envs.small.env.max_number=7", "envs.small.rewards.exact.ignore_case=true",
        "envs.arithmetic.rewards.repetition=0.1", "envs.arithmetic.rewards.number=3", "envs.countdown=0.5",
        "envs.tool.env=calculator", "envs.tool.min_share=0.1",
    )  # fmt: skip
    small, own = config.envs["small"], config.envs["arithmetic"]
    assert (small.weight, small.min_share, small.env) == (4.0, 0.25, Arithmetic(max_number=7))
    assert small.rewards["exact"].reward.ignore_case
    assert small.rewards["exact"].weight == 1.0
    assert {name: spec.weight for name, spec in own.rewards.items()} == {"number": 3.0, "repetition": 0.1}
    assert list(config.envs) == ["arithmetic", "small", "countdown", "tool"]
    assert (config.envs["countdown"].weight, config.envs["tool"].min_share) == (0.5, 0.1)
    assert list(read(MIXED, "envs.arithmetic.rewards={exact: 1}").envs["arithmetic"].rewards) == ["exact"]
    assert list(read(MIXED, "envs={arithmetic: {rewards: {exact: 1}}}").envs["arithmetic"].rewards) == ["exact"]
    assert read(MIXED, "envs.small.env=calculator").envs["small"].env == resolve.find("envs", "calculator")()
    (here / "own_marks.py").write_text("def mark(rollout): return 1.0\n")
    assert "own_marks:mark" in read(MIXED, "envs.small.rewards.own_marks:mark=2").envs["small"].rewards


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MIXED + "env: arithmetic\n", "recipe.yaml:3: envs must be left out where env is given: a run has one"),
        (MIXED + "rewards: {exact: 1}\n", "recipe.yaml:6: rewards must be given in each entry of envs"),
        (MIXED.replace("weight: 0.5", "weight: 0"), "recipe.yaml:5: envs.small.weight must be above 0"),
        (MIXED.replace("0.25", "1.5"), "recipe.yaml:5: envs.small.min_share must be at least 0 and at most 1"),
        (MIXED.replace("0.25", "1"), "envs must be given a min_share below 1 together: nothing is left for arithmetic"),
        (MIXED.replace("2\n", "{min_share: 0.8}\n"), "envs must be given a min_share of 1 at most together, and they"),
        (
            MIXED.replace("small:", "a.b:"),
            "envs must be named by words of letters, digits, - and _, which 'a.b' is not",
        ),
        (MIXED.replace("small:", "arithmetic:"), "duplicate key 'arithmetic'"),
        (MIXED.replace("min_share", "min_shre"), "unknown option 'min_shre' of envs.small; did you mean 'min_share'?"),
        (MIXED.replace("arithmetic: 2", "sums: 2"), "recipe.yaml:4: envs.sums.env: there is no 'sums' in envs"),
        (
            MIXED.replace("arithmetic: 2", "arithmetic: much"),
            "recipe.yaml:4: envs.arithmetic: expected a mapping of env",
        ),
        (MINIMAL + "envs: {}\n", "recipe.yaml:4: envs changes nothing: it names none; remove it"),
        ("model: m\nsteps: 3\nenvs: {}\n", "env must be given, such as gsm8k"),
        ("model: m\nsteps: 3\n", "missing 'env'"),
        ("model: m\nsteps: 3\nenvs: 3\n", "recipe.yaml:3: envs: expected a mapping"),
    ],
)
def test_mistakes_in_several_environments(here: Path, text: str, message: str) -> None:
    assert message in wrong(text)


def test_dump_leaves_out_what_is_inert_and_json_does_not(here: Path) -> None:
    config = read(MINIMAL + "evaluate: {tasks: 0}\n")
    assert "truncated_penalty" not in dump(config)
    assert "evaluate: {tasks: 0}" in dump(config)
    written = as_json(config)
    assert written["truncated_penalty"] == 1.0
    assert written["evaluate"]["every"] == 0
    assert written["env"]["kind"] == "arithmetic"
    assert written["rewards"] == {"number": {"weight": 1.0, "tolerance": 1e-6, "after": ""}}


def test_python_and_yaml_make_the_same_config(here: Path) -> None:
    made = RunConfig(model="m", steps=3, env=Arithmetic(terms=3), group_size=4)
    assert read(dump(made)) == made
    assert made == replace(made)


def test_a_config_made_in_python_is_checked_too(here: Path) -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        RunConfig(model="m", steps=0, env=Arithmetic())


def test_a_run_can_be_described_without_a_file(here: Path) -> None:
    config = from_options({"model": "folder", "steps": 1}, ["env=arithmetic"], Path("folder")).config
    assert config == RunConfig(model="folder", steps=1, env=Arithmetic())
    with pytest.raises(ConfigError, match="folder: missing 'env'"):
        from_options({"model": "folder", "steps": 1}, [], Path("folder"))


def test_the_digest_is_of_what_decides_training(here: Path) -> None:
    base = digest(read(MINIMAL))
    same = [
        "steps=9",
        "name=x",
        "runs=elsewhere",
        "loggers=[]",
        "threads=1",
        "evaluate.tasks=0",
        "checkpoint.every=1",
        "grading.workers=2",
    ]
    for override in same:
        assert digest(read(MINIMAL, override)) == base, override
    changed = [
        "seed=1",
        "optimizer.lr=1e-5",
        "group_size=4",
        "env.terms=3",
        "rewards.number=2",
        "sampling.top_p=0.9",
        "model=n",
    ]
    others = [digest(read(MINIMAL, override)) for override in changed]
    assert len({base, *others}) == len(changed) + 1


# The builder by itself


@dataclass(frozen=True, kw_only=True)
class _Inner:
    size: int = 1
    """How large."""


@dataclass(frozen=True, kw_only=True)
class _Outer:
    pair: tuple[int, str] = (1, "a")
    """Two."""
    either: int | tuple[str, ...] = 0
    """One or the other."""
    choice: tuple[str, ...] | Literal["all"] = "all"
    """Names, or all."""
    inner: _Inner | None = None
    """Optional."""
    table: dict[str, list[float]] = field(default_factory=dict)
    """By name."""
    anything: Json = None
    """Any value."""
    path: Path = Path("x")
    """A path."""

    def inert(self) -> Mapping[str, str]:
        return {"path": "there is no choice"} if self.choice == "all" else {}


def build(cls: type, values: dict[str, Json]) -> tuple[Any, list[str]]:
    problems = Problems()
    tree = from_plain(values, "here")
    assert isinstance(tree, Branch)
    built = Builder(problems).dataclass(cls, tree, "")
    return built, list(problems)


def test_every_kind_of_type_is_built_and_written_back() -> None:
    values = {
        "pair": [3, "b"], "either": ["x", "y"], "choice": ["q"], "inner": {"size": 2}, "table": {"t": [1, 2.5]},
        "anything": {"deep": [1, None]}, "path": "a/b",
    }  # fmt: skip
    built, problems = build(_Outer, values)
    assert not problems
    assert built == _Outer(
        pair=(3, "b"), either=("x", "y"), choice=("q",), inner=_Inner(size=2), table={"t": [1.0, 2.5]},
        anything={"deep": [1, None]}, path=Path("a/b"),
    )  # fmt: skip
    assert encode(built) == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"pair": [1]},
            "pair: expected a list of 2: a whole number, text, got a list: Expected `array` of length 2, got 1",
        ),
        ({"either": 1.5}, "either: expected a whole number or a list (of text), got the number 1.5"),
        ({"choice": "some"}, "choice: expected a list (of text) or one of all, got the text 'some'"),
        ({"inner": 3}, "inner: expected a mapping of size, got the number 3"),
        ({"inner": {"sise": 3}}, "unknown option 'sise' of inner; did you mean 'size'?"),
        (
            {"table": {"t": ["x"]}},
            "table.t: expected a list (of a number), got a list: Expected `float`, got `str` - at `$[0]`",
        ),
        ({"path": "a"}, "path changes nothing: there is no choice; remove it"),
    ],
)
def test_mistakes_of_every_kind_of_type(values: dict[str, Json], message: str) -> None:
    _, problems = build(_Outer, values)
    assert problems == [f"here: {message}"]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(min_size=1), values, max_size=4))
def test_whatever_is_rendered_is_read_back(data: dict[str, Json]) -> None:
    problems = Problems()
    tree = parse(render(data), "x", problems)
    assert not problems
    assert tree is not None
    assert plain(tree) == data


# A broker

BROKER = "model: m\nsteps: 4\nbroker: http://h:1\nmax_lag: 2\n"


def test_a_broker_is_an_address_or_a_mapping_and_stands_for_an_environment(here: Path) -> None:
    short = read(BROKER)
    assert short.env is None
    assert not short.rewards
    assert not short.evaluates
    assert short.broker is not None
    assert short.broker.url == "http://h:1"
    assert read(BROKER.replace("http://h:1", "{url: 'http://h:1'}")) == short
    assert dump(short).count("broker") == 1
    (here / "again.yaml").write_text(dump(short))
    assert load(here / "again.yaml").config == short


def test_options_of_a_broker_go_over_its_address(here: Path) -> None:
    broker = read(BROKER, "broker.lease_seconds=5").broker
    assert broker is not None
    assert (broker.url, broker.lease_seconds) == ("http://h:1", 5.0)
    moved = read(BROKER, "broker=http://other:2").broker
    assert moved is not None
    assert moved.url == "http://other:2"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("rewards: {number: 1.0}", "rewards changes nothing: tasks are elsewhere (broker) and there is no env"),
        ("evaluate: {tasks: 3}", "evaluate changes nothing: tasks are elsewhere"),
        ("env: arithmetic\nevaluate: {tasks: 0}", "env changes nothing: tasks are elsewhere (broker)"),
        ("truncated: mask", "truncated changes nothing: answers are cut and judged elsewhere"),
        ("broker.url: x", "unknown option"),
    ],
)
def test_what_a_broker_leaves_unread_is_refused(here: Path, more: str, message: str) -> None:
    assert message in wrong(BROKER + more + "\n")


@pytest.mark.parametrize(
    ("broker", "message"),
    [
        ("h:1", "broker.url must be an address that begins with http://"),
        ("{url: 'http://h:1', lease_seconds: 0}", "broker.lease_seconds must be above 0"),
        ("{key_variable: X}", "broker needs 'url'"),
        ("{url: 'http://h:1', missing_logprobs: guess}", "one of refuse, policy"),
    ],
)
def test_a_brokers_options_are_checked(here: Path, broker: str, message: str) -> None:
    assert message in wrong(BROKER.replace("http://h:1", broker))


def test_with_a_broker_an_environment_is_evaluated_on(here: Path) -> None:
    config = read(BROKER + "env: arithmetic\n")
    assert config.evaluates
    assert config.rewards


def test_another_address_is_the_same_run() -> None:
    made = [
        from_options({"model": "m", "steps": 1, "max_lag": 1, "broker": f"http://h:{n}"}, (), Path("x")) for n in (1, 2)
    ]
    assert digest(made[0].config) == digest(made[1].config)


def test_alarms_are_one_word_or_a_mapping(here: Path) -> None:
    assert read(MINIMAL + "alarms: stop\n").alarms.action == "stop"
    mapped = read(MINIMAL + "alarms: {action: stop, ignore: [length, loss]}\n").alarms
    assert (mapped.action, mapped.ignore) == ("stop", ("length", "loss"))
    assert read(MINIMAL).alarms.action == "warn"
    message = wrong(MINIMAL + "alarms: {ignore: [lenght]}\n")
    assert "Invalid enum value 'lenght' - at `$[0]`" in message
    warned = read(MINIMAL + "alarms: stop\n", "alarms=warn")
    assert warned.alarms.action == "warn"
    assert digest(warned) == digest(read(MINIMAL + "alarms: stop\n")), "a resumed run may change it"


def test_fp8_says_what_it_saves(here: Path) -> None:
    Path("recipe.yaml").write_text(MINIMAL + "matmul: fp8\n")
    assert "saves time and no memory" in load(Path("recipe.yaml")).notes[0]


@pytest.mark.parametrize(("computes", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_dtype_auto_is_what_the_machine_computes_and_said_where_it_is_not_bfloat16(
    here: Path, monkeypatch: pytest.MonkeyPatch, computes: bool, dtype: str
) -> None:
    monkeypatch.setattr("tandem.machine.computes_bfloat16", lambda: computes)
    Path("recipe.yaml").write_text(MINIMAL + "dtype: auto\n")
    loaded = load(Path("recipe.yaml"))
    assert loaded.config.dtype == dtype
    assert loaded.notes == (
        () if computes else ("dtype: auto is float32 here, for this processor has no instructions for bfloat16",)
    )
    Path("again.yaml").write_text(dump(loaded.config))
    monkeypatch.setattr("tandem.machine.computes_bfloat16", lambda: not computes)
    assert load(Path("again.yaml")).config == loaded.config  # a run goes on with the type it began with


def test_what_ranks_can_share_is_said(here: Path) -> None:
    assert "distributed.shard" in wrong(MINIMAL, "ranks=2", "distributed.shard=layers")
    assert "distributed.context_parallel must be at least 1" in wrong(
        MINIMAL, "ranks=2", "distributed.context_parallel=0"
    )


def test_one_rank_reads_nothing_of_distributed(here: Path) -> None:
    assert "distributed changes nothing: the trainer is one process" in wrong(
        MINIMAL, "ranks=1", "distributed.timeout_seconds=5"
    )
    assert read(MINIMAL, "distributed.timeout_seconds=5").distributed.timeout_seconds == 5  # as a launcher's ranks take
