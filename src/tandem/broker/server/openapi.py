"""The broker's OpenAPI document, made from the types of the wire."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from tandem import __version__
from tandem.broker.protocol import messages

TITLE = "Tandem broker"
"""By which a client knows whose broker it is."""
_MIMES = ("application/json", "application/msgpack")
_TYPES = (
    messages.RunParameters,
    messages.Registered,
    messages.EnvRegistration,
    messages.EnvAccepted,
    messages.EnvName,
    messages.BatchName,
    messages.Info,
    messages.WandbInfo,
    messages.ScoredGroup,
)

# Path, method, what it does, type of the body, type of the answer.
_ROUTES: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("/", "get", "The live page for browsers; a greeting for programs.", None, None),
    ("/register", "post", "A trainer begins or begins anew.", messages.RunParameters, messages.Registered),
    ("/info", "get", "What the trainer wants; -1 before it registered.", None, messages.Info),
    ("/wandb_info", "get", "Where the run is charted.", None, messages.WandbInfo),
    ("/register-env", "post", "An environment begins; poll until status is success.", messages.EnvRegistration, None),
    ("/disconnect-env", "post", "An environment leaves; what it queued stays.", messages.EnvName, None),
    ("/status-env", "get", "How much is queued. A GET with a body.", messages.EnvName, None),
    ("/scored_data", "post", "Hand in a group.", messages.ScoredGroup, None),
    ("/scored_data_list", "post", "Hand in groups, all or none.", list[messages.ScoredGroup], None),
    ("/batch", "get", "Take the next batch; null if there is none.", None, None),
    ("/ack", "post", "A leased batch was trained on.", messages.BatchName, None),
    ("/renew", "post", "The lease of a batch begins anew.", messages.BatchName, None),
    ("/release", "post", "A leased batch was not trained on and goes back.", messages.BatchName, None),
    ("/status", "get", "Step and queue; with ?detail=1 everything.", None, None),
    ("/metrics", "get", "Prometheus' text.", None, None),
    ("/latest_example", "get", "The group that was queued last.", None, None),
    ("/reset_data", "get", "Forget run, queue and step.", None, None),
)
_QUERIES = {
    "/batch": (
        ("lease", "number", "Seconds in which /ack must follow, or the batch is served again. Without: no /ack."),
        ("policy", "integer", "The trainer's policy step, which groups that say none are stamped with."),
        ("max_lag", "integer", "Drop groups sampled more policy steps ago than this."),
    ),
    "/status": (("detail", "integer", "Anything: also tell environments, counts and lags."),),
}
_KEYED = ("/register-env", "/scored_data", "/scored_data_list")
_OPEN = ("/",)


@cache
def document() -> dict[str, Any]:
    """The document, as JSON values."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": __version__, "description": "Atropos' protocol, and leases beside it."},
        "paths": _paths(),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, method, text, body, answer in _ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, text, body, answer)
    return paths


def _operation(path: str, text: str, body: Any, answer: Any) -> dict[str, Any]:
    answers = {"200": {"description": "Done.", **({"content": _content(answer)} if answer else {})}}
    parameters = [
        {"name": name, "in": "query", "schema": {"type": kind, "minimum": 0}, "description": words}
        for name, kind, words in _QUERIES.get(path, ())
    ]
    if path in _KEYED:
        words = "Unique to what is handed in: sent again with the same key, it is taken once."
        key = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"}
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": key, "description": words})
    for status, words in _failures(body is not None):
        answers[status] = {"description": words}
    if path in _OPEN:
        found: dict[str, Any] = {"summary": text, "responses": answers}
    else:
        found = {"summary": text, "responses": answers, "security": [{}, {"key": []}]}
    if parameters:
        found["parameters"] = parameters
    if body is not None:
        found["requestBody"] = {"required": True, "content": _content(body)}
    return found


def _failures(body: bool) -> list[tuple[str, str]]:
    found = [("401", "A key is needed."), ("403", "The trainer's key is needed."), ("503", "Try again later.")]
    if body:
        found += [
            ("400", "Not what Content-Encoding says."),
            ("408", "The body stopped coming."),
            ("413", "The body is too large."),
            ("422", "The body is wrong; the answer says where and why."),
            ("429", "Too much is queued; Retry-After says when to come back."),
        ]
    return found


def _content(kind: Any) -> dict[str, Any]:
    ref, _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return {mime: {"schema": ref[0]} for mime in _MIMES}
