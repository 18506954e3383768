"""The broker's routes, and the OpenAPI document of them and of the types of the wire."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from tandem import __version__
from tandem.broker.protocol import messages
from tandem.broker.server.keys import Role

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path of the broker."""

    method: str
    """GET or POST."""
    path: str
    """Such as /batch."""
    handler: str
    """Name of the broker's method that answers."""
    role: Role | None = "environment"
    """Whose key it needs; None: anybody may."""
    acts: bool = False
    """It changes something."""
    summary: str = ""
    """What it does; empty: it is not in the document."""
    body: Any = None
    """Type of the request's body."""
    reply: Any = None
    """Type of the answer, where it has one."""
    is_keyed: bool = False
    """A repetition is known by its Idempotency-Key."""


def _get(path: str, handler: str, summary: str = "", **more: Any) -> Route:
    return Route(method="GET", path=path, handler=handler, summary=summary, **more)


def _post(path: str, handler: str, summary: str, body: Any, **more: Any) -> Route:
    return Route(method="POST", path=path, handler=handler, summary=summary, body=body, acts=True, **more)


ROUTES = (
    _get("/", "root", "The live page for browsers; a greeting for programs.", role=None),
    _get("/docs", "docs", role=None),
    _get("/openapi.json", "openapi", role=None),
    _post(
        "/register",
        "register",
        "A trainer begins or begins anew.",
        messages.RunParameters,
        reply=messages.Registered,
        role="trainer",
    ),
    _get("/info", "info", "What the trainer wants; -1 before it registered.", reply=messages.Info),
    _get("/wandb_info", "wandb_info", "Where the run is charted.", reply=messages.WandbInfo),
    _post(
        "/register-env",
        "register_env",
        "An environment begins; poll until status is success.",
        messages.EnvRegistration,
        is_keyed=True,
    ),
    _post("/disconnect-env", "disconnect_env", "An environment leaves; what it queued stays.", messages.EnvName),
    _get("/status-env", "status_env", "How much is queued. A GET with a body.", body=messages.EnvName),
    _post("/scored_data", "scored_data", "Hand in a group.", messages.ScoredGroup, is_keyed=True),
    _post(
        "/scored_data_list",
        "scored_data_list",
        "Hand in groups, all or none.",
        list[messages.ScoredGroup],
        is_keyed=True,
    ),
    _get("/batch", "batch", "Take the next batch; null if there is none.", role="trainer", acts=True),
    _post("/ack", "acknowledge", "A leased batch was trained on.", messages.BatchName, role="trainer"),
    _post("/renew", "renew", "The lease of a batch begins anew.", messages.BatchName, role="trainer"),
    _post(
        "/release",
        "release",
        "A leased batch was not trained on and goes back.",
        messages.BatchName,
        role="trainer",
    ),
    _get("/status", "status", "Step and queue; with ?detail=1 everything."),
    _get("/metrics", "metrics", "Prometheus' text."),
    _get("/latest_example", "latest_example", "The group that was queued last.", role="trainer"),
    _get("/reset_data", "reset", "Forget run, queue and step.", role="trainer", acts=True),
)
_QUERIES = {
    "/batch": (
        ("lease", "number", "Seconds in which /ack must follow, or the batch is served again. Without: no /ack."),
        ("policy", "integer", "The trainer's policy step, which groups that say none are stamped with."),
        ("max_lag", "integer", "Drop groups sampled more policy steps ago than this."),
    ),
    "/status": (("detail", "integer", "Anything: also tell environments, counts and lags."),),
}


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
    for route in ROUTES:
        if route.summary:
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return paths


def _operation(route: Route) -> dict[str, Any]:
    replies = {"200": {"description": "Done.", **({"content": _content(route.reply)} if route.reply else {})}}
    for status, text in _failures(route.body is not None):
        replies[status] = {"description": text}
    parameters = [
        {"name": name, "in": "query", "schema": {"type": kind, "minimum": 0}, "description": text}
        for name, kind, text in _QUERIES.get(route.path, ())
    ]
    if route.is_keyed:
        text = "Unique to what is handed in: sent again with the same key, it is taken once."
        key = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"}
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": key, "description": text})
    operation: dict[str, Any] = {"summary": route.summary, "responses": replies}
    if route.role is not None:
        operation["security"] = [{}, {"key": []}]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    return operation


def _failures(has_body: bool) -> list[tuple[str, str]]:
    failures = [("401", "A key is needed."), ("403", "The trainer's key is needed."), ("503", "Try again later.")]
    if has_body:
        failures += [
            ("400", "Not what Content-Encoding says."),
            ("408", "The body stopped coming."),
            ("413", "The body is too large."),
            ("422", "The body is wrong; the answer says where and why."),
            ("429", "Too much is queued; Retry-After says when to come back."),
        ]
    return failures


def _content(kind: Any) -> dict[str, Any]:
    ref, _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return {mime: {"schema": ref[0]} for mime in _MIMES}
