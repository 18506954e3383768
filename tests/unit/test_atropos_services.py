"""The engine and the broker that a trainer of Atropos finds, or does not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from integration.atropos_peers import until

from tandem.errors import BrokerError, EngineError
from tandem.ports import free_port
from tandem_compat.atropos.rules import RunningEngine, read
from tandem_compat.atropos.services import require_broker, running_engine, served_model
from tandem_compat.table import Reader

INFO = {"engine": "abc", "model": "m", "context": 64, "logprobs": "processed_logprobs", "apart": True}


@contextmanager
def listening(status: int, answer: Any) -> Iterator[int]:
    """The port of a server that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *words: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def flags(port: int, mode: str = "lora_only", **options: Any) -> Reader:
    named = {"model_name": "m", "vllm_port": port, "weight_bridge_mode": mode, **options}
    return read({name.replace("_", "-"): value for name, value in named.items()})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "shared_vllm", "lora_only", "lora_restart", "lora_nccl"])
def test_an_engine_at_the_port_is_found(mode: str) -> None:
    with listening(200, INFO) as port:
        assert running_engine(flags(port, mode), {}) == RunningEngine(url=f"http://localhost:{port}")
    assert running_engine(flags(port, mode), {}) is None, "it has ended"


def test_the_engine_of_another_trainer_is_not_taken() -> None:
    """It may be one that is used, or one that outlives a trainer that was killed for some minutes."""
    with listening(200, {**INFO, "apart": False}) as port:
        assert running_engine(flags(port), {}) is None


@pytest.mark.slow
def test_what_is_no_engine_is_left_to_whoever_starts_one() -> None:
    with listening(404, {}) as port:
        assert running_engine(flags(port), {}) is None
    with listening(200, ["something"]) as port:
        assert running_engine(flags(port), {}) is None
    with listening(401, {}) as port:  # which the trainer then says
        assert running_engine(flags(port), {}) == RunningEngine(url=f"http://localhost:{port}")


def test_what_does_not_speak_http_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 12)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert running_engine(flags(port), {}) is None
        with pytest.raises(BrokerError, match="nobody answers"):
            require_broker(f"http://127.0.0.1:{port}", 0.0)
        thread.join()


def test_engines_that_are_named_are_not_looked_for() -> None:
    with listening(200, INFO) as port:
        assert running_engine(flags(port, vllm_url=("http://a",)), {}) is None
        assert running_engine(flags(port, num_inference_nodes=2), {}) is None
        assert running_engine(flags(port), {"NUM_INFERENCE_NODES": "2"}) is None
        assert running_engine(flags(port), {"NUM_INFERENCE_NODES": "0"}) is not None


def test_a_file_that_is_named_is_of_the_engine_at_the_port(tmp_path: Path) -> None:
    """One that is still starting writes it later, and is asked itself."""
    file = tmp_path / "vllm_bridge_config.json"
    named = flags(9, "shared_vllm", vllm_config_path=str(file))
    assert running_engine(named, {}) == RunningEngine(url="http://localhost:9")
    file.write_text("{}")
    assert running_engine(named, {}) == RunningEngine(url="http://localhost:9", bridge=str(file))


# The engine of an environment


@pytest.mark.slow
def test_an_environment_takes_the_engine_s_model() -> None:
    with listening(200, INFO) as port:
        assert served_model(f"http://localhost:{port}/v1") == "m"
    with listening(200, {"data": [{"id": "name", "root": "folder"}]}) as port:  # vLLM's own
        assert served_model(f"http://localhost:{port}/v1") == "folder"
    with listening(401, {}) as port, pytest.raises(EngineError, match=r"status 401.*--env.tokenizer_name"):
        served_model(f"http://localhost:{port}/v1")
    with pytest.raises(EngineError, match=rf"no engine answers at http://localhost:{port} "):
        served_model(f"http://localhost:{port}/v1", seconds=0.1)


# The broker


def test_a_broker_that_is_not_there_is_an_error_with_its_url() -> None:
    port = free_port()
    with pytest.raises(BrokerError, match=rf"nobody answers at http://localhost:{port} .*run-api"):
        require_broker(f"http://localhost:{port}", 0.1)


@pytest.mark.slow
def test_a_broker_that_is_there_is_not_waited_for() -> None:
    for status in (200, 401):
        with listening(status, {}) as port:
            require_broker(f"http://localhost:{port}", 0.0)


@pytest.mark.slow
def test_the_first_sigterm_ends_the_wait_for_a_broker(tmp_path: Path, tiny_model: Path) -> None:
    port = free_port()
    words = ["--model", str(tiny_model), "--atropos-url", f"http://localhost:{port}", "--vllm-port", str(free_port())]
    command = [sys.executable, "-m", "tandem", "atropos-grpo", *words]
    with (tmp_path / "said").open("wb") as output:
        trainer = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
    try:
        until(lambda: "max_lag" in (tmp_path / "said").read_text(), "the flags to be read", 60)
        trainer.terminate()
        assert trainer.wait(20) != 0
    finally:
        trainer.kill()
        trainer.wait()
