"""Nobody waits without saying so: every call that may wait for ever is registered, has a timeout, or a reason here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import parsed

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

WAITING = {"wait", "get", "join", "acquire", "result", "communicate", "recv"}
"""Methods that wait for as long as it takes where they are called without an argument."""
REGISTERED = {"waits.waiting", "waits.blocking", "waits.wait", "asyncio.timeout", "asyncio.wait_for"}
"""Within these a wait is registered, or has a timeout."""

ALLOWED = {
    # Idle, not waiting: whoever wants something of them waits himself, and is registered.
    "tandem/engines/embedded/engine.py:_run": "the engine has nothing to sample",
    "tandem/rewards/grading/grader.py:main": "a grading process has nothing to grade; its parent's end is its own",
    "tandem_broker/commands/serve.py:serve": "a server serves until it is stopped",
    "tandem/cli/serve.py:forever": "a server serves until it is stopped",
    "tandem/envs/_package_worker.py:main": "it has nothing to play; its parent's end is its own",
    "tandem/envs/_verifiers_reader.py:_serve": "it holds what episodes share, for as long as the process lives",
    # Beside something that is registered.
    "tandem/envs/_package.py:read": "within the registered reading of tasks",
    "tandem/envs/_package.py:_answer": "a thread of the process's own, which has closed its output",
    "tandem/trainer/loop.py:_unless_stopped": "a stop, beside the work that is awaited",
    "tandem_broker/producer.py:run": "a stop, beside the playing",
    "tandem/envs/agent.py:_run": "the end by SIGKILL, within a rollout's wait",
    # In processes that others ask with a deadline: an engine's, the broker's.
    "tandem/engines/vllm/server/frontend.py:broken_off": "whoever asks the engine has a deadline",
    "tandem/engines/vllm/server/frontend.py:deliverable": "whoever asks the engine has a deadline",
    "tandem/engines/vllm/server/frontend.py:admitted": "whoever asks the engine has a deadline",
    "tandem/engines/vllm/server/many.py:give_out": "whoever asks the engine has a deadline",
    "tandem/engines/vllm/server/admission.py:empty": "whoever asks the engine has a deadline",
    "tandem/engines/vllm/server/admission.py:taken": "whoever asks the engine has a deadline",
    "tandem/distributed/ray_cluster.py:run": "a rank runs as long as it does, in a process that Ray watches",
    # Over already: these do not wait.
    "tandem/engines/vllm/server/asgi.py:unless": "it is done",
    "tandem/rewards/judge.py:_verdict": "it is done",
    "tandem/rewards/judge.py:scores": "it is done",
    "tandem/transport/collective.py:_behind": "on CUDA it queues; gloo's has the group's deadline",
    "tandem/model/context.py:_exchanged": "on CUDA it queues; gloo's has the group's deadline",
    "tandem/model/context.py:forward": "on CUDA it queues; gloo's has the group's deadline",
    # What tells of waits.
    "tandem/observability/watchdog.py:_end_process": "for the main thread's end: it ends a process that hangs",
    "tandem/observability/watchdog.py:watching": "for its own thread, which waits for nothing but its next look",
    "tandem/observability/vitals.py:shown": "for its own thread, which waits for nothing but its next sign",
    "tandem/observability/waits.py:actor": "a context variable",
    "tandem/observability/waits.py:progress": "a context variable",
    "tandem/observability/waits.py:_begin": "a context variable",
}
"""``file:function`` where something waits all the same, and why that is right."""


def waiting(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Function, line and text of every call that may wait for ever, unregistered."""
    yield from _within(tree, "", covered=False)


def _within(node: ast.AST, function: str, *, covered: bool) -> Iterator[tuple[str, int, str]]:
    for child in ast.iter_child_nodes(node):
        inside, name = covered, function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inside, name = False, child.name
        elif isinstance(child, ast.AsyncWith | ast.With):
            inside = covered or any(_registers(item.context_expr) for item in child.items)
        elif isinstance(child, ast.Call):
            inside = covered or _registers(child)
            if not inside and _bare(child):
                yield name, child.lineno, ast.unparse(child)
        yield from _within(child, name, covered=inside)


def _registers(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and ast.unparse(call.func) in REGISTERED


def _bare(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in WAITING and not call.args and not call.keywords


@pytest.mark.slow
def test_every_wait_is_registered() -> None:
    waits_by_place: dict[str, list[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for function, line, text in waiting(parsed(path)):
            place = f"{path.relative_to(SRC).as_posix()}:{function}"
            waits_by_place.setdefault(place, []).append(f"{path.relative_to(ROOT)}:{line}: {text}")
    strangers = [line for place, lines in waits_by_place.items() if place not in ALLOWED for line in lines]
    assert not strangers, (
        "these may wait for ever, and nobody would know for whom: register them (waits.wait, waits.waiting, "
        f"waits.blocking), give them a timeout, or say in ALLOWED why they need none: {strangers}"
    )
    assert not ALLOWED.keys() - waits_by_place.keys(), "nothing waits there any more"


def test_the_rule_is_alive() -> None:
    """The check above sees what it looks for, and nothing else."""
    source = """
async def lost(event, queue, process, thread, d):
    await event.wait()
    x = await queue.get()
    process.wait()
    thread.join()
    ", ".join(d); d.get("x"); thread.join(timeout=5); process.wait(3)
    await waits.wait(event.wait(), owner="a", reason="b", on="c")
    async with waits.waiting("a", "b", on="c") as w:
        await event.wait()
        def other():
            process.wait()
"""
    assert [line for _, line, _ in waiting(ast.parse(source))] == [3, 4, 5, 6, 12]
