"""What browsers send when a page asks, what programs send, and which of it a service without a key may answer."""

from __future__ import annotations

import socket

import pytest

from tandem import doors

HERE = {"host": "127.0.0.1:8000"}
MODERN = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Firefox/142.0"}


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "10.0.0.7", "broker", "gpu.local", "a.localhost", ""],
)
def test_addresses_and_names_that_nobody_can_register_are_ours(host: str) -> None:
    assert doors.from_a_page("POST", {"host": host}) == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "[::1", "a.b:x"]
)
def test_other_names_may_be_anybodys(host: str) -> None:
    for acts in (True, False):
        assert "is no name of this service" in doors.from_a_page("GET", {"host": host}, acts=acts)


def test_names_that_were_told_are_ours() -> None:
    headers = {"host": "Broker.example.org:80"}
    assert doors.from_a_page("POST", headers)
    assert doors.from_a_page("POST", headers, names=["broker.example.org"]) == ""
    assert doors.from_a_page("POST", {"host": socket.gethostname()}) == ""


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9000", "http://localhost:8000", "http://[", "//["]
)
def test_pages_of_elsewhere_may_not_ask(origin: str) -> None:
    for method in ("POST", "GET"):
        assert "a page of" in doors.from_a_page(method, {**HERE, "origin": origin}, acts=False)


def test_the_services_own_page_may() -> None:
    assert doors.from_a_page("POST", {**HERE, "origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}) == ""
    assert doors.from_a_page("GET", {**HERE, **MODERN, "sec-fetch-site": "same-origin"}, acts=False) == ""


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_where_the_browser_says_that_a_page_is_from_elsewhere(site: str) -> None:
    headers = {**HERE, "sec-fetch-site": site}
    assert doors.from_a_page("POST", headers)
    assert doors.from_a_page("GET", headers, acts=False)
    assert doors.from_a_page("GET", {**headers, "sec-fetch-mode": "navigate"}, acts=False) == ""  # a link
    assert doors.from_a_page("POST", {**headers, "sec-fetch-mode": "navigate"})  # a form


def test_no_browser_may_send_a_get_that_changes_something() -> None:
    for headers in ({"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}, MODERN):
        assert "a browser asks" in doors.from_a_page("GET", {**HERE, **headers})
    for program in ("Python/3.11 aiohttp/3.14.5", "python-requests/2.34.2", "curl/8.5.0", ""):
        assert doors.from_a_page("GET", {**HERE, "user-agent": program}) == ""


def test_bodies_of_types_that_pages_send_unasked() -> None:
    for kind in ("text/plain;charset=UTF-8", "Application/X-WWW-Form-Urlencoded", "multipart/form-data; boundary=x"):
        assert "send application/json" in doors.without_json({"content-type": kind})
    assert doors.without_json({"content-type": "application/json"}) == doors.without_json({}) == ""


def test_headers_of_an_asgi_scope() -> None:
    scope = {"headers": [(b"Host", b"evil.example"), (b"x", b"\xff")]}
    assert doors.headers_of(scope) == {"host": "evil.example", "x": "ÿ"}
    assert doors.headers_of({}) == {}
