"""The four terminals of Atropos' document, by its own command lines, on a CPU with a tiny model.

Every flag is as the document has it. What differs, and why: the model and the ports, as always; on a CPU vLLM lives in
an interpreter of its own and takes little memory (options laid over the engine's flags); the tasks are a local file and
the reward is one that a random model can earn (options laid over the environment's); and two steps are trained.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import build_tiny_model
from integration.atropos_peers import Process, ask, until
from integration.vllm_runs import CUDA, HEAD_DIM, REPOSITORY, engine, metrics, needs_engine
from support.atropos_document import BROKERS, ENGINES, ENVIRONMENTS, HERMES, TRAINERS, command

from tandem.ports import free_port

pytestmark = [needs_engine, pytest.mark.long]

START = 300.0
"""Seconds within which an engine must be ready, or two steps trained; a machine with other work takes long."""
TASKS = [{"question": f"How many are {n} and {n}?", "answer": f"They are {2 * n}.\n#### {2 * n}"} for n in range(1, 30)]


class Terminals(ExitStack):
    """Terminals in one folder, in which lines of the document are said."""

    def __init__(self, place: Path):
        super().__init__()
        self.place = place
        self.model = build_tiny_model(place / "model", head_dim=HEAD_DIM, context=4096)
        self._ports: dict[str, int] = {}
        self._number = itertools.count()
        (place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))

    def port(self, of: str) -> int:
        """A free port instead of one that the document names; the same each time."""
        return self._ports.setdefault(of, free_port())

    def say(self, line: str, *more: str) -> Process:
        """Run a line in a terminal of its own, ``more`` laid over it; it ends with the block."""
        parsed = command(line.replace("/tmp/", f"{self.place}/tmp/"))
        words = [self._here(word) for word in (*parsed.words, *more)]
        path = os.pathsep.join([str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
        start = [f"PYTHONPATH={path}", *(f"{name}={value}" for name, value in parsed.environ.items())]
        log = self.place / f"{next(self._number)}-{parsed.words[0]}.log"
        process = Process(["env", *start, sys.executable, "-m", "tandem", *words], log)
        self.callback(ended, process)
        return process

    def _here(self, word: str) -> str:
        word = re.sub(rf"^({HERMES}|Qwen/[\w.-]+)$", str(self.model), word)
        word = re.sub(r"(?<=localhost:)\d+", lambda match: str(self.port(match[0])), word)
        return str(self.port(word)) if re.fullmatch(r"[89]00\d", word) else word


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    with Terminals(tmp_path) as stack:
        yield stack


def ended(process: Process) -> None:
    """Press Ctrl-C and wait: what an engine's command has started ends first."""
    if process.status() is None:
        os.kill(process.pid, signal.SIGINT)
        with suppress(pytest.fail.Exception):
            until(lambda: process.status() is not None, "the end of a process", 60)
    process.kill()


def here() -> list[str]:
    """Options of a small engine of this machine, laid over those that flags give."""
    own = {
        name: value for name, value in engine().items() if name in ("python", "kv_cache_gb", "args", "enforce_eager")
    }
    own |= {"gpu_memory_utilization": 0.05} if CUDA else {}
    return [f"engine.{name}={json.dumps(value)}" for name, value in own.items() if value is not None]


PLAYED = ["env.path=tasks.jsonl", "rewards={learns.shaping:letters: 1.0}", "sampling.max_tokens=12"]
"""Options laid over those of the environment."""
TRAINED = ["steps=2", "threads=1"]
"""Options laid over those of the trainer."""


def trained(terminals: Terminals, trainer: Process, environment: Process) -> Path:
    """The run's folder, once the trainer is done."""
    until(lambda: trainer.status() is not None or environment.status() not in (None, 0), "two steps", START)
    assert trainer.status() == 0, trainer.output[-4000:] + environment.output[-2000:]
    (folder,) = (terminals.place / "logs").glob("*/metrics.jsonl")
    by_step = metrics(folder.parent)
    assert list(by_step) == [1, 2]
    assert all(row["tokens/trained"] > 0 and row["lag/max"] <= 8 for row in by_step.values())
    assert all(abs(row["ratio"] - 1) < 0.05 for row in by_step.values()), "engine and trainer compute alike"
    return folder.parent


@pytest.mark.parametrize(
    ("engine_s", "trainer_s", "saved"),
    [
        pytest.param("newest, LoRA", "newest, lora_only", "lora_checkpoints/final_adapter", id="lora_only"),
        pytest.param(
            "newest, shared", "newest, shared_vllm", "trained_model_checkpoints/final_model", id="shared_vllm"
        ),
        # An engine that the document's trainer would kill and start again; here it gets the weights by broadcast.
        pytest.param(
            "2025-12", "2026-01-19", "tmp/logs/checkpoints_legacy/final_model", id="none", marks=pytest.mark.long
        ),
        pytest.param(
            "2026-01-19",
            "2026-02-11, lora_nccl",
            "trained_model_checkpoints/final_adapter",
            id="lora_nccl",
            marks=pytest.mark.long,
        ),
    ],
)
def test_four_terminals_with_the_engine_apart(terminals: Terminals, engine_s: str, trainer_s: str, saved: str) -> None:
    broker = terminals.say(BROKERS[1])
    served = terminals.say(ENGINES[engine_s], *here())
    until(lambda: served.status() is not None or "serving at" in served.output, "the engine", START)
    assert served.status() is None, served.output[-4000:]
    environment = terminals.say(ENVIRONMENTS["newest"], *PLAYED)
    trainer = terminals.say(TRAINERS[trainer_s], "--atropos-url", "http://localhost:8002", *TRAINED)
    folder = trained(terminals, trainer, environment)
    assert (terminals.place / saved).is_dir()
    assert served.status() is None, "it is not the trainer's to end"
    assert broker.status() is None
    assert not list((folder / "logs").glob("engine-*.log")), "no second engine was started"
    bridge = terminals.place / "tmp" / "grpo_training" / "vllm_bridge_config.json"
    assert bridge.is_file() == ("shared" in trainer_s)
    ended(served)
    assert served.status() == 0, served.output[-2000:]
    assert not bridge.exists(), "the memory that it names is gone"


@pytest.mark.parametrize(
    "trainer_s",
    [
        pytest.param("2025-12, quick test", id="none"),
        pytest.param("newest, launcher", id="launcher", marks=pytest.mark.long),
    ],
)
def test_four_terminals_where_the_trainer_starts_its_engine(terminals: Terminals, trainer_s: str) -> None:
    """Its engine asks for no key, and the environment, which names no tokenizer, takes the engine's."""
    # Places are those of the defaults, said so that free ports can take their place.
    terminals.say(BROKERS[0], "--port", "8000")
    places = ["--vllm-port", "9001", "--atropos-url", "http://localhost:8000"]
    trainer = terminals.say(TRAINERS[trainer_s], *places, *TRAINED, *here())
    port = terminals.port("9001")
    until(lambda: trainer.status() is not None or _answers(port), "the trainer's engine", START)
    assert trainer.status() is None, trainer.output[-4000:]
    places = ["--env.rollout_server_url", "http://localhost:8000", "--openai.base_url", "http://localhost:9001/v1"]
    environment = terminals.say(ENVIRONMENTS["2025-12"], *places, "--openai.api_key", "x", *PLAYED)
    trained(terminals, trainer, environment)
    assert "which the engine serves" in environment.output
    assert (terminals.place / "trained_model_checkpoints" / "final_model").is_dir()
    assert not _answers(port), "it was the trainer's to end"
    assert ("mean step" in trainer.output) == (trainer_s == "newest, launcher")


def _answers(port: int) -> bool:
    try:
        ask(f"http://localhost:{port}/health", seconds=2.0)
    except (OSError, ValueError):
        return False
    return True
