"""Logprobs leave the engine's process in pieces, and arrive as if they had left one by one."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engines import _vllm_scheduler
from tandem.engines._vllm_scheduler import ASKED, FIELDS, PIECE, joined, scheduler

INSTALLED = sorted((Path(__file__).parents[2] / ".venv-engine").glob("lib/python3*/site-packages/vllm/v1"))
"""vLLM's own files, which nothing of this environment can import."""


class LogprobsLists(NamedTuple):
    """As vLLM has it."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None


class Request:
    """One in the scheduler: its answer is ``length`` tokens, whose ids count up from ``first``."""

    def __init__(self, key: str, *, length: int, first: int = 0, asked: bool = True, logprobs: int | None = 0):
        self.key, self.length, self.first, self.logprobs, self.made = key, length, first, logprobs, 0
        self.ended = False
        self.sampling_params = SimpleNamespace(extra_args={ASKED: True} if asked else {"somebody": "else's"})
        if logprobs is None:
            self.sampling_params.extra_args = None

    def is_finished(self) -> bool:
        return self.ended


class Scheduler:
    """vLLM's: every pass gives each request some tokens, and whoever has all of them is forgotten."""

    def __init__(self, vllm_config: Any = None):
        self.config = vllm_config
        self.requests: dict[str, Request] = {}
        self.lingers: set[str] = set()

    def update_from_output(self, tokens: int, *, fails: Sequence[str] = ()) -> dict[int, Any]:
        width = 1 + max((request.logprobs or 0 for request in self.requests.values()), default=0)
        outputs = []
        for key, request in list(self.requests.items()):
            ids = [] if key in fails else list(range(request.made, min(request.made + tokens, request.length)))
            request.made += len(ids)
            over = key in fails or request.made == request.length
            if over:
                del self.requests[key]
            outputs.append(
                SimpleNamespace(
                    request_id=key,
                    new_token_ids=[request.first + i for i in ids],
                    new_logprobs=rows(request.first, ids, width) if ids and request.logprobs is not None else None,
                    finish_reason="length" if over else None,
                )
            )
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.requests[key].ended = True
            if key not in self.lingers:  # as one does whose blocks somebody still reads
                del self.requests[key]


def rows(first: int, ids: Sequence[int], width: int) -> LogprobsLists:
    """The sampled token before the likeliest ones, whose number is the widest that any request of the batch wants."""
    sampled = np.array([[first + i, *range(width - 1)] for i in ids], np.int32).reshape(len(ids), width)
    return LogprobsLists(sampled, (-sampled / 7).astype(np.float32), sampled[:, 0] + 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    return make(monkeypatch, LogprobsLists)


def make(monkeypatch: pytest.MonkeyPatch, lists: type) -> Any:
    outputs = ModuleType("vllm.v1.outputs")
    outputs.LogprobsLists = lists  # type: ignore[attr-defined]
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.v1", ModuleType("vllm.v1")), (outputs.__name__, outputs)):
        monkeypatch.setitem(sys.modules, name, module)
    return scheduler(vllm_config=SimpleNamespace(scheduler_config=Config()))


class Config:
    """vLLM's: without a name it chooses for itself."""

    scheduler_cls: str | None = "tandem.engines._vllm_scheduler.scheduler"

    def get_scheduler_cls(self) -> Any:
        assert self.scheduler_cls is None
        return Scheduler


def admitted(made: Any, *requests: Request) -> None:
    made.requests.update({request.key: request for request in requests})


def played(made: Any, passes: Sequence[int]) -> tuple[dict[str, list[int]], dict[str, list[Any]]]:
    """Tokens of each request, and the logprobs that came with each of its outputs."""
    tokens, logprobs = defaultdict(list), defaultdict(list)
    for number in passes:
        for output in made.update_from_output(number)[0].outputs:
            tokens[output.request_id] += output.new_token_ids
            logprobs[output.request_id].append(output.new_logprobs)
    return tokens, logprobs


def test_vllms_own_choice_is_what_comes_after_ours(made: Any) -> None:
    assert isinstance(made, Scheduler)
    assert isinstance(made, _vllm_scheduler.Pieces)
    assert made.config.scheduler_config.scheduler_cls == Config.scheduler_cls, "vLLM's own record is left as it was"


def test_where_logprobs_are_handed_over_in_another_way_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(NamedTuple):
        logprobs: Any

    assert type(make(monkeypatch, Other)) is Scheduler


def test_a_piece_leaves_when_it_is_full_and_the_last_with_the_end(made: Any) -> None:
    admitted(made, Request("a", length=2 * PIECE + 3))
    tokens, logprobs = played(made, [1] * (2 * PIECE + 3))
    assert tokens["a"] == list(range(2 * PIECE + 3)), "tokens are told at once"
    assert [len(part.logprobs) if part else 0 for part in logprobs["a"]] == [
        *[0] * (PIECE - 1), PIECE, *[0] * (PIECE - 1), PIECE, 0, 0, 3
    ]  # fmt: skip
    assert not made._held


@pytest.mark.parametrize("length", [1, 2, PIECE - 1, PIECE, PIECE + 1])
def test_the_end_leaves_nothing_behind(made: Any, length: int) -> None:
    admitted(made, Request("a", length=length, first=5))
    _, logprobs = played(made, [1] * length)
    whole = joined([part for part in logprobs["a"] if part is not None])
    assert whole.logprob_token_ids[:, 0].tolist() == [5 + i for i in range(length)]
    assert logprobs["a"][-1] is not None
    assert not made._held


def test_who_did_not_ask_gets_each_with_its_token(made: Any) -> None:
    admitted(made, Request("a", length=5, asked=False), Request("b", length=5), Request("c", length=5, logprobs=None))
    _, logprobs = played(made, [1] * 5)
    assert [len(part.logprobs) for part in logprobs["a"]] == [1] * 5
    assert [part is None for part in logprobs["b"]] == [True] * 4 + [False]
    assert logprobs["c"] == [None] * 5


@given(
    passes=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    wanted=st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from([0, 0, 3, None]), st.integers(0, 40)), min_size=1, max_size=5
    ),
)
def test_nothing_is_lost_doubled_or_moved(passes: list[int], wanted: list[tuple[int, int | None, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = make(patch, LogprobsLists)
    requests = [
        Request(str(i), length=length, first=100 * i, logprobs=logprobs)
        for i, (length, logprobs, _) in enumerate(wanted)
    ]
    seen: dict[str, list[Any]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    for turn, number in enumerate([*passes, *[1] * 140]):
        admitted(made, *(request for request, (*_, since) in zip(requests, wanted, strict=True) if since == turn))
        for output in made.update_from_output(number)[0].outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.new_logprobs is not None:
                seen[output.request_id].append(output.new_logprobs)
    assert not made._held
    for request in requests:
        assert tokens[request.key] == [request.first + i for i in range(request.length)]
        if request.logprobs is None:
            assert request.key not in seen
            continue
        width = 1 + request.logprobs
        found = [np.concatenate([part[i][:, :width] for part in seen[request.key]]) for i in (0, 1)]
        alone = rows(request.first, range(request.length), width)
        np.testing.assert_array_equal(found[0], alone.logprob_token_ids)
        np.testing.assert_array_equal(found[1], alone.logprobs)
        ranks = np.concatenate([part.sampled_token_ranks for part in seen[request.key]])
        np.testing.assert_array_equal(ranks, alone.sampled_token_ranks)
        assert found[1].dtype == alone.logprobs.dtype, "what is sent is what was computed"


def test_neighbours_that_want_more_do_not_widen_a_piece_in_its_midst(made: Any) -> None:
    admitted(made, Request("a", length=4))
    first = played(made, [1])[1]["a"]
    admitted(made, Request("b", length=1, logprobs=6))
    parts = played(made, [1, 1, 1])[1]["a"]
    assert first == [None]
    assert parts[-1].logprob_token_ids.tolist() == [[0], [1], [2], [3]]


@pytest.mark.parametrize("lingers", [False, True])
def test_what_is_held_of_a_request_that_is_aborted_goes_with_it(made: Any, lingers: bool) -> None:
    admitted(made, Request("a", length=9), Request("b", length=9))
    played(made, [1, 1])
    if lingers:
        made.lingers.add("a")
    made.finish_requests(["a"])
    assert set(made._held) == {"b"}


def test_one_that_fails_without_another_token_takes_what_is_held(made: Any) -> None:
    admitted(made, Request("a", length=9))
    played(made, [1, 1])
    (output,) = made.update_from_output(1, fails=["a"])[0].outputs
    assert output.new_logprobs.logprob_token_ids.tolist() == [[0], [1]]
    assert not made._held


@pytest.mark.skipif(not INSTALLED, reason="there is no vLLM beside this environment")
def test_the_vllm_that_is_installed_hands_them_over_as_known() -> None:
    """Else its own scheduler is taken as it is, every test passes, and logprobs go one by one."""

    def body(file: str, name: str) -> list[ast.stmt]:
        tree = ast.parse((INSTALLED[0] / file).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        return found.body

    lists = body("outputs.py", "LogprobsLists")
    names = [n.target.id for n in lists if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    assert tuple(names) == FIELDS
    methods = {node.name for node in body("core/sched/scheduler.py", "Scheduler") if isinstance(node, ast.FunctionDef)}
    assert {"update_from_output", "finish_requests"} <= methods
