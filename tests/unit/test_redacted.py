"""Passwords of URLs reach neither files nor messages, and a run that goes on is given them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.api.targets import resumed
from tandem.config.loading import RunConfig, as_json, digest, dump, from_options
from tandem.errors import BrokerError, ConfigError, message_of, redacted
from tandem.http import HttpClient
from tandem.trainer.run_folder import write_recipe

URL = "http://me:s3cret@host:8000/v1"


def config_of(**options: Any) -> RunConfig:
    written = {"model": "m", "env": {"kind": "agent", "path": "rows.jsonl", "agent": f"ask {URL}"}, "steps": 2}
    return from_options({**written, "rewards": {"exact": 1.0}, **options}, (), Path("recipe")).config


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"asked {URL}, twice", "asked http://me:***@host:8000/v1, twice"),
        ("['redis://:a@b@host', 'x@y']", "['redis://:***@host', 'x@y']"),
        ("http://host:8000/x@y me@host", "http://host:8000/x@y me@host"),
        ('{"url":"http://host:80","mail":"me@host"}', '{"url":"http://host:80","mail":"me@host"}'),
        ("https://me@host", "https://me@host"),
    ],
)
def test_a_password_is_taken_out_of_text(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_errors_and_recipes_are_written_without_passwords() -> None:
    config = config_of()
    written = [
        str(BrokerError(f"{URL} is away")),
        message_of(ValueError(URL)),
        HttpClient(URL, kind="judge").name,
        dump(config),
        str(as_json(config)),
    ]
    for text in written:
        assert "me:***@host" in text
        assert "s3cret" not in text
    with pytest.raises(ConfigError) as caught:
        config_of(model=["http://me:s3cret@host"])
    assert "s3cret" not in str(caught.value)


def test_a_run_that_goes_on_is_given_its_passwords_again(tmp_path: Path) -> None:
    write_recipe(config_of(), tmp_path)
    with pytest.raises(ConfigError, match=r"does not hold the password of http://me:\*\*\*@host:8000/v1"):
        resumed(tmp_path, [])
    config = resumed(tmp_path, [f"env.agent=ask {URL}"])
    assert config.sources["agent"].env.agent == f"ask {URL}"  # type: ignore[attr-defined]
    assert digest(config) == digest(config_of())
    with pytest.raises(ConfigError, match="a resumed run keeps its 'env'"):
        resumed(tmp_path, [f"env.agent=other {URL}"])
