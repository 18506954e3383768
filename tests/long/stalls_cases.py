"""What stalls, what must be said of it, and how the run must end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WAIT = 8.0
LOOP = 16.0
END = 4.0
GRADING = 3.0
REQUEST = 6.0
CONTROL = 12.0
START = 25.0
GROUP = 4.0
GONE = 10.0
"""Deadlines of these runs, in seconds."""

FULL = 8_000_000
"""Bytes of a disk that is full."""

Helper = Literal["", "engine", "broker", "judge"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One stall."""

    name: str
    """As STALL has it."""
    named: str
    """Regular expression of what must be said on stderr: who is to blame."""
    deadline: float
    """Seconds after it begins within which nobody need say so."""
    code: int
    """Exit code of the run: 0 where it recovers by itself."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Laid over the usual one; {port} stands for the helper's."""
    helper: Helper = ""
    """A server beside the run."""
    begins: bool = True
    """The stall begins when it says so; otherwise when the run does."""
    limit: int = 0
    """Most bytes of a file that the run may write; 0: any number."""
    spoil: str = ""
    """What is done to the folder of a run of one step before it goes on: events-full, events-hung."""
    stop: float = 0.0
    """Seconds for which the trainer itself is stopped, once it has begun."""


ENV = {"env": {"kind": "stalls_parts:Playing"}}
REWARD = {"rewards": {"graded": {"kind": "stalls_rewards:graded", "weight": 1.0}}}
AWAITED = {"rewards": {"awaited": {"kind": "stalls_rewards:awaited", "weight": 1.0}}}
JUDGE = {
    "rewards": {
        "judge": {
            "kind": "judge", "weight": 1.0, "url": "http://127.0.0.1:{port}/v1", "model": "m", "timeout_seconds": 2.0,
            "retries": 0, "deadline_seconds": GRADING,
        }
    }
}  # fmt: skip
LOSS = {"loss": {"kind": "stalls_parts:Losing"}}
TRAINABLE = {"trainable": {"kind": "stalls_parts:Saving"}}
SINK = {"loggers": [{"kind": "stalls_parts:Sinking"}]}
ENGINE = {"engine": {"kind": "stalls_parts:Stalling"}}
_SECONDS = {"request_seconds": REQUEST, "control_seconds": CONTROL, "start_seconds": START}
_LORA = {"trainable": {"kind": "lora", "rank": 2}}
_PATIENT = {"timeouts": {"wait_seconds": 60.0, "loop_seconds": LOOP, "end_seconds": END}}
"""Where it is the engine's own deadlines that are to speak."""
SWAP = {
    **_PATIENT,
    "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:{port}"], **_SECONDS},
    "sync": {"kind": "hotswap", "tolerance": 1e9},
    **_LORA,
}
STARTED = {
    **_PATIENT,
    "engine": {"kind": "vllm", "python": "{python}", "restarts": 1, **_SECONDS},
    "sync": {"kind": "hotswap", "tolerance": 1e9},
    **_LORA,
}
CAST = {
    **_PATIENT,
    "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:{port}"], **_SECONDS},
    "sync": {"kind": "broadcast", "timeout_seconds": GROUP, "tolerance": 1e9, "backend": "gloo"},
}
BROKER = {"env": None, "broker": {"url": "http://127.0.0.1:{port}"}, "max_lag": 1}
EVALUATED = {**ENV, "evaluate": {"tasks": 2, "samples": 1, "after": False}}

LOST = r"environment stalls_parts \(.*/\d\)"
HUNG = r"waited for grading process \(pid \d+\) \(reward \w+ of group|reward '\w+' took longer"
RECEIVE = r"for engine http://127\.0\.0\.1:\d+ \(POST /nccl/receive\)"
COMPUTE = r"for compute thread \(LocalWork\.micro\)"

CASES = (
    # Environments
    Case(name="lost rollout", named=LOST, deadline=WAIT, code=0, recipe=ENV),
    Case(name="environment awaits an event", named=LOST, deadline=WAIT, code=0, recipe=ENV),
    Case(name="environment deadlocked", named=LOST, deadline=WAIT, code=0, recipe=ENV),
    Case(name="environment blocks the event loop", named=rf"held up .*Playing\.play.*{LOST}", deadline=LOOP, code=10,
         recipe=ENV),
    Case(name="environment loops for ever", named=rf"held up .*Playing\.play.*{LOST}", deadline=LOOP, code=10,
         recipe=ENV),
    Case(name="environment holds the interpreter", named=r"stalls_parts\.py.* in play", deadline=LOOP + END, code=1,
         recipe=ENV),
    Case(name="evaluation hangs", named=LOST, deadline=WAIT, code=0, recipe=EVALUATED),
    Case(name="data set never loads", named="data of environment stalls_parts", deadline=WAIT, code=10, recipe=ENV),
    # Grading
    Case(name="hung grader", named=HUNG, deadline=GRADING, code=0, recipe=REWARD),
    Case(name="deadlocked reward", named=HUNG, deadline=GRADING, code=0, recipe=REWARD),
    Case(name="reward loops in C", named=HUNG, deadline=GRADING, code=0, recipe=REWARD),
    Case(name="stopped grader", named=HUNG, deadline=GRADING, code=0, recipe=REWARD),
    Case(name="async reward never returns", named=HUNG, deadline=GRADING, code=0,
         recipe=AWAITED),
    Case(name="full queue of graders", named=HUNG, deadline=GRADING, code=0,
         recipe={**REWARD, "groups_per_step": 6}),
    Case(name="judge never answers", named=r"had no answer from http://127\.0\.0\.1:\d+", deadline=GRADING, code=0,
         recipe={**JUDGE, "grading": {"timeout_seconds": GRADING}}, helper="judge"),
    # The trainer's threads and disk
    Case(name="compute thread in native code", named=COMPUTE, deadline=WAIT, code=10, recipe=LOSS),
    Case(name="compute thread loops", named=COMPUTE, deadline=WAIT, code=10, recipe=LOSS),
    Case(name="compute thread holds the interpreter", named=r"stalls_parts\.py.* in __call__", deadline=LOOP + END,
         code=1, recipe=LOSS),
    Case(name="call on the event loop", named="held up .*accept", deadline=LOOP, code=10,
         recipe={"advantage": {"kind": "stalls_parts:Advancing"}}),
    Case(name="model never loads", named="model .*tiny", deadline=WAIT, code=10, recipe=TRAINABLE),
    Case(name="checkpoint on a hung disk", named="the checkpoint writer at", deadline=WAIT, code=10, recipe=TRAINABLE),
    Case(name="disk full at checkpoint", named=r"checkpoint of step 1 cannot be written to .*checkpoints", deadline=0,
         code=8, limit=200_000, begins=False),
    Case(name="disk full at events", named=r"events\.jsonl in .* cannot be written", deadline=0, code=0, begins=False,
         spoil="events-full", limit=FULL),
    Case(name="events on a hung disk", named="the disk of", deadline=LOOP, code=10, begins=False, spoil="events-hung"),
    Case(name="logger never opens", named="logger stalls_parts", deadline=WAIT, code=10, recipe=SINK),
    Case(name="logger hangs", named="logger stalls_parts", deadline=WAIT, code=10, recipe=SINK),
    Case(name="logger never closes", named="logger stalls_parts", deadline=WAIT, code=10, recipe=SINK),
    Case(name="chat template loops", named="chat template|model .*tiny", deadline=WAIT, code=10, begins=False,
         recipe={"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"}),
    # The engine in process
    Case(name="one endless generation", named="for engine .an answer", deadline=WAIT, code=0, recipe=ENGINE),
    Case(name="engine paused and never resumed", named="engine waited .*to go on sampling", deadline=WAIT, code=10,
         recipe=ENGINE),
    Case(name="engine never stands still", named="for engine .it to stand still", deadline=WAIT, code=10,
         recipe=ENGINE),
    # Engines in processes of their own
    Case(name="dead engine", named=r"engine http://127\.0\.0\.1:\d+ does not answer", deadline=START + GONE, code=5,
         recipe=SWAP, helper="engine"),
    Case(name="stopped engine", named=r"for engine http://127\.0\.0\.1:\d+", deadline=REQUEST, code=10, recipe=SWAP,
         helper="engine"),
    Case(name="engine never answers", named=r"for engine http://127\.0\.0\.1:\d+ \(POST /generate\)", deadline=REQUEST,
         code=10, recipe=SWAP, helper="engine"),
    Case(name="engine answers half", named=r"for engine http://127\.0\.0\.1:\d+ \(POST /generate\)",
         deadline=REQUEST + 2 * CONTROL, code=10, recipe=SWAP, helper="engine"),
    Case(name="/lora/load never answers", named=r"for engine http://127\.0\.0\.1:\d+ \(POST /lora/load\)",
         deadline=CONTROL, code=10, recipe=SWAP, helper="engine"),
    Case(name="/bridge/stamp never answers", named=r"for engine http://127\.0\.0\.1:\d+ \(POST /bridge/stamp\)",
         deadline=CONTROL, code=10, recipe=SWAP, helper="engine"),
    Case(name="engine never healthy", named=r"the engine \(pid \d+\) was not healthy", deadline=START, code=10,
         recipe=STARTED),
    Case(name="engine ends as it starts", named="the engine ended with exit code 1 before it was healthy", deadline=0,
         code=5, recipe=STARTED),
    Case(name="engine dies again and again", named=r"engine http://127\.0\.0\.1:\d+ .*restarts allows",
         deadline=3 * START, code=5, recipe=STARTED),
    Case(name="peer never joins", named=r"ranks? 1", deadline=GROUP, code=6, recipe=CAST, helper="engine"),
    Case(name="peer stuck in a broadcast", named=RECEIVE, deadline=CONTROL, code=10, recipe=CAST, helper="engine"),
    Case(name="receiver never starts", named=RECEIVE, deadline=CONTROL, code=10, recipe=CAST, helper="engine"),
    # The broker
    Case(name="broker gone", named=r"for broker http://127\.0\.0\.1:\d+", deadline=WAIT, code=10, recipe=BROKER,
         helper="broker"),
    Case(name="broker never answers", named=r"for broker http://127\.0\.0\.1:\d+", deadline=WAIT, code=10,
         recipe=BROKER, helper="broker"),
    Case(name="broker never has a batch", named="for environments of the broker", deadline=WAIT, code=10,
         recipe=BROKER, helper="broker"),
    # What must not be taken for a stall
    Case(name="slow but living", named="", deadline=0, code=0, begins=False,
         recipe={**ENV, **REWARD, "grading": {"timeout_seconds": 2.0}}),
    Case(name="trainer stopped for a while", named="", deadline=0, code=0, begins=False, stop=2 * WAIT),
)  # fmt: skip
