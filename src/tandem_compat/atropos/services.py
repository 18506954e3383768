"""Running services that an Atropos command expects: the engine that the trainer is to use, and the broker."""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tandem.errors import BrokerError, ConfigError, EngineError, TransportError
from tandem_compat.atropos.rules import RunningEngine
from tandem_compat.table import Reader

if TYPE_CHECKING:
    from tandem.transport.bridge import VllmBridge

log = logging.getLogger("tandem.compat.atropos")

MOST_BYTES = 1 << 20
"""Of a response that is read."""
LOOK_SECONDS = 3.0
"""How long one look at an engine or a broker may take."""
ENGINE_SECONDS = 1800.0
"""How long an engine may be absent before an environment ends."""
BROKER_SECONDS = 25.0
"""How long a broker may be absent: with the start of the command that makes 30 s, as in Atropos."""


def running_engine(flags: Reader, environ: Mapping[str, str]) -> RunningEngine | None:
    """The engine that the flags mean and that was started apart; None if it is the trainer's to start.

    With shared_vllm it is the one whose file lies at --vllm-config-path, or else, if it answers, in $LOGDIR, the
    working directory or /tmp/atropos_bridge; with every mode the one that answers at --vllm-port.

    Raises:
        ConfigError: the file at --vllm-config-path is no engine's, or one of another model.
    """
    if (
        flags["vllm-url"]
        or flags["num-inference-nodes"]
        or environ.get("NUM_INFERENCE_NODES", "0").strip() not in ("", "0")
    ):
        return None
    url = f"http://localhost:{flags['vllm-port']}"
    if flags["weight-bridge-mode"] == "shared_vllm" and not flags["use-shared-memory"]:
        if flags["vllm-config-path"]:
            return _named(flags, Path(flags["vllm-config-path"]), url)
        if (engine := _lying_about(flags)) is not None:
            return engine
    return RunningEngine(url=url) if _is_engine(url) else None


def _named(flags: Reader, path: Path, url: str) -> RunningEngine:
    """The engine of a file that the flags name; one that has not written it yet is waited for, and asked itself."""
    from tandem.transport.bridge import VLLM_FILE, VllmBridge, find

    if not (path / VLLM_FILE if path.is_dir() else path).is_file():
        flags.note("vllm-config-path", f"there is no file at {path} yet, so an engine that answers is looked for")
        return _lying_about(flags) or RunningEngine(url=url)
    try:
        file = find(path)
        bridge = VllmBridge.read(file)
    except TransportError as error:
        raise ConfigError(f"--vllm-config-path: {error}") from error
    if not _same(bridge.model, model := flags["model-name"]):
        raise ConfigError(
            f"--vllm-config-path: {file} is of an engine that serves {bridge.model}, not {model}; name the "
            f"{VLLM_FILE} of this model's engine, or start one"
        )
    return RunningEngine(url=_url(bridge) or url, bridge=str(file))


def _lying_about(flags: Reader) -> RunningEngine | None:
    """The engine of a file in one of the usual places: left by one that has ended, or of another model, it is none."""
    from tandem.transport.bridge import VllmBridge, find

    try:
        file = find()
        bridge = VllmBridge.read(file)
    except TransportError:
        return None
    url = _url(bridge)
    wanted = url and urlsplit(url).port == flags["vllm-port"] and _same(bridge.model, flags["model-name"])
    return RunningEngine(url=url, bridge=str(file)) if wanted and _is_engine(url) else None


def _url(bridge: VllmBridge) -> str:
    """Where the engine of a file answers, where it says so."""
    url = bridge.tandem.get("url")
    return url if isinstance(url, str) else ""


def _same(one: str, other: str) -> bool:
    """Whether two names are of one model: two paths of one folder are."""
    return one == other or (Path(one).is_dir() and Path(one).resolve() == Path(other).resolve())


def _is_engine(url: str) -> bool:
    """Whether an engine that was started alone answers: one that another trainer started is that trainer's.

    One that wants a key does not say which it is, and is taken for one: the trainer is then told of the key.
    """
    status, info = get_json(f"{url}/bridge/info")
    return status == 401 or (isinstance(info, dict) and info.get("apart") is True)


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


def _require_address(url: str, flag: str) -> None:
    """Refuse what no server can be at, which would be waited for.

    Raises:
        ConfigError: with the flag that says it.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or brackets
        is_address = False
    if not is_address:
        raise ConfigError(f"--{flag}: {url} is no address; write it as http://HOST:PORT")


def served_model(url: str, key: str = "", seconds: float = ENGINE_SECONDS) -> str:
    """Name under which an engine serves its model, also its tokenizer's place; waits for an engine that is starting.

    Raises:
        ConfigError: it is no address.
        EngineError: no server responds, or it does not name its model.
    """
    _require_address(url, "openai.base_url")
    root, deadline, waits = url.rstrip("/").removesuffix("/v1"), time.monotonic() + seconds, False
    while True:
        status, info = get_json(f"{root}/bridge/info", key)
        if isinstance(info, dict) and isinstance(info.get("model"), str):
            return str(info["model"])
        if status and status < 500:
            status, listed = get_json(f"{root}/v1/models", key)
            models = listed.get("data") if isinstance(listed, dict) else None
            if models:
                return str(models[0].get("root") or models[0]["id"])
            raise EngineError(f"engine {root} does not say what it serves (status {status}): give --env.tokenizer_name")
        if time.monotonic() >= deadline:
            raise EngineError(f"no engine answers at {root} (--openai.base_url) within {seconds:g} s")
        if not waits:
            log.warning("no engine answers at %s (--openai.base_url) yet; it is waited for", root)
            waits = True
        time.sleep(0.5)


def require_broker(url: str, seconds: float = BROKER_SECONDS) -> None:
    """Wait for a broker that is about to start, before the model and the engine are loaded for nothing.

    Raises:
        ConfigError: it is no address.
        BrokerError: no server responds.
    """
    _require_address(url, "atropos-url")
    deadline = time.monotonic() + seconds
    while not get_json(url)[0]:
        if time.monotonic() >= deadline:
            port = urlsplit(url).port or 8000
            raise BrokerError(
                f"nobody answers at {url} (--atropos-url) within {seconds:g} s; start the broker first: "
                f"tandem run-api --port {port}, or Atropos' run-api --port {port}"
            )
        time.sleep(0.5)
