"""A trained model's card, and its way to a hub: the real client, and a server that stands in for the hub."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError

from tandem.api.card import model_card
from tandem.api.publishing import push
from tandem.errors import ConfigError

CONFIG = (
    "model: org/base\nsteps: 2\nenv: {kind: dataset, path: org/rows}\nrewards: {right: {weight: 1.0}, brief: 0.2}\n"
)


def lines(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run's folder as training leaves it."""
    run = tmp_path / "runs/a"
    for kind in ("model", "adapter"):
        weights = run / "checkpoints" / ("000002" if kind == "model" else "000001") / kind
        weights.mkdir(parents=True)
        (weights / "config.json").write_text("{}")
        (weights / "model.safetensors").write_bytes(b"weights")
    (run / "config.yaml").write_text(CONFIG)
    shared = {"env": "dataset", "tasks": 3, "samples": 1, "rollouts": []}
    lines(run / "eval.jsonl", {"step": 0, "mean": 0.0, "mean_ci": [0, 0.4], "solved": [0, 0, 0], **shared},
          {"step": 2, "mean": 0.667, "mean_ci": [0.2, 1], "solved": [1, 0, 1], **shared})  # fmt: skip
    lines(run / "metrics.jsonl", *({"step": step, "metrics": {"reward": step / 2}} for step in (1, 2)))
    lines(
        run / "events.jsonl",
        *({"time": 1.0, "step": n, "event": "published", "digest": f"d{n}", "probe_gap": n / 8} for n in (1, 2)),
    )
    lines(run / "benchmarks.jsonl", {"task": "gsm8k", "metric": "m", "line": "old"},
          {"task": "gsm8k", "metric": "m", "line": "gsm8k m: 0.1 → 0.2"})  # fmt: skip
    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The hub's API as far as an upload asks for it; what was sent, by path."""
    uploads: dict[str, Any] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            place = self.path.split("?")[0]
            uploads[place] = [json.loads(line) for line in body.splitlines()]
            status, answer = 200, {}
            if place == "/api/repos/create":
                status = 403 if "theirs" in body.decode() else 200
                answer = {"url": f"http://{self.headers['Host']}/me/{uploads[place][0]['name']}"}
            elif "preupload" in place:
                files = uploads[place][0]["files"]
                answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            elif "commit" in place:
                answer = {"commitUrl": f"http://{self.headers['Host']}/me/a/commit/1", "commitOid": "1"}
            elif "validate" in place:
                answer = {"errors": [], "warnings": []}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"id": "me/a", "sha": "0", "siblings": []}')

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    uploads["environ"] = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0",
                        "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    yield uploads
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_card_says_what_it_is_what_it_reached_and_how_to_load_it(trained: Path, whole: bool) -> None:
    weights = trained / ("checkpoints/000002/model" if whole else "checkpoints/000001/adapter")
    card = ModelCard(model_card(trained, weights, "me/a", whole=whole))
    about = card.data.to_dict()
    assert (about["library_name"], about["base_model"]) == ("transformers" if whole else "peft", "org/base")
    assert (about["datasets"], about["pipeline_tag"]) == ("org/rows", "text-generation")
    for text in (
        "| 2 | 66.7 % [20–100] | 3 × 1 |",
        "paired: 2 tasks better, 0 worse",
        "- reward: 0.5 `▁█` 1",
        "- gsm8k m: 0.1 → 0.2",
        "`right` × 1, `brief` × 0.2",
        "Of 2 publishes of weights to the engine 2 were proved",
        "0.25 nats. Digest of the last: `d2`",
        "vllm serve me/a" if whole else "vllm serve org/base --enable-lora --lora-modules trained=me/a",
        "pretrained=me/a" if whole else "pretrained=org/base,peft=me/a",
        CONFIG,
    ):
        assert text in card.text
    assert "old" not in card.text


def test_a_run_that_recorded_nothing_has_a_card(trained: Path) -> None:
    for file in trained.glob("*.jsonl"):
        file.unlink()
    text = model_card(trained, trained / "checkpoints/000002/model", "a", whole=True)
    assert "## How to use it" in text
    assert "## Held out" not in text
    assert "## Proof" not in text


@pytest.mark.slow
def test_push_uploads_the_model_and_its_card(trained: Path, hub: dict[str, Any]) -> None:
    words = [sys.executable, "-m", "tandem", "push", str(trained), "me/a", "--private"]
    done = subprocess.run(words, env=hub["environ"], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("/me/a\n")
    made = hub["/api/repos/create"][0]
    assert made.get("visibility") == "private" or made.get("private")
    files = {row["value"]["path"]: row["value"] for row in hub["/api/models/me/a/commit/main"] if row["key"] == "file"}
    assert set(files) == {"config.json", "model.safetensors", "README.md"}
    card = base64.b64decode(files["README.md"]["content"]).decode()
    assert 'from_pretrained("me/a"' in card
    assert hub["/api/validate-yaml"][0]["content"] == card


def test_a_run_or_a_hub_that_is_not_there_is_named_before_anything_is_made(trained: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        push(trained.with_name("none"), "me/a")
    with pytest.raises(ConfigError, match="cannot push to me/a: HF_HUB_OFFLINE is set"):
        push(trained, "me/a")


def test_a_refusal_of_the_hub_says_how_to_log_in(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.hub.away", lambda: "")
    with pytest.raises(ConfigError, match=r"cannot push to a/b/c: .*; log in by: hf auth login"):
        push(trained, "a/b/c")


def test_a_connection_lost_in_a_push_is_one_sentence(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object, **__: object) -> None:
        raise HfHubHTTPError.__bases__[0]("reset by peer")

    monkeypatch.setattr("tandem.hub.away", lambda: "")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lose)
    with pytest.raises(ConfigError, match=r"push to me/a: the connection was lost \(reset by peer\); push again"):
        push(trained, "me/a")
