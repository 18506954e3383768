"""Protection of a service without an API key: requests that a web page makes a browser send are refused.

Any page that somebody opens can have the browser send requests to services of this machine and its network, to loopback
too. A page cannot choose what the browser says of it, so four headers tell: ``Host`` (a name that the page's owner had
point here is no name of ours), ``Origin`` and ``Sec-Fetch-Site`` (which page asks), ``User-Agent`` (old browsers, and
all of them over plain HTTP beyond loopback, say nothing else of a GET). Programs send none of these but ``Host``.
Works on plain values, so any server can ask: ASGI's by ``headers_of``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

PAGE_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""Content types that a page can send anywhere without asking first."""
_LOCAL = (".localhost", ".local", ".internal")
"""How names end that nobody can register."""


def headers_of(scope: Mapping[str, object]) -> dict[str, str]:
    """Headers of an ASGI scope by their names in lower case, as ``from_a_page`` wants them."""
    raw: Iterable[tuple[bytes, bytes]] = scope.get("headers") or ()  # type: ignore[assignment]
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


def from_a_page(method: str, headers: Mapping[str, str], *, acts: bool = True, names: Collection[str] = ()) -> str:
    """Why a service without a key must not answer a request; empty: it may.

    Args:
        method: of HTTP.
        headers: by names in lower case, or in any case if the mapping does not tell them apart.
        acts: it changes something. One that only looks may also be a link that a person followed.
        names: hosts by which this service is known beside its addresses and this machine's name.
    """
    host, origin, site = (headers.get(name, "").strip() for name in ("host", "origin", "sec-fetch-site"))
    if host and not _is_ours(host, tuple(names)):
        return f"Host {host[:80]!r} is no name of this service; use its address, or set an API key"
    if origin and (origin.partition("://")[2].lower() != host.lower() or not host):
        return f"a page of {origin[:80]!r} asks, and without an API key none but this service's own may; set one"
    if method in ("GET", "HEAD") and acts:
        if site or headers.get("user-agent", "").startswith("Mozilla/"):
            return "a browser asks, and this GET changes something; use a program, such as curl, or set an API key"
    elif site not in ("", "same-origin", "none") and (acts or headers.get("sec-fetch-mode") != "navigate"):
        return f"a page of elsewhere asks (Sec-Fetch-Site: {site[:40]}), which needs an API key; set one"
    return ""


def without_json(headers: Mapping[str, str]) -> str:
    """Reason to refuse a body without a key, whose content type any web page can send; empty: it may be read."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return f"Content-Type {kind}; send application/json, or set an API key" if kind in PAGE_TYPES else ""


@lru_cache(256)
def _is_ours(host: str, names: tuple[str, ...]) -> bool:
    """True for addresses and for names that no stranger can have point here: without a dot, or this machine's own."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        known = {*map(str.lower, names), socket.gethostname().lower()}
        return "." not in name or name.endswith(_LOCAL) or name in known
    return True
