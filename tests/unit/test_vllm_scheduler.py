"""Logprobs leave the engine's process in pieces, and arrive as if they had left one by one."""

from __future__ import annotations

import ast
import os
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

from tandem.engines.vllm import speedups
from tandem.engines.vllm.speedups import FIELDS, PIECE, PIECES_KEY, scheduler

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

    def __init__(self, key: str, *, length: int, first: int = 0, in_pieces: bool = True, logprobs: int | None = 0):
        self.key, self.length, self.first, self.logprobs, self.made = key, length, first, logprobs, 0
        self.ended = False
        self.sampling_params = SimpleNamespace(
            extra_args={PIECES_KEY: True} if in_pieces else {"somebody": "else's"}, logprobs=logprobs
        )
        if logprobs is None:
            self.sampling_params.extra_args = None

    def is_finished(self) -> bool:
        return self.ended


class Ran:
    """What a forward pass gave, as vLLM has it: a row for each request, or as many as it has new tokens."""

    def __init__(self, requests: Sequence[Request], counts: Sequence[int], *, several: bool = False):
        width = 1 + max((request.logprobs or 0 for request in requests), default=0)
        self.req_ids = [request.key for request in requests]
        self.req_id_to_index = {key: i for i, key in enumerate(self.req_ids)}
        ids = [list(range(r.made, min(r.made + n, r.length))) for r, n in zip(requests, counts, strict=True)]
        self.sampled = [[r.first + i for i in of] for r, of in zip(requests, ids, strict=True)]
        # Who got no token has a row nevertheless, of what nobody may see.
        filed = ids if several else [of or [-(10**6)] for of in ids]
        parts = [rows(r.first, of, width) for r, of in zip(requests, filed, strict=True)]
        begins = [0, *np.cumsum([len(of) for of in filed]).tolist()]
        self.logprobs: LogprobsLists | None = None
        if any(request.logprobs is not None for request in requests):
            arrays = [np.concatenate([part[i] for part in parts]) for i in range(3)]
            self.logprobs = LogprobsLists(*arrays, begins[:-1] if several else None)


class Scheduler:
    """vLLM's: every pass gives each request some tokens, and whoever has all of them is forgotten."""

    def __init__(self, vllm_config: Any = None):
        self.config = vllm_config
        self.requests: dict[str, Request] = {}
        self.lingers: set[str] = set()
        self.cut = 0
        """Logprobs that were cut out for one request."""

    def update_from_output(self, fails: Sequence[str], ran: Ran) -> dict[int, Any]:
        outputs = []
        for row, key in enumerate(ran.req_ids):
            request = self.requests.get(key)
            if request is None or request.is_finished():  # it ended since the pass began
                continue
            tokens = [] if key in fails else ran.sampled[row]
            request.made += len(tokens)
            over = key in fails or request.made == request.length
            if over:
                del self.requests[key]
            logprobs = None
            if ran.logprobs is not None and request.logprobs is not None and tokens:
                self.cut += 1
                begins = ran.logprobs.cu_num_generated_tokens
                at = row if begins is None else begins[row]
                logprobs = LogprobsLists(*(array[at : at + len(tokens)] for array in ran.logprobs[:3]), None)
            if tokens or over:
                outputs.append(
                    SimpleNamespace(
                        request_id=key,
                        new_token_ids=tokens,
                        new_logprobs=logprobs,
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


def test_the_server_is_answered_between_launches_of_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    make(monkeypatch, LogprobsLists)
    assert intervals == [0.001]


class Config:
    """vLLM's: without a name it chooses for itself."""

    scheduler_cls: str | None = "tandem.engines.vllm.speedups.scheduler"

    def get_scheduler_cls(self) -> Any:
        assert self.scheduler_cls is None
        return Scheduler


def admitted(made: Any, *requests: Request) -> None:
    made.requests.update({request.key: request for request in requests})


def ran(made: Any, count: int = 1, *, fails: Sequence[str] = (), several: bool = False) -> list[Any]:
    """The outputs of a pass that gave each request so many tokens."""
    requests = list(made.requests.values())
    outputs = made.update_from_output(fails, Ran(requests, [count] * len(requests), several=several or count > 1))
    return list(outputs[0].outputs)


def played(made: Any, passes: int) -> tuple[dict[str, list[int]], dict[str, list[Any]]]:
    """Tokens of each request, and the logprobs that came with each of its outputs."""
    tokens, logprobs = defaultdict(list), defaultdict(list)
    for _ in range(passes):
        for output in ran(made):
            tokens[output.request_id] += output.new_token_ids
            logprobs[output.request_id].append(output.new_logprobs)
    return tokens, logprobs


def lengths(parts: Sequence[Any]) -> list[int]:
    return [0 if part is None else len(part.logprobs) for part in parts]


def test_vllms_own_choice_is_what_comes_after_ours(made: Any) -> None:
    assert isinstance(made, Scheduler)
    assert isinstance(made, speedups.Pieces)
    assert made.config.scheduler_config.scheduler_cls == Config.scheduler_cls, "vLLM's own record is left as it was"


def test_where_logprobs_are_handed_over_in_another_way_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(NamedTuple):
        logprobs: Any

    assert type(make(monkeypatch, Other)) is Scheduler


def test_a_piece_leaves_when_it_is_full_and_the_last_with_the_end(made: Any) -> None:
    admitted(made, Request("a", length=2 * PIECE + 4))
    tokens, logprobs = played(made, 2 * PIECE + 4)
    assert tokens["a"] == list(range(2 * PIECE + 4)), "tokens are told at once"
    assert lengths(logprobs["a"]) == [1, *[0] * (PIECE - 1), PIECE, *[0] * (PIECE - 1), PIECE, 0, 0, 3]
    assert not list(made._held)


def test_those_that_begin_together_do_not_send_together(made: Any) -> None:
    """Else every so many passes the next one waits for all of them."""
    admitted(made, *(Request(str(i), length=3 * PIECE, first=1000 * i) for i in range(2 * PIECE)))
    _, logprobs = played(made, 3 * PIECE)
    sent = [sum(of[i] is not None for of in logprobs.values()) for i in range(3 * PIECE)]
    assert sent == [2] * (3 * PIECE - 1) + [2 * PIECE]


def test_where_all_asked_vllm_cuts_nothing_out_of_a_pass(made: Any) -> None:
    admitted(made, Request("a", length=9), Request("b", length=9))
    played(made, 3)
    assert made.cut == 0
    admitted(made, Request("c", length=9, in_pieces=False))
    played(made, 2)
    assert made.cut == 6


def test_who_did_not_ask_gets_each_with_its_token(made: Any) -> None:
    admitted(
        made, Request("a", length=5, in_pieces=False), Request("b", length=5), Request("c", length=5, logprobs=None)
    )
    _, logprobs = played(made, 5)
    assert lengths(logprobs["a"]) == [1] * 5
    assert lengths(logprobs["b"]) == [1, 0, 0, 0, 4]
    assert logprobs["c"] == [None] * 5


def test_who_wants_other_logprobs_than_its_own_gets_each_with_its_token(made: Any) -> None:
    admitted(made, Request("a", length=3, logprobs=2), Request("b", length=3))
    _, logprobs = played(made, 3)
    assert [part.logprobs.shape for part in logprobs["a"]] == [(1, 3)] * 3
    assert logprobs["b"][-1].logprobs.shape == (2, 1)


@pytest.mark.slow
@given(
    turns=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=5, max_size=5)), max_size=60),
    wanted=st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from([0, 0, 0, 3, None]), st.integers(0, 40)), min_size=1, max_size=5
    ),
    order=st.randoms(use_true_random=False),
)
def test_nothing_is_lost_doubled_or_moved(
    turns: list[tuple[bool, list[int]]], wanted: list[tuple[int, int | None, int]], order: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = make(patch, LogprobsLists)
    requests = [
        Request(str(i), length=length, first=100 * i, logprobs=logprobs)
        for i, (length, logprobs, _) in enumerate(wanted)
    ]
    seen: dict[str, list[Any]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    for turn, (several, counts) in enumerate([*turns, *[(False, [1] * 5)] * 140]):
        admitted(made, *(request for request, (*_, since) in zip(requests, wanted, strict=True) if since == turn))
        # Rows are in whatever order, somebody may be left out, and only a pass that speculates gives several tokens.
        live = [r for r in made.requests.values() if turn >= len(turns) or order.random() < 0.8]
        order.shuffle(live)
        gave = [counts[int(r.key)] if several else min(1, counts[int(r.key)]) for r in live]
        for output in made.update_from_output((), Ran(live, gave, several=several))[0].outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.new_logprobs is not None:
                seen[output.request_id].append(output.new_logprobs)
    assert not list(made._held)
    for request in requests:
        assert tokens[request.key] == [request.first + i for i in range(request.length)]
        if request.logprobs is None:
            assert request.key not in seen
            continue
        width = 1 + request.logprobs
        arrays = [np.concatenate([part[i][:, :width] for part in seen[request.key]]) for i in (0, 1)]
        alone = rows(request.first, range(request.length), width)
        np.testing.assert_array_equal(arrays[0], alone.logprob_token_ids)
        np.testing.assert_array_equal(arrays[1], alone.logprobs)
        ranks = np.concatenate([part.sampled_token_ranks for part in seen[request.key]])
        np.testing.assert_array_equal(ranks, alone.sampled_token_ranks)
        assert arrays[1].dtype == alone.logprobs.dtype, "what is sent is what was computed"


def test_neighbours_that_want_more_do_not_widen_a_piece_in_its_midst(made: Any) -> None:
    admitted(made, Request("a", length=5))
    first = played(made, 2)[1]["a"]
    admitted(made, Request("b", length=1, logprobs=6))
    parts = played(made, 3)[1]["a"]
    assert lengths(first) == [1, 0]
    assert parts[-1].logprob_token_ids.tolist() == [[1], [2], [3], [4]]


@pytest.mark.parametrize("lingers", [False, True])
def test_one_that_ended_while_a_pass_ran_is_not_begun_again(made: Any, lingers: bool) -> None:
    one, other = Request("a", length=5), Request("b", length=5)
    admitted(made, one, other)
    under_way = Ran([one, other], [1, 1])
    if lingers:
        made.lingers.add("a")
    made.finish_requests(["a"])
    (output,) = made.update_from_output((), under_way)[0].outputs
    assert output.request_id == "b"
    assert list(made._held) == ["b"]


@pytest.mark.parametrize("lingers", [False, True])
def test_what_is_held_of_a_request_that_is_aborted_goes_with_it(made: Any, lingers: bool) -> None:
    admitted(made, Request("a", length=9), Request("b", length=9))
    played(made, 2)
    if lingers:
        made.lingers.add("a")
    made.finish_requests(["a"])
    assert list(made._held) == ["b"]


def test_one_that_fails_without_another_token_takes_what_is_held(made: Any) -> None:
    admitted(made, Request("a", length=9))
    played(made, 3)
    (output,) = ran(made, fails=["a"])
    assert output.new_logprobs.logprob_token_ids.tolist() == [[1], [2]]
    assert not list(made._held)


@pytest.mark.skipif(not INSTALLED, reason="there is no vLLM beside this environment")
def test_the_vllm_that_is_installed_hands_them_over_as_known() -> None:
    """Else its own scheduler is taken as it is, every test passes, and logprobs go one by one."""

    def body(file: str, name: str) -> list[ast.stmt]:
        tree = ast.parse((INSTALLED[0] / file).read_text())
        (definition,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        return definition.body

    lists = body("outputs.py", "LogprobsLists")
    names = [n.target.id for n in lists if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    assert tuple(names) == FIELDS
    methods = {node.name for node in body("core/sched/scheduler.py", "Scheduler") if isinstance(node, ast.FunctionDef)}
    assert {"update_from_output", "finish_requests"} <= methods


@pytest.mark.parametrize("child", [True, False], ids=["the scheduler's process", "the server"])
@pytest.mark.parametrize("cuda", [True, False])
def test_workers_are_forked_on_cuda_and_not_by_the_server(
    child: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cuda=lambda: cuda)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(speedups.multiprocessing, "parent_process", lambda: object() if child else None)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    speedups.fork_workers()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == ("fork" if child and cuda else "spawn")
