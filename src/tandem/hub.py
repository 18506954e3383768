"""Reachability of the Hugging Face hub, whose libraries retry for a minute before they give up."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from functools import cache

_SECONDS = 5.0
"""How long the hub may take to answer."""


@cache
def away() -> str:
    """Reason why the hub is not used, for a message; empty if it is. Asked once, through the environment's proxy."""
    for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(switch, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{switch} is set, so the Hugging Face hub is not asked"
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_SECONDS).close()
    except urllib.error.HTTPError:  # it answers
        return ""
    except OSError as error:
        reason = getattr(error, "reason", error)
        if not isinstance(reason, ssl.SSLError):  # whose certificates the hub's library may know
            return f"the Hugging Face hub ({endpoint}) cannot be reached: {reason}"
    return ""
