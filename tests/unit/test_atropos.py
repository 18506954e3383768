"""Atropos' verbs and its names for checkpoints: what single flags come to is in ``test_compat_golden``."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem
from tandem.cli import app as cli
from tandem.config.loading import RunConfig, from_options, load
from tandem.errors import ConfigError
from tandem.observability.loggers.base import RunInfo
from tandem.trainer.world import engine_requirements
from tandem.transport.bridge import NCCL_FILE, write_json
from tandem_compat.atropos.checkpoints import CheckpointLayout
from tandem_compat.atropos.environment import from_file
from tandem_compat.atropos.options import TRAINER
from tandem_compat.atropos.server import divided
from tandem_compat.atropos.server import translate as translate_server
from tandem_compat.commands import run as verb
from tandem_compat.commands.flags import repeated

Run = Callable[..., tuple[int, str, str]]


# The command line


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the verb in an empty folder: arguments in; exit code, stdout and stderr out."""
    monkeypatch.chdir(tmp_path)
    for name in ("LOGDIR", "NUM_INFERENCE_NODES", "MASTER_ADDR", "MASTER_PORT", "TANDEM_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(verb, "running_engine", lambda flags, environ: None)  # whatever serves on this machine

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main(["atropos-grpo", *arguments])
        printed = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, printed.out, printed.err

    return call


def test_modules_may_be_words_of_their_own() -> None:
    words = repeated(["--lora-target-modules", "q", "v", "--lr", "1", "env.path=x"], TRAINER.values())
    assert words == ["--lora-target-modules", "q", "--lora-target-modules", "v", "--lr", "1", "env.path=x"]


def test_show_prints_the_recipe(run: Run) -> None:
    code, out, err = run(
        "--model", "m", "--env", "gsm8k", "--weight-bridge-mode", "lora_nccl",
        "--lora-target-modules", "q_proj", "o_proj",
        "--no-nccl-sync-every-step", "--vllm-restart-interval", "2", "--vllm-gpu-memory-utilization", "0.3",
        "env.path=rows.jsonl", "seed=3", "--show",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.startswith("# --lora-dropout: ")
    recipe = yaml.safe_load(out)
    assert recipe["trainable"]["target_modules"] == ["q_proj", "o_proj"]
    assert recipe["sync"] == {"kind": "broadcast", "every": 2, "host": "localhost", "port": 29500}
    assert recipe["engine"]["gpu_memory_utilization"] == 0.3
    assert (recipe["env"], recipe["seed"]) == ({"kind": "gsm8k", "path": "rows.jsonl"}, 3)
    assert not list(Path().iterdir())


def test_show_refuses_what_training_would(run: Run) -> None:
    code, out, err = run("--model", "m", "--env", "gsm8k", "--lr", "-1", "--warmup-steps", "-3", "--show")
    assert (code, out) == (2, "")
    assert "optimizer.lr must" in err
    assert "optimizer.warmup_steps must" in err


def test_every_number_below_one_is_reported_and_says_nothing_of_groups(run: Run) -> None:
    words = ["--gradient-accumulation-steps", "6", "--group-size", "4", "--training-steps", "0", "--seq-len", "0"]
    code, _, err = run("--model", "m", "--env", "gsm8k", *words, "--show")
    assert code == 2
    assert "--training-steps: Expected `int` >= 1" in err
    assert "--seq-len: Expected `int` >= 1" in err
    assert "--group-size" not in err


def test_zeros_are_given_values(run: Run) -> None:
    start = ["--model-name", "m", "--env", "gsm8k", "--weight-bridge-mode", "lora_only", "--show"]
    code, out, _ = run(*start, "--lora-dropout", "0", "--checkpoint-interval", "0")
    assert code == 0
    assert "dropout" not in out
    assert yaml.safe_load(out)["checkpoint"] == {"every": 10}


def test_mistakes_are_told_before_anything_loads(run: Run) -> None:
    code, out, err = run("--model-name", "m", "--dtype", "int8")
    assert (code, out) == (2, "")
    assert err.startswith("tandem: --dtype: there is no 'int8' here")
    code, _, err = run("--env", "gsm8k")
    assert code == 2
    assert "--model-name" in err
    assert run("--model-name", "m", "--env", "x", "--leraning-rate", "1")[0] == 2
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_help_has_every_flag_with_its_default(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    text = " ".join(out.split())
    assert [name for name in TRAINER if f"--{name}" not in text] == []
    assert "Learning rate. Default: 1e-05." in text


# The engine's server


def test_other_options_of_vllm_are_handed_on() -> None:
    words = ["--quantization", "fp8", "--trust-remote-code", "engine.python=x", "--swap-space=4", "seed=3"]
    assert divided(words) == (
        {"quantization": "fp8", "trust_remote_code": True, "swap_space": "4"},
        ["engine.python=x", "seed=3"],
    )


def test_a_server_has_room_for_versions_of_an_adapter(tiny_model: Path) -> None:
    flags = {"model": [str(tiny_model)], "enable-lora": True, "max-loras": ["4"]}
    config = from_options(translate_server(flags, {}, {}).options, (), Path("x")).config
    assert engine_requirements(config, None).versions == 4


# An environment's file

FILE = """
env: {group_size: 4, tokenizer_name: m, use_wandb: true, max_batches_offpolicy: 2, data_path_to_save_groups: null}
openai:
  - {model_name: m, base_url: "http://localhost:9001/v1", api_key: x, weight: 1.0}
  - {model_name: m, base_url: "http://localhost:9002/v1", api_key: x, weight: 1.0}
slurm: false
testing: false
"""


def test_a_file_gives_flags(tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(FILE)
    assert from_file(path) == {
        "env.group_size": ["4"], "env.tokenizer_name": ["m"], "env.use_wandb": ["True"],
        "env.max_batches_offpolicy": ["2"], "openai.model_name": ["m"], "openai.api_key": ["x"],
        "openai.base_url": ["http://localhost:9001/v1,http://localhost:9002/v1"], "slurm": ["False"],
        "testing": ["False"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: {start_tok_length: 8192}", "there is no env.start_tok_length"),
        ("- 1", "is not a mapping"),
        ("a: [", "cannot be read"),
        ("env: gsm8k", "env and openai are mappings"),
        ("openai: [http://localhost:9001]", "env and openai are mappings"),
        ("1: 2", "there is no 1 "),
        ("openai: [{base_url: 1}, {base_url: 2, api_key: x}]", "servers differ in api_key"),
    ],
)
def test_a_file_that_gives_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "example.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path / "example.yaml")


# Checkpoints


def fake_run(folder: Path, *steps: int, kind: str = "full") -> Path:
    """A run's folder with checkpoints in which only the files' names are real."""
    inside = {"full": "model", "lora": "adapter"}[kind]
    prefix = {"full": "", "lora": "adapter_"}[kind]
    weights = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}[kind]
    for step in steps:
        checkpoint = folder / "checkpoints" / f"{step:06d}" / inside
        checkpoint.mkdir(parents=True)
        for name in (weights, f"{prefix}config.json", "README.md", "tokenizer.json", "tokenizer_config.json"):
            (checkpoint / name).write_text(f"{name} of {folder.name} {step}")
        (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def lay_out(folder: Path, save: Path, *, kind: str = "full", every: int = 2, last: int = 4) -> None:
    """Save a run's checkpoints, one after the other."""
    config = {"steps": last, "checkpoint": {"every": every}, "trainable": {"kind": kind}}
    writer = CheckpointLayout(save_path=str(save)).open(RunInfo(name="run", folder=folder, steps=last, config=config))
    for checkpoint in sorted((folder / "checkpoints").glob("[0-9]*")):
        writer.event("checkpoint_saved", {"step": int(checkpoint.name), "path": str(checkpoint)})
    writer.close()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("full", {"step_2", "step_4", "final_model", "tokenizer"}),
        ("lora", {"adapter_step_2", "adapter_step_4", "final_adapter", "tokenizer"}),
    ],
)
def test_checkpoints_get_their_names(tmp_path: Path, kind: str, expected: set[str]) -> None:
    folder, save = fake_run(tmp_path / "run", 2, 4, kind=kind), tmp_path / "a" / "save"
    lay_out(folder, save, kind=kind)
    assert names(save) == expected
    assert names(save / "tokenizer") == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    final = save / min(expected, key=lambda name: not name.startswith("final"))
    assert (final / "tokenizer.json").read_text() == "tokenizer.json of run 4"
    assert (save / "tokenizer" / "tokenizer.json").read_text() == "tokenizer.json of run 4"


def test_the_last_step_alone_where_no_interval_asks_for_more(tmp_path: Path) -> None:
    lay_out(fake_run(tmp_path / "a", 4), tmp_path / "s", every=4)
    assert names(tmp_path / "s") == {"final_model", "tokenizer"}
    lay_out(fake_run(tmp_path / "b", 3, 4), tmp_path / "t", every=3)
    assert names(tmp_path / "t") == {"step_3", "final_model", "tokenizer"}
    lay_out(fake_run(tmp_path / "c", 1), tmp_path / "u")  # stopped by hand
    assert names(tmp_path / "u") == {"step_1", "tokenizer"}


def test_a_folder_of_another_run_is_replaced_whole(tmp_path: Path) -> None:
    save = tmp_path / "s"
    (save / "step_2").mkdir(parents=True)
    (save / "step_2" / "stale.safetensors").write_text("stale")
    (save / ".step_2.tmp").mkdir()
    lay_out(fake_run(tmp_path / "run", 2), save)
    assert "stale.safetensors" not in names(save / "step_2")
    assert not [name for name in names(save) if name.startswith(".")]


def test_a_copy_that_fails_is_told_and_leaves_nothing_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one is made all the same."""
    copy = shutil.copytree

    def full_disk(source: Path, target: Path, **options: Any) -> None:
        if "000002" not in str(source):
            copy(source, target, **options)
            return
        target.mkdir(parents=True)
        raise OSError(28, "No space left on device")

    folder, save = fake_run(tmp_path / "run", 2, 4), tmp_path / "s"
    monkeypatch.setattr("shutil.copytree", full_disk)
    lay_out(folder, save)
    assert names(save) == {"step_4", "final_model", "tokenizer"}
    assert "000002/model cannot be copied to" in caplog.text
    assert "No space left on device" in caplog.text


def test_the_logger_copies_while_the_run_goes_on(tmp_path: Path) -> None:
    folder, save = fake_run(tmp_path / "run", 2, 4), tmp_path / "s"
    config = {"steps": 4, "checkpoint": {"every": 2}, "trainable": {"kind": "full"}}
    writer = CheckpointLayout(save_path=str(save)).open(RunInfo(name="run", folder=folder, steps=4, config=config))
    writer.event("published", {"step": 1})
    assert not save.exists()
    writer.event("checkpoint_saved", {"step": 2, "path": str(folder / "checkpoints" / "000002")})
    writer.event("checkpoint_saved", {"step": 4, "path": str(folder / "checkpoints" / "000004")})
    assert (save / "step_2" / "model.safetensors").is_file()  # before the first may be pruned
    writer.close()
    assert names(save) == {"step_2", "step_4", "final_model", "tokenizer"}


def test_the_file_of_the_process_group_is_copied_as_it_is_formed_anew(tmp_path: Path) -> None:
    folder, save = fake_run(tmp_path / "run", 2, 4), tmp_path / "my sa ve"
    config = {"steps": 4, "checkpoint": {"every": 2}, "trainable": {"kind": "full"}}
    writer = CheckpointLayout(save_path=str(save)).open(RunInfo(name="run", folder=folder, steps=4, config=config))
    for port in (1, 2):
        group = {"nccl_init_method": f"tcp://here:{port}", "world_size": 2}
        write_json(folder / NCCL_FILE, group)
        writer.event("published", {"step": port})
        assert json.loads((save / NCCL_FILE).read_text()) == group
    writer.close()


def test_other_trainings_have_no_name(tmp_path: Path) -> None:
    info = RunInfo(name="r", folder=tmp_path, steps=1, config={"trainable": {"kind": "my:Own"}})
    with pytest.raises(ConfigError, match="no name for checkpoints of trainable: my:Own"):
        CheckpointLayout(save_path="s").open(info)


def test_the_benchmark_sums_up_what_was_written_down(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "time": 1.0, "metrics": {"seconds/step": 2.0, "seconds/wait": 1.0, "memory/rss_gb": 3.5}},
        {"step": 2, "time": 5.0, "metrics": {"seconds/step": 4.0, "seconds/wait": 2.0, "memory/rss_gb": 2.5}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"time": 0.0, "event": "run_started", "step": 0}, {"time": 7.0, "event": "run_done", "step": 2}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    lines = [line.split("  ", 1) for line in verb.benchmark(tmp_path).splitlines()]
    assert {label: value.strip() for label, value in lines} == {
        "steps": "2",
        "mean step": "3.000 s",
        "mean sync": "not measured",
        "mean fetch": "1.500 s",
        "peak memory/rss_gb": "3.50 GB",
        "total": "7.0 s",
    }


# A run


def test_a_run_ends_with_where_its_checkpoints_are(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def train(config: RunConfig, *, resume: Path | None) -> Path:
        assert (config.steps, config.seed, resume) == (4, 3, None)
        return fake_run(Path("run"), 4)

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setitem(sys.modules, "tandem.trainer.assemble", fake)
    monkeypatch.setattr(tandem.trainer, "assemble", fake, raising=False)
    code, out, err = run(
        "--model", "m", "--env", "arithmetic", "--training-steps", "4", "--save-path", "saved",
        "engine=embedded", "sync=shared", "max_lag=0", "seed=3",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out == "done: run (tandem show run); report: run/report.html; checkpoints: saved\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("mode", ["none", "lora_only"])
def test_it_trains_and_its_checkpoints_load(run: Run, tiny_model: Path, mode: str) -> None:
    code, out, err = run(
        "--model-name", str(tiny_model), "--env", "arithmetic", "--weight-bridge-mode", mode, "--training-steps", "3",
        "--batch-size", "2", "--gradient-accumulation-steps", "4", "--group-size", "4", "--seq-len", "256",
        "--checkpoint-interval", "1", "--dtype", "float32", "--save-path", "saved", "--benchmark", "--lr", "1e-3",
        "engine=embedded", "sync=shared", "max_lag=0", "sampling.max_tokens=8", "zero_variance_groups=keep",
        "threads=1", "checkpoint.keep=1",
    )  # fmt: skip
    assert code == 0, err
    assert "mean step" in out
    assert ("--lora-dropout: 0.05 is left out" in err) == (mode == "lora_only")
    lora = mode == "lora_only"
    step, final = ("adapter_step", "final_adapter") if lora else ("step", "final_model")
    assert names(Path("saved")) == {f"{step}_1", f"{step}_2", f"{step}_3", final, "tokenizer"}
    (folder,) = Path("logs").iterdir()
    assert names(folder / "checkpoints") == {"000003"}
    assert load(folder / "config.yaml").config.loggers[-1] == CheckpointLayout(
        save_path="saved"
    )  # so a resumed run goes on copying
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained("saved/tokenizer")
    if lora:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        assert "default" in PeftModel.from_pretrained(base, f"saved/{final}").peft_config
    else:
        AutoModelForCausalLM.from_pretrained(f"saved/{final}")
        AutoTokenizer.from_pretrained(f"saved/{final}")
