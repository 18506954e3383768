"""Which parts of a recipe can work together, and on this machine: asked before anything is loaded."""

from __future__ import annotations

from tandem.config import RunConfig
from tandem.trainer import supply


def check_pairs(config: RunConfig) -> None:
    """Refuse parts that cannot work together, or not on this machine.

    Raises:
        UnsupportedPair: names the ones that can.
        ConfigError: this machine lacks what an option needs.
    """
    if config.compile is True:
        from tandem.policy import layers  # which needs torch, as 8-bit products do

        layers.check(config.compile)
    if config.matmul == "fp8":
        from tandem.policy import float8

        float8.check()
    config.sync.check(trains=config.trains, engine=config.engine)
    supply.check_lag(config)
