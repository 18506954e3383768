"""A hub that cannot be reached costs one attempt, and is told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tandem import clone, hub

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
PROXIES = [name for word in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for name in (word, word.upper())]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    """A hub that answers, for as long as the server is not closed."""
    for name in (*OFFLINE, *PROXIES):
        monkeypatch.delenv(name, raising=False)
    hub.away.cache_clear()
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
    hub.away.cache_clear()


def test_a_hub_that_is_there(endpoint: HTTPServer) -> None:
    assert hub.away() == ""


def test_a_hub_that_refuses(endpoint: HTTPServer) -> None:
    endpoint.shutdown()  # else it may take the connection and reset it
    endpoint.server_close()
    assert (
        hub.away()
        == f"the Hugging Face hub ({os.environ['HF_ENDPOINT']}) cannot be reached: [Errno 111] Connection refused"
    )


def test_a_hub_that_is_not_to_be_asked(endpoint: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.away() == "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"


@pytest.mark.long
def test_check_of_a_hub_recipe_says_so_in_a_line_each(endpoint: HTTPServer, tmp_path: Path) -> None:
    endpoint.server_close()
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
