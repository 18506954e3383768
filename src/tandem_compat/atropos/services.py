"""Running services that an Atropos command expects: the engine that the trainer is to use, and the broker."""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import BrokerError, EngineError
from tandem_compat.atropos.rules import RunningEngine
from tandem_compat.table import Reader

log = logging.getLogger(f"tandem.{__name__}")

MOST_BYTES = 1 << 20
"""Of a response that is read."""
LOOK_SECONDS = 3.0
"""How long one look at an engine or a broker may take."""
ENGINE_SECONDS = 1800.0
"""How long an engine may be absent before an environment ends."""
BROKER_SECONDS = 25.0
"""How long a broker may be absent: with the start of the command that makes 30 s, as in Atropos."""


def running_engine(flags: Reader, environ: Mapping[str, str]) -> RunningEngine | None:
    """The engine at --vllm-port, if one was started apart; None if it is the trainer's to start.

    With shared_vllm --vllm-config-path says that there is one, which may still be starting.
    """
    nodes = flags["num-inference-nodes"] or environ.get("NUM_INFERENCE_NODES", "0").strip() not in ("", "0")
    if flags["vllm-url"] or nodes:
        return None
    url, file = f"http://localhost:{flags['vllm-port']}", flags["vllm-config-path"]
    if file and flags["weight-bridge-mode"] == "shared_vllm" and not flags["use-shared-memory"]:
        return RunningEngine(url=url, bridge=file if Path(file).exists() else None)
    # One that was started alone: another trainer's engine is that trainer's. One that wants a key does not say which it
    # is, and is taken for one: the trainer is then told of the key.
    status, info = get_json(f"{url}/bridge/info")
    return RunningEngine(url=url) if status == 401 or (isinstance(info, dict) and info.get("apart") is True) else None


def get_json(url: str, key: str = "") -> tuple[int, Any]:
    """Status and JSON of a GET; status 0 where no server responds by HTTP, None where the response is not JSON."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=LOOK_SECONDS) as answer:
            return answer.status, json.loads(answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        return error.code, None
    except ValueError:
        return 200, None
    except (OSError, http.client.HTTPException):
        return 0, None


def _answer(url: str, key: str, seconds: float) -> tuple[int, Any]:
    """Status and JSON of a GET; for a server that is starting it is waited so long."""
    deadline = time.monotonic() + seconds
    for attempt in itertools.count():
        status, answer = get_json(url, key)
        if 0 < status < 500 or time.monotonic() >= deadline:
            break
        if attempt == 0:
            log.warning("nothing answers at %s yet; it is waited for", url)
        time.sleep(0.5)
    return status, answer


def served_model(url: str, key: str = "", seconds: float = ENGINE_SECONDS) -> str:
    """Name under which an engine serves its model, also its tokenizer's place; waits for an engine that is starting.

    Raises:
        EngineError: no server responds, or it does not name its model.
    """
    root = url.rstrip("/").removesuffix("/v1")
    status, info = _answer(f"{root}/bridge/info", key, seconds)
    if isinstance(info, dict) and isinstance(info.get("model"), str):
        return str(info["model"])
    if not 0 < status < 500:
        raise EngineError(f"no engine answers at {root} (--openai.base_url) within {seconds:g} s")
    status, listed = get_json(f"{root}/v1/models", key)
    models = listed.get("data") if isinstance(listed, dict) else None
    if models:
        return str(models[0].get("root") or models[0]["id"])
    raise EngineError(f"engine {root} does not say what it serves (status {status}): give --env.tokenizer_name")


def require_broker(url: str, seconds: float = BROKER_SECONDS) -> None:
    """Wait for a broker that is about to start, before the model and the engine are loaded for nothing.

    Raises:
        BrokerError: no server responds.
    """
    if not _answer(url, "", seconds)[0]:
        raise BrokerError(f"nobody answers at {url} (--atropos-url) within {seconds:g} s; start it: tandem run-api")
