"""Ports of this host: one that is free, and one that stays free until a server of ours has bound it; their URLs."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now; the server that is to have it should take it soon.

    Example:
        >>> 0 < free_port() < 65536
        True
    """
    with _bound(host) as probe:
        port: int = probe.getsockname()[1]
        return port


def http_url(host: str, port: int | str) -> str:
    """URL of a port; an IPv6 address stands in brackets.

    Example:
        >>> http_url("::1", 8000)
        'http://[::1]:8000'
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """A port for a server that another process will start; nobody else is given it while the socket is open.

    An engine binds its port a minute after it was chosen, and some versions of vLLM bind it with SO_REUSEPORT: two
    engines that were given the same one share it without an error, and each answers some requests of both. The socket
    is bound and does not listen, so that a server with SO_REUSEADDR, which all have, binds the port too and is reached.

    Raises:
        OSError: the host is not this one, or has no port left.

    Example:
        >>> reserved = reserve_port()
        >>> free_port() != reserved.getsockname()[1]
        True
        >>> reserved.close()
    """
    return _bound(host, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def _bound(host: str, *options: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, 0))
    except OSError:
        bound.close()
        raise
    return bound
