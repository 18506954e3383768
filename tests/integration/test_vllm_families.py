"""Families of models on a real vLLM: a tiny random one of each trains, proven, killed and resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import _byte_tokenizer
from integration.vllm_mapped import AS_TEXT, EXACT
from integration.vllm_runs import (
    HEAD_DIM,
    REPOSITORY,
    Trainer,
    engine,
    engine_python,
    groups_once,
    metrics,
    needs_engine,
    published,
    same_logprobs,
)
from safetensors.torch import save_file
from support.families import FAMILIES, PAGE, cells, config_of

from tandem.model import packing

pytestmark = needs_engine

STEPS = 8
WAYS = [
    ("phi3", "shared"),
    ("qwen3_moe", "restart"),
    ("gpt_oss", "restart"),
    ("granite", "shared"),
    ("mixtral", "restart"),
    ("olmo2", "shared"),
    ("falcon_h1", "shared"),
    ("gemma3", "shared"),
]
"""By ``shared`` but for experts, which vLLM repacks for a processor."""
ADAPTED = {
    "kind": "lora",
    "rank": 4,
    "merged": True,
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def made(name: str, folder: Path) -> Path:
    """A tiny model whose heads are wide enough for vLLM's attention."""
    tokenizer, config = _byte_tokenizer(256), config_of(name)
    text = config.get_text_config()
    text.hidden_size, text.head_dim = text.num_attention_heads * HEAD_DIM, HEAD_DIM
    text.vocab_size, text.bos_token_id, text.eos_token_id, text.pad_token_id = len(tokenizer), 256, 257, 258
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = packing.causal_class(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_prefix_is_computed_once_by_the_transformers_that_vllm_wants_too() -> None:
    names = ("qwen3_next", "bamba", "lfm2")
    code = f"""
from support.families import config_of
from tandem.model.packing import chosen
print(*(chosen(config_of(name)) for name in {names}), sep="\\n")"""
    paths = os.pathsep.join(map(str, (REPOSITORY / "src", REPOSITORY / "tests")))
    command = [engine_python() or sys.executable, "-c", code]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert ran.stdout.count("Choice(packing='prefix'") == len(names), ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.parametrize(("name", "sync"), WAYS, ids=map("-".join, WAYS))
def test_a_family_is_trained_proven_killed_and_resumed(name: str, sync: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "model")
    way = {"kind": sync, "every": 1} if sync == "restart" else sync
    steps = 3 if sync == "restart" else STEPS  # for each of which an engine is started
    # With it vLLM 0.32 on a CPU fails on prompts beside each other through Mamba-2 layers.
    here = engine(enable_prefix_caching=False if name == "falcon_h1" else None)
    trainable = ADAPTED if name == "mixtral" else {"kind": "full"}
    if "text_config" in FAMILIES[name]:
        here["args"] = here.get("args", {}) | AS_TEXT
    run = Trainer.fresh(tmp_path, model, steps=steps, trainable=trainable, sync=way, engine=here)
    try:
        run.kill_between_publishes(1)
        resumed = Trainer(tmp_path, "runs/run")
        resumed.ended(seconds=800)
    finally:
        run.clean()
    assert set(metrics(run.folder)) == set(range(1, steps + 1))
    assert all(event["probe_gap"] is not None for event in published(run.folder).values())
    assert len({event["digest"] for event in published(run.folder).values()}) == len(published(run.folder))
    groups_once(run.folder, each=4)
    same_logprobs(run.folder)


PROMPT = [(7 * i * i + 11 * i + 5) % 290 + 3 for i in range(24)]


def seen(names: Iterable[str], place: Path) -> dict[str, dict[str, Any]]:
    """What vLLM does with tiny models, and with weights that are written where the map says."""
    folders = [_written(name, place / name) for name in names]
    paths = os.pathsep.join(str(REPOSITORY / folder) for folder in ("src", "tests"))
    script = REPOSITORY / "tests/integration/vllm_mapped.py"
    subprocess.run([engine_python(), script, *folders], env=os.environ | {"PYTHONPATH": paths}, check=True)
    return {folder.name: json.loads((folder / "seen.json").read_text()) for folder in folders}


def _written(name: str, folder: Path) -> Path:
    config = config_of(name)
    if hasattr(config, "attention_chunk_size"):
        config.attention_chunk_size = 128  # a block of vLLM's cache
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = packing.causal_class(config).from_config(config, dtype=torch.float32).eval()
        model.save_pretrained(folder / "model")
        started = _logprobs(model)
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.3 * parameter.std(correction=0)
        (folder / "expected.json").write_text(json.dumps([PROMPT, started, _logprobs(model)]))
        save_file({key: p.detach().clone() for key, p in model.named_parameters()}, folder / "new.safetensors")
    return folder


def _logprobs(model: Any) -> list[float]:
    ids = torch.tensor(PROMPT)
    logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[:, 0].tolist()


def is_published(of: dict[str, Any]) -> bool:
    """What was written is what is sampled from, as closely as that was at first."""
    return bool(of.get("published", 0.0) < max(EXACT, of.get("started", 0.0)))


def way(of: dict[str, Any]) -> str:
    """A family's cell of the page."""
    return "-" if "fails" in of else "restart" if "refused" in of else "shared"


def why(of: dict[str, Any]) -> str:
    """The page's words for it: of one parameter for all that are alike, and without what a reader cannot look up."""
    reason = re.sub(r"ValidationError: .*\n +Value error, ", "", of.get("fails") or of.get("refused", ""))
    reason = re.sub(r" \(torch\.\w+, \([\d, ]*\)\)|; use sync: restart for this model| \(\w+Error\(.*", "", reason)
    reason = re.sub(r"'[\w.]*?(\w+(?:\.\w+)?)'", r"`\1`", re.sub(r"Layer \d+", "a layer", reason))
    return re.split(r"\n|\. ", reason)[0]


@pytest.mark.parametrize("names", [("phi3", "falcon_h1", "qwen3_moe")], ids="-".join)
def test_vllm_is_published_to_as_the_page_says(names: tuple[str, ...], tmp_path: Path) -> None:
    column = cells(PAGE.read_text(encoding="utf-8"))
    for name, of in seen(names, tmp_path).items():
        assert way(of) == column[name], of
        assert is_published(of)
        assert of.get("derives", False) == (name == "falcon_h1")


@pytest.mark.long
def test_the_page_says_how_vllm_is_published_to(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """``--golden`` writes the column and its section anew."""
    page = PAGE.read_text(encoding="utf-8")
    measured = seen(cells(page), tmp_path)
    assert [name for name, of in measured.items() if not is_published(of)] == []
    if request.config.getoption("--golden"):
        PAGE.write_text(_with_vllm(page, measured), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == _with_vllm(page, measured)


def _with_vllm(page: str, measured: dict[str, dict[str, Any]]) -> str:
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, of in measured.items():
        page = re.sub(rf"(\| `{name}` (?:\|[^|]*){{4}}\| )[\w-]+ ", rf"\g<1>{way(of)} ", page)
        if way(of) != "shared":
            alike[way(of).replace("-", "not run"), why(of)].append(f"`{name}`")
    lines = [f"- {kind}, {', '.join(names)}: {reason}" for (kind, reason), names in sorted(alike.items())]
    head, mark, section = page.partition("## vLLM\n")
    return head + mark + section.partition("\n- ")[0] + "\n" + "\n".join(lines) + "\n"
