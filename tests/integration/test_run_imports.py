"""What a whole run imports: nothing of what is off its path."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from support.processes import start

TESTS = Path(__file__).parents[1]
OFF_THE_PATH = ("tandem.agents.server", "tandem_broker", "tandem_compat", "tandem.http", "tandem.tools")


def test_a_run_without_a_broker_imports_nothing_of_one(tiny_model: Path, tmp_path: Path) -> None:
    recipe = {
        "model": str(tiny_model),
        "runs": str(tmp_path),
        "name": "plain",
        "steps": 1,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"number": 1.0},
        "groups_per_step": 1,
        "group_size": 2,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 4},
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "loggers": [],
        "threads": 1,
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
    started = start(
        ["train", str(file)],
        cwd=tmp_path,
        out=subprocess.PIPE,
        environment=environment,
        module="integration.imported",
    )
    with started as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    loaded = set(json.loads(printed.splitlines()[-1]))
    assert "tandem.trainer.loop" in loaded
    assert not [name for name in loaded if name.startswith(OFF_THE_PATH)]
