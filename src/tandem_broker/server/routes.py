"""The broker's routes, and their OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from tandem import __version__
from tandem_broker.protocol import messages
from tandem_broker.server.keys import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path of the broker."""

    method: str
    """GET or POST."""
    path: str
    """Such as /batch."""
    handler: str
    """Name of the broker's method that answers."""
    role: Role | None
    """Whose key it needs; None: anybody may."""
    acts: bool
    """It changes something."""
    summary: str
    """What it does."""
    body: Any
    """Type of the request's body."""
    reply: Any
    """Type of the answer, where it has one."""


def _get(
    path: str, handler: str, summary: str, role: Role | None = "environment", *, body: Any = None, reply: Any = None,
    acts: bool = False,
) -> Route:  # fmt: skip
    return Route(
        method="GET", path=path, handler=handler, role=role, acts=acts, summary=summary, body=body, reply=reply
    )


def _post(path: str, handler: str, summary: str, body: Any, role: Role = "environment", reply: Any = None) -> Route:
    return Route(
        method="POST", path=path, handler=handler, role=role, acts=True, summary=summary, body=body, reply=reply
    )


ROUTES = (
    _get("/", "root", "The live page for browsers; a greeting for programs.", None),
    _get("/openapi.json", "openapi", "This document.", None),
    _post("/register", "register", "A trainer begins or begins anew.", messages.RunParameters, "trainer",
          messages.Registered),
    _get("/info", "info", "What the trainer wants; -1 before it registered.", reply=messages.Info),
    _get("/wandb_info", "wandb_info", "Where the run is charted.", reply=messages.WandbInfo),
    _post("/register-env", "register_env", "An environment begins; poll until status is success. Takes an "
          "Idempotency-Key.", messages.EnvRegistration),
    _post("/disconnect-env", "disconnect_env", "An environment leaves; what it queued stays.", messages.EnvName),
    _get("/status-env", "status_env", "How much is queued. A GET with a body.", body=messages.EnvName,
         reply=messages.EnvStatus),
    _post("/scored_data", "scored_data", "Hand in a group. Takes an Idempotency-Key.", messages.ScoredGroup),
    _post("/scored_data_list", "scored_data_list", "Hand in groups, all or none. Takes an Idempotency-Key.",
          list[messages.ScoredGroup]),
    _get("/batch", "batch", "Take the next batch; null if there is none. ?lease=SECONDS: /ack must follow, or it is "
         "served again. ?policy=K: the trainer's step. ?max_lag=L: drop groups sampled more steps ago.", "trainer",
         acts=True),
    _post("/ack", "acknowledge", "A leased batch was trained on.", messages.BatchName, "trainer"),
    _post("/renew", "renew", "The lease of a batch begins anew.", messages.BatchName, "trainer"),
    _post("/release", "return_lease", "A leased batch was not trained on and goes back.", messages.BatchName,
          "trainer"),
    _get("/status", "status", "Step and queue; with ?detail=1 everything."),
    _get("/metrics", "metrics", "Prometheus' text."),
    _get("/latest_example", "latest_example", "The group that was queued last.", "trainer"),
    _get("/reset_data", "reset", "Forget run, queue and step.", "trainer", acts=True),
)  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document as JSON values."""
    kinds = {kind for route in ROUTES for kind in (route.body, route.reply) if kind is not None}
    types = sorted(kinds, key=str)
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    content = {kind: {"application/json": {"schema": schema}} for kind, schema in zip(types, references, strict=True)}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        answer = {"description": "Done.", **({"content": content[route.reply]} if route.reply else {})}
        operation: dict[str, Any] = {"summary": route.summary, "responses": {"200": answer}}
        if route.role is not None:
            operation["security"] = [{}, {"key": []}]
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": content[route.body]}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem broker", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
