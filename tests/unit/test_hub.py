"""A hub that cannot be reached costs one attempt, and is told in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import clone, hub

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
PROXIES = [name for word in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for name in (word, word.upper())]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A hub that listens, for as long as the socket is open."""
    for name in (*OFFLINE, *PROXIES):
        monkeypatch.delenv(name, raising=False)
    hub.away.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server
    hub.away.cache_clear()


def test_a_hub_that_is_there(endpoint: socket.socket) -> None:
    assert hub.away() == ""


def test_a_hub_that_refuses(endpoint: socket.socket) -> None:
    endpoint.close()
    assert hub.away() == f"the Hugging Face hub ({os.environ['HF_ENDPOINT']}) cannot be reached: Connection refused"


def test_a_hub_that_is_not_to_be_asked(endpoint: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.away() == "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"


def test_a_proxy_is_tried_instead(endpoint: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", os.environ["HF_ENDPOINT"])
    monkeypatch.setenv("HF_ENDPOINT", "https://no.such.name.invalid")
    assert hub.away() == ""


@pytest.mark.long
def test_check_of_a_hub_recipe_says_so_in_a_line_each(endpoint: socket.socket, tmp_path: Path) -> None:
    endpoint.close()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: some/model\nsteps: 1\nenv: gsm8k\n")
    environment = {**os.environ, "COLUMNS": "1000", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "tandem", "check", str(recipe)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 3
    assert ended.stderr == ""
    (data, model) = [line.rstrip() for line in ended.stdout.splitlines() if line.startswith("problem")]
    away = f"is not on this machine, and the Hugging Face hub ({os.environ['HF_ENDPOINT']}) cannot be reached"
    assert f"data set 'openai/gsm8k' (subset main, split 'train') {away}" in data
    assert f"the configuration of model 'some/model' {away}" in model


def test_a_path_that_begins_at_the_clones_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = clone.ROOT
    monkeypatch.chdir(tmp_path)
    path = root / "recipes" / "data" / "capitals.jsonl"
    assert clone.where("recipes/data/capitals.jsonl") == f"; there is {path}: run from {root}, or name that"
    assert clone.where("no/such/file") == ""
    assert clone.where(str(path)) == ""
    monkeypatch.setattr(clone, "ROOT", tmp_path)
    assert clone.where(".cache/smollm2") == ""  # not a clone
    (tmp_path / "recipes").mkdir()
    assert clone.where(".cache/smollm2") == f"; bash {tmp_path}/scripts/quickstart fetches it to {tmp_path}"
