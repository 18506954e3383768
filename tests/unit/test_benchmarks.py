"""Benchmarks by lm-eval itself, on a task of this file: a model before and after training, sample by sample."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tandem.api.benchmarks import Score, benchmark
from tandem.api.benchmarks.grading import math_verify
from tandem.cli.evaluate import print_benchmarks
from tandem.errors import ConfigError

pytest.importorskip("lm_eval", reason="pip install 'tandem-rl[eval]'")

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
output_type: generate_until
test_split: test
num_fewshot: 0
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {do_sample: false, max_gen_toks: 2, until: []}
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "([0-9]+)"}, {function: take_first}]}
  - {name: "any", filter: [{function: regex, regex_pattern: "(.*)"}, {function: take_first}]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_measured_before_and_after_sample_by_sample(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text("".join(json.dumps({"q": f"{n} + 1?", "a": str(n + 1)}) + "\n" for n in range(4)))
    (tmp_path / "sums.yaml").write_text(TASK.replace("ROWS", str(rows)))
    shutil.copytree(tiny_model, run / "checkpoints/000002/model")
    (run / "config.yaml").write_text(f"model: {tiny_model}\nsteps: 2\nenv: arithmetic\n")
    print_benchmarks(run, [str(tmp_path / "sums.yaml")], ["evaluate.tasks=3"], None)
    first, *scores = capsys.readouterr().out.splitlines()
    assert first == f"{tiny_model} → {run / 'checkpoints/000002/model'}"
    assert [line.partition(",")[0] for line in scores] == ["  sums exact_match (strict)", "  sums exact_match (any)"]
    assert all("3 samples: 0.000 ±0.000 → 0.000 ±0.000  +0.000" in line for line in scores)
    kept = [json.loads(line) for line in (run / "benchmarks.jsonl").read_text().splitlines()]
    assert [row["line"] for row in kept] == [line.strip() for line in scores]


def test_a_gain_is_paired_sample_by_sample() -> None:
    score = Score(task="t", metric="m", models=("a", "b"), samples=([0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0]))
    assert str(score) == (
        "t m, 4 samples: 0.500 ±0.566 → 0.750 ±0.490  +0.250 [-0.240, +0.740] paired: 1 tasks better, 0 worse"
    )
    assert str(Score(task="t", metric="m", models=("a",), samples=([1.0, 1.0],))) == "t m, 2 samples: 1.000 ±0.000"


def test_options_of_a_recipe_are_none_of_a_benchmark() -> None:
    with pytest.raises(ConfigError, match=r"no options but evaluate.tasks=N"):
        print_benchmarks(Path("model"), ["gsm8k"], ["loss=grpo"], None)


def test_a_model_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="model 'runs/none' is not on this machine"):
        benchmark(Path("runs/none"), ["gsm8k"])


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-rl\[eval\]'"):
        benchmark(Path("model"), ["gsm8k"])


@pytest.mark.parametrize(("answer", "score"), [(r"So \boxed{\frac{2}{4}}.", 1.0), (r"So \boxed{3}.", 0.0)])
def test_math500_is_graded_by_what_is_equal(answer: str, score: float) -> None:
    assert math_verify({"answer": r"\frac{1}{2}"}, [answer]) == {"math_verify": score}
