"""The client of Atropos' example trainer, without its training. It runs inside ``.venv-atropos``:

    python peer_trainer.py URL RECORD OPTIONS GO ENOUGH

It registers and asks for a batch, as environments wait for that. Once the file GO exists, it takes batches by the
trainer's own functions until there were as many as steps and the file ENOUGH exists, prepares each by the trainer's own
code, and writes to RECORD a JSON line for each: keys of its groups and shapes of what was made of them. OPTIONS are
JSON of its configuration. Logprobs it leaves out, as its code fails on a group that has none.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import example_trainer.data as data
from example_trainer.api import check_atropos_api, get_batch, register_trainer
from example_trainer.config import TrainingConfig
from peer_env import key_of


def main() -> None:
    url, record = sys.argv[1:3]
    options = json.loads(sys.argv[3])
    go, enough = map(Path, sys.argv[4:])
    config = TrainingConfig(model_name="none", atropos_url=url, **options)
    taken: list[list[str]] = []

    def recorded(url: str) -> Any:
        response = get_batch(url=url)
        if response["batch"] is not None:
            taken.append([key_of(group) for group in response["batch"]])
        return response

    data.get_batch = recorded
    assert check_atropos_api(url, timeout=30)
    register_trainer(config)
    assert get_batch(url=url)["batch"] is None  # no environment can have come before the first call of this
    while not go.exists():
        time.sleep(0.05)
    steps = 0
    while steps < config.training_steps or not enough.exists():
        batches, _ = data.get_data(config.batch_size, config.seq_len, url, extract_inference_logprobs=False)
        with open(record, "a") as file:
            for keys, (tokens, labels, *_) in zip(taken, batches, strict=True):
                line = {
                    "keys": keys,
                    "rows": sum(len(part) for part in tokens),
                    "same": all(a.shape == b.shape for a, b in zip(tokens, labels, strict=True)),
                }
                file.write(json.dumps(line) + "\n")
        steps += len(taken)
        taken.clear()


if __name__ == "__main__":
    main()
