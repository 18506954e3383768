"""Messages between the two processes of a vLLM that is started here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from integration.vllm_runs import engine_python, needs_engine

from tandem.engines.base import EngineRequirements
from tandem.engines.vllm.spec import Vllm

pytestmark = needs_engine
PARTS = """
import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackEncoder
ROWS = np.zeros((4096, 1))
output = EngineCoreOutput("id", [1], new_logprobs=LogprobsLists(ROWS, ROWS, ROWS[:, 0], None))
print("parts:", len(MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))))
"""


def test_an_answer_has_one_part_as_vllm_knows_of_the_last_alone_that_it_was_sent(tmp_path: Path) -> None:
    python = engine_python()
    requirements = EngineRequirements(model="m", dtype="float32", folder=tmp_path)
    environment = Vllm(python=python)._environment(requirements, tmp_path, 0, "key")
    command = [python or sys.executable, "-c", PARTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "parts: 1"
