"""What a whole run imports: nothing of what is off its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
OFF_THE_PATH = ("tandem.agents.server", "tandem.broker", "tandem.compat", "tandem.http", "tandem.tools")
RUN = """
import gc, json, os, sys
gc.disable()  # it would look through what is imported again and again
from tandem.cli.app import main
try:
    main(["train", sys.argv[1]])
except SystemExit as end:
    assert end.code == 0
sys.stdout.write(json.dumps(sorted(name for name in sys.modules if name.startswith("tandem"))))
sys.stdout.flush()
os._exit(0)  # torch takes seconds to be taken down
"""


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
    out = subprocess.run(
        [sys.executable, "-c", RUN, str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(SRC), "HF_HUB_OFFLINE": "1"},
    )
    assert out.returncode == 0, out.stderr
    loaded = set(json.loads(out.stdout.splitlines()[-1]))
    assert "tandem.trainer.loop" in loaded
    assert not [name for name in loaded if name.startswith(OFF_THE_PATH)]
