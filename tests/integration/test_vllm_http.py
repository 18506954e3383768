"""One real engine behind ``tandem serve engine``: its HTTP surface, versions in flight, trainers that find it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import torch
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import (
    CUDA,
    DTYPE,
    GAP,
    HEAD_DIM,
    alive,
    engine,
    needs_engine,
    published,
    recipe,
    serving,
    until,
)
from support.rollouts import make_group, make_rollout
from support.tiny_policy import live_policy, reference

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.config import loading as config
from tandem.engines.vllm import protocol as wire
from tandem.model.penalties import Penalties
from tandem.trainer import assemble as run
from tandem.trainer.pack import Packer
from tandem.trainer.step import LocalWork, Objective
from tandem.transport.bridge import NCCL_FILE, VllmBridge
from tandem.types import Sampling

pytestmark = [needs_engine, pytest.mark.slow]

KEY = "a key of this test"
NORM = "model.norm.weight"
"""The last norm: it changes what is sampled but no key and no value, so each token's logprob tells its version."""
PROMPT = [72, 101, 108, 108, 111, 32]
MANY = 480 if CUDA else 240
"""Tokens of an answer that publishes come in between."""
LONG = [7 + i % 90 for i in range(300)]
"""Longer than two blocks of the prefix cache."""


@dataclass
class Served:
    """The engine, and how it is asked."""

    url: str
    place: Path
    model: Path
    process: subprocess.Popen[str]
    step: int = 0
    output: Callable[[], str] = field(default=lambda: "")

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, key: str = KEY, seconds: float = 120
    ) -> tuple[int, Any]:
        """One HTTP call; status and answer."""
        connection = self.connect(seconds)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} if key else {}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, raw, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode(errors="replace")

    def connect(self, seconds: float = 120) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)

    def post(self, path: str, body: Any = None) -> Any:
        """A call that must succeed."""
        status, answer = self.ask(path, {} if body is None else body)
        assert status == 200, answer
        return answer

    def generate(self, prompt: list[int] = PROMPT, **options: Any) -> Any:
        defaults = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        return self.post("/generate", {**defaults, **options})

    def running(self) -> int:
        return int(self.ask("/health")[1]["running"])

    def sampled(self) -> float:
        """Tokens sampled since the engine's start, by vLLM's own count."""
        rows = [row for row in self.ask("/metrics")[1].split("\n") if row.startswith("vllm:generation_tokens_total")]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    def publish(self, change: Callable[[], None]) -> int:
        """A whole publish of what ``change`` writes, proof left out; its step."""
        self.step += 1
        self.post("/bridge/pause")
        change()
        self.post("/bridge/stamp", {"step": self.step, "digest": f"{self.step:016x}"})
        self.post("/bridge/resume")
        return self.step

    def info(self) -> Any:
        return self.ask("/bridge/info")[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("serve")
    model = build_tiny_model(place / "model", head_dim=HEAD_DIM)
    own = engine(api_key_variable="SERVE_KEY", max_num_seqs=16)
    lora = {"kind": "lora", "rank": 8, "alpha": 16}
    options = recipe(
        model, Path("runs"), engine=own, trainable=lora, sync={"kind": "shared"}, rewards={"number": 1.0}, context=512
    )
    (place / "recipe.yaml").write_text(yaml.safe_dump(options))
    environment = {**os.environ, "SERVE_KEY": KEY, "LOGDIR": str(place / "logdir")}
    with serving(place, environment) as process:
        text = (place / "said.txt").read_text
        url = text().partition("serving at ")[2].partition(";")[0].strip()
        yield Served(url, place, model, process, output=text)


@pytest.fixture(scope="module")
def weights(served: Served) -> dict[str, torch.Tensor]:
    """The engine's own memory, found by the file that says where it is."""
    return VllmBridge.read(served.place / "logdir").attach()


@pytest.fixture
def norm(weights: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The last norm's weight, as it was afterwards."""
    before = weights[NORM].clone()
    yield weights[NORM]
    weights[NORM].copy_(before)


def scale(norm: torch.Tensor, by: float) -> Callable[[], None]:
    def change() -> None:
        norm.mul_(by)
        if CUDA:
            torch.cuda.synchronize()

    return change


def scored(model: Path, prompt: list[int], tokens: list[int], factor: float = 1.0) -> list[float]:
    """Logprobs of tokens by transformers alone, the last norm multiplied by a factor."""
    dtype = getattr(torch, DTYPE)
    live = reference(model, dtype)
    with torch.no_grad():
        live.model.norm.weight.mul_(factor)
        logits = live(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()  # type: ignore[no-any-return]


def logprobs_of(answer: Any, index: int = 0) -> list[float]:
    """The logprobs of an answer."""
    pairs = zip(answer["token_ids"][index], answer["logprobs"][index], strict=True)
    return [entry[0][str(token)] for token, entry in pairs]


def near(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= GAP for x, y in zip(a, b, strict=True))


# The surface


def test_it_is_healthy_and_says_what_it_is(served: Served) -> None:
    status, health = served.ask("/health", key="")
    assert (status, health["status"], health["step"]) == (200, "ok", -1)
    info = served.info()
    assert (info["state"], info["logprobs"], info["context"], info["adapters"]) == (
        "serving",
        "processed_logprobs",
        512,
        True,
    )
    assert [worker["rank"] for worker in info["workers"]] == [0]
    _, layout = served.ask("/bridge/state_dict_info")
    assert layout["num_params"] == len(layout["param_names"])
    assert {"vllm_name", "shape", "dtype", "device"} <= set(layout["param_mappings"][NORM])
    assert layout["param_mappings"]["model.layers.0.self_attn.k_proj.weight"]["vllm_name"].count("qkv_proj") == 1


def test_the_key_guards_all_but_health(served: Served) -> None:
    for path in ("/v1/models", "/bridge/info", "/lora/status", "/metrics", "/version"):
        assert served.ask(path, key="")[0] == 401
        assert served.ask(path, key="another")[0] == 401
        assert served.ask(path)[0] == 200
    assert served.ask("/generate", {"prompt": "a"}, key="")[0] == 401


def test_both_forms_of_a_prompt_and_all_that_can_be_asked(served: Served) -> None:
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1, "prompt_logprobs": 0, "ignore_eos": True}
    text = served.post("/generate", {"prompt": "Hello ", **options})
    ids = served.post("/generate", {"prompt": {"prompt_token_ids": text["prompt_token_ids"]}, **options})
    assert len(text["prompt_token_ids"]) == len("Hello "), "it is encoded as the tokenizer does it"
    assert text["prompt"] == ids["prompt"] == "Hello "
    assert text["token_ids"] == ids["token_ids"]
    assert text["finish_reasons"] == ["length"]
    assert len(text["text"]) == 1
    prompt, tokens = ids["prompt_token_ids"], ids["token_ids"][0]
    assert all(len(entry) == 1 and len(entry[0]) == 1 for entry in ids["logprobs"][0])
    assert near(logprobs_of(ids), scored(served.model, prompt, tokens))
    first, *rest = ids["prompt_logprobs"]
    assert first is None
    logprobs = [entry[str(token)] for token, entry in zip(prompt[1:], rest, strict=True)]
    assert near(logprobs, scored(served.model, prompt[:1], prompt[1:]))
    many = served.generate(n=3, temperature=1.0, logprobs=None)
    assert len(many["text"]) == len(many["token_ids"]) == len(many["versions"]) == 3
    assert many["logprobs"] is None
    assert len(set(map(tuple, many["token_ids"]))) == 3


def test_logprobs_are_those_of_the_distribution_that_was_sampled(served: Served) -> None:
    answer = served.generate(temperature=0.5, max_tokens=4)
    live = reference(served.model, getattr(torch, DTYPE))
    tokens = answer["token_ids"][0]
    with torch.no_grad():
        logits = live(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].float() / 0.5
    assert near(logprobs_of(answer), logits.log_softmax(-1)[range(4), tokens].tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.2, top_p=0.9, max_tokens=24),
        Sampling(temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, min_p=0.001, max_tokens=24),
        Sampling(repetition_penalty=0.8, frequency_penalty=-0.3, top_k=40, min_tokens=24, max_tokens=24),
    ],
    ids=["repetition and top_p", "presence and frequency", "all"],
)
def test_the_trainer_has_the_logprobs_of_penalised_answers(served: Served, sampling: Sampling) -> None:
    """Two answers to one prompt, one of them goes on for a turn; the trainer computes them together."""
    with live_policy(served.model) as policy:
        ends = sorted(policy.end_tokens)

        def exchange(prompt: list[int]) -> tuple[list[int], list[int], list[float]]:
            request = wire.completion_request(prompt, sampling, limit=100, ends=ends)
            answer = served.post("/generate", json.loads(msgspec.json.encode(request)))
            tokens = answer["token_ids"][0]
            assert len(tokens) >= sampling.min_tokens
            return prompt, tokens, logprobs_of(answer)

        first, second = exchange(PROMPT), exchange(PROMPT)
        turns = [[first, exchange([*first[0], *first[1], 32, 10])], [second]]
        rollouts = [make_rollout(f"t@0/{i}", t, i, temperature=sampling.temperature) for i, t in enumerate(turns)]
        pack = Packer(
            advantage=DrGrpo(), reduction="token", max_tokens=24, budget=1000, mask_truncated=False,
            device=policy.device, penalties=Penalties.of(sampling, ends),
        )  # fmt: skip
        (micro,) = pack([make_group("t@0", rollouts)], version=0).micro
        step = LocalWork(policy=policy, objective=Objective(loss=Grpo()), stepper=None, sampling=sampling)  # type: ignore[arg-type]
        with torch.no_grad():
            (mine, _), (plain, _) = step._distribution(micro), step._distribution(replace(micro, history=None))
    recorded = micro.batch.behavior_logprobs_N
    assert near(mine.tolist(), recorded.tolist())
    assert (plain - recorded).abs().max() > (GAP if CUDA else 10 * GAP), "without penalties it has others"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"prompt": ', 400, "truncated"),
        ({"prompt": "a", "max_tokns": 3}, 400, "max_tokns"),
        ({"prompt": "a", "temperature": "hot"}, 400, "$.temperature"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": {"prompt_token_ids": []}}, 400, "empty"),
        ({"prompt": {"prompt_token_ids": [10**6]}}, 400, "vocab"),
        ({"prompt": {"prompt_token_ids": [-1]}}, 400, ">= 0"),
        ({"prompt": {"prompt_token_ids": [10**20]}}, 400, "prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": [5] * 600}}, 400, "512"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "top_p": 2}, 400, "top_p"),
        ({"prompt": "a", "n": 0}, 400, "$.n"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "logprobs": 10**6}, 400, "logprobs"),
        ({"prompt": "a", "adapter": "nobody"}, 404, "nobody"),
    ],
)
def test_bad_requests_are_told_why(served: Served, body: Any, status: int, says: str) -> None:
    code, answer = served.ask("/generate", body)
    assert (code, says in answer["detail"]) == (status, True), answer
    assert served.ask("/health")[0] == 200


def test_other_methods_and_unknown_routes(served: Served) -> None:
    assert served.ask("/generate")[0] == 405
    assert served.ask("/nowhere")[0] == 404


def test_the_stock_api_works(served: Served) -> None:
    status, models = served.ask("/v1/models")
    name = models["data"][0]["id"]
    assert (status, name) == (200, str(served.model))
    completion = served.post("/v1/completions", {"model": name, "prompt": PROMPT, "max_tokens": 6, "temperature": 0})
    assert completion["choices"][0]["text"] == served.generate(max_tokens=6, temperature=0.0)["text"][0]
    messages = [{"role": "user", "content": "hi"}]
    chat = served.post("/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 3})
    assert chat["usage"]["completion_tokens"] <= 3
    assert served.ask("/v1/completions", {"model": name, "prompt": PROMPT, "max_tokens": -1})[0] == 400


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/completions streamed"])
def test_work_ends_with_its_client(served: Served, path: str) -> None:
    route, _, streamed = path.partition(" ")
    body = {"max_tokens": 480, "ignore_eos": True, "prompt": "a"}
    if route != "/generate":
        body |= {"model": str(served.model), "stream": bool(streamed)}
    connection = served.connect()
    connection.request(
        "POST", route, json.dumps(body), {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    )
    until(lambda: served.running() == 1, "the request")
    connection.close() if connection.sock is None else connection.sock.close()
    started = time.monotonic()
    until(lambda: served.running() == 0, "the end of the work", 10)
    assert time.monotonic() - started < 5


# Versions


def flying(served: Served, pool: ThreadPoolExecutor, number: int, tokens: int, **options: Any) -> list[Any]:
    """Requests in flight, some tokens of each sampled; sent anew where one ends before that is seen."""
    options = {"max_tokens": tokens, "temperature": 1.0, **options}
    for _ in range(20):
        before = served.sampled()
        futures = [pool.submit(served.generate, [*PROMPT, i], **options) for i in range(number)]
        until(partial(seen, served, futures, before), "the requests")
        if not any(future.done() for future in futures):
            return futures
        wait(futures)
    raise AssertionError(f"{number} requests of {tokens} tokens end before they are seen; ask for more tokens")


def seen(served: Served, futures: list[Future[Any]], before: float) -> bool:
    """Whether all of these requests are in flight, or one has ended."""
    sampling = served.running() == len(futures) and served.sampled() > before
    return sampling or any(future.done() for future in futures)


def test_tokens_carry_the_exact_version_that_sampled_them(served: Served, norm: torch.Tensor) -> None:
    """The boundary between versions is told to the token: its logprob is that version's and no other's."""
    factors = {served.publish(lambda: None): 1.0}
    with ThreadPoolExecutor() as pool:
        futures = flying(served, pool, 4, MANY)
        for by in (1.5, 0.4, 2.5):
            enough = served.sampled() + 40
            until(lambda enough=enough: served.sampled() >= enough, "tokens between two publishes")  # type: ignore[misc]
            before = factors[served.step]
            factors[served.publish(scale(norm, by))] = before * by
        answers = [future.result() for future in futures]
    crossed = 0
    for i, answer in enumerate(answers):
        (spans,), (tokens,), logprobs = answer["versions"], answer["token_ids"], logprobs_of(answer)
        assert sum(count for _, count in spans) == len(tokens) == MANY
        assert [step for step, _ in spans] == sorted({step for step, _ in spans})
        crossed += len(spans) - 1
        start = 0
        for step, count in spans:
            whole = scored(served.model, [*PROMPT, i], tokens, factors[step])
            assert near(logprobs[start : start + count], whole[start : start + count]), (step, spans)
            start += count
    assert crossed >= 4, "the requests were to live through several publishes"


def test_finishing_first_leaves_one_version_in_each_answer(served: Served, norm: torch.Tensor) -> None:
    with ThreadPoolExecutor() as pool:
        futures = flying(served, pool, 3, MANY)
        served.post("/bridge/pause", {"finish": True})
        assert served.running() == 0
        assert [f.result()["versions"] for f in futures] == [[[[served.step, MANY]]]] * 3
    served.post("/bridge/resume")


def test_nothing_is_given_out_while_weights_are_proven(served: Served, norm: torch.Tensor) -> None:
    old = served.step
    with ThreadPoolExecutor() as pool:
        futures = flying(served, pool, 2, MANY)
        served.post("/bridge/pause")
        scale(norm, 1.2)()
        probe = served.post("/bridge/probe", {"tokens": LONG[:40], "temperature": 0.7, "max_tokens": 4})
        assert near(probe["scored"], scored(served.model, LONG[:1], LONG[1:40], 1.2))
        assert probe["cached"] == 0
        new = pool.submit(served.generate, max_tokens=2)
        time.sleep(1.0)
        assert not any(future.done() for future in [*futures, new])
        assert served.ask("/bridge/resume", {})[0] == 409
        served.step += 1
        served.post("/bridge/stamp", {"step": served.step})
        served.post("/bridge/resume")
        assert new.result()["versions"] == [[[served.step, 2]]]
        for future in futures:
            ((first, second),) = future.result()["versions"]
            assert (first[0], second[0], first[1] + second[1]) == (old, served.step, MANY)
    served.publish(scale(norm, 1 / 1.2))


def test_a_failed_proof_is_503_until_the_next_publish(served: Served, norm: torch.Tensor) -> None:
    name = str(served.model)
    stock = {"model": name, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(served.ask, "/generate", {"prompt": "a", "max_tokens": 400, "ignore_eos": True}),
            pool.submit(served.ask, "/v1/completions", stock),
        ]
        until(lambda: served.running() == 2, "the requests")
        served.post("/bridge/pause")
        served.post("/bridge/probe", {"tokens": PROMPT})
        served.post("/bridge/stop", {"reason": "bytes differ"})
        for future in futures:
            status, answer = future.result()
            assert (status, "bytes differ" in answer["detail"]) == (503, True)
    until(lambda: served.info()["running"] == 0, "the end of the work", 10)
    assert served.ask("/health")[0] == 503
    assert served.ask("/generate", {"prompt": "a"})[0] == 503
    assert served.ask("/v1/completions", stock)[0] == 503
    assert served.ask("/bridge/resume", {})[0] == 503
    step = served.publish(lambda: None)
    assert served.ask("/health")[0] == 200
    assert served.generate(max_tokens=2)["versions"] == [[[step, 2]]]


def test_a_paused_engine_queues_and_a_forgotten_one_stops(served: Served) -> None:
    with ThreadPoolExecutor() as pool:
        served.post("/bridge/pause", {"seconds": 60})
        waiting = pool.submit(served.generate, max_tokens=2)
        time.sleep(0.5)
        assert not waiting.done()
        served.post("/bridge/resume")
        assert waiting.result()["finish_reasons"] == ["length"]
        served.post("/bridge/pause", {"seconds": 0.5})
        refused = pool.submit(served.ask, "/generate", {"prompt": "a"})
        status, answer = refused.result()
        assert (status, "never resumed" in answer["detail"]) == (503, True)
    served.publish(lambda: None)


def test_no_prefix_outlives_its_weights(served: Served) -> None:
    served.publish(lambda: None)
    assert served.generate(LONG, max_tokens=1)["cached"] == 0
    kept = served.generate(LONG, max_tokens=1)["cached"]
    assert kept > 0
    served.publish(lambda: None)
    assert served.generate(LONG, max_tokens=1)["cached"] == 0
    assert served.generate(LONG, max_tokens=1)["cached"] == kept
    for own in ({}, {"cache_salt": "mine"}):
        reused(served, **own)
        assert reused(served, **own) == kept
        served.publish(lambda: None)
        assert reused(served, **own) == 0


def reused(served: Served, **options: Any) -> float:
    """Tokens of a prompt that a request to /v1 took from the prefix cache."""

    def hits() -> float:
        _, text = served.ask("/metrics")
        rows = [row for row in text.splitlines() if row.startswith("vllm:prefix_cache_hits_total")]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    before = hits()
    served.post("/v1/completions", {"model": str(served.model), "prompt": LONG, "max_tokens": 1, **options})
    return hits() - before


# Adapters


@pytest.fixture(scope="module")
def adapters(served: Served) -> dict[str, Path]:
    """Two adapters that change a lot, in the folder that the engine may load from, and one elsewhere."""
    from peft import LoraConfig, get_peft_model

    out = {}
    places = {"one": served.place / "runs", "two": served.place / "runs", "elsewhere": served.place}
    for seed, (name, place) in enumerate(places.items()):
        torch.manual_seed(seed)
        own = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        with warnings.catch_warnings():  # of transformers, about what PEFT asks it
            warnings.simplefilter("ignore", FutureWarning)
            live = get_peft_model(reference(served.model), own)
        live.save_pretrained(place / name, save_embedding_layers=False)
        out[name] = place / name
    return out


def with_adapter(served: Served, folder: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        live = PeftModel.from_pretrained(reference(served.model), folder)
    with torch.no_grad():
        logits = live(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()  # type: ignore[no-any-return]


def test_adapters_come_from_allowed_folders_alone(served: Served, adapters: dict[str, Path]) -> None:
    link = served.place / "runs" / "link"
    link.symlink_to(adapters["elsewhere"])
    for path in (adapters["elsewhere"], served.place / "runs" / ".." / "elsewhere", link, "/etc"):
        status, answer = served.ask("/lora/load", {"adapter_path": str(path)})
        assert (status, "allowed folders" in answer["detail"]) == (403, True)
    assert served.ask("/lora/load", {"adapter_path": str(served.place / "runs" / "missing")})[0] == 404
    assert served.ask("/lora/status")[1]["loaded"] == []


def test_a_swap_leaves_requests_in_flight_alone(served: Served, adapters: dict[str, Path]) -> None:
    served.post("/lora/load", {"adapter_path": str(adapters["one"]), "adapter_name": "one"})
    served.step += 1
    first = served.step
    served.post("/bridge/stamp", {"step": first, "adapter": "one"})
    with ThreadPoolExecutor() as pool:
        futures = flying(served, pool, 2, MANY)
        served.post("/lora/load", {"adapter_path": str(adapters["two"]), "adapter_name": "two"})
        served.step += 1
        served.post("/bridge/stamp", {"step": served.step, "adapter": "two"})
        later = pool.submit(served.generate, max_tokens=20)
        kept = served.post("/lora/unload", {"adapter_name": "one", "unless_used": True})
        assert kept["unloaded"] == []
        for i, future in enumerate(futures):
            answer = future.result()
            assert answer["versions"] == [[[first, MANY]]]
            expected = with_adapter(served, adapters["one"], [*PROMPT, i], answer["token_ids"][0])
            assert near(logprobs_of(answer), expected)
        answer = later.result()
    assert answer["versions"] == [[[served.step, 20]]]
    assert near(logprobs_of(answer), with_adapter(served, adapters["two"], PROMPT, answer["token_ids"][0]))
    by_name = served.generate(adapter="one", max_tokens=5)
    assert by_name["versions"] == [[[first, 5]]]
    assert served.post("/lora/unload")["unloaded"] == ["one", "two"]
    assert served.ask("/generate", {"prompt": "a", "adapter": "one"})[0] == 404
    served.publish(lambda: None)
    answer = served.generate(max_tokens=20)
    assert near(logprobs_of(answer), scored(served.model, PROMPT, answer["token_ids"][0]))


# Trainers that were started apart


def trained(served: Served, name: str, **changes: Any) -> Path:
    own = {"kind": "vllm", "urls": [served.url], "api_key_variable": "SERVE_KEY", "control_seconds": 60.0}
    options = recipe(served.model, served.place / "runs", name=name, engine=own, **changes)
    return asyncio.run(run.train(config.from_options(options, [], Path("apart")).config, resume=None))


LORA = {"kind": "lora", "rank": 8, "alpha": 16}


def serves(served: Served, folder: Path) -> None:
    """It goes on serving what was published last."""
    versions, info = published(folder), served.info()
    assert sorted(versions) == [1, 2, 3]
    assert (info["state"], info["step"]) == ("serving", 3)
    assert info["digest"] == versions[3]["digest"]
    assert served.generate(max_tokens=2)["versions"] == [[[3, 2]]]


def models(served: Served) -> set[str]:
    """What /v1 samples from."""
    return {model["id"] for model in served.ask("/v1/models")[1]["data"]}


def test_the_stock_api_samples_the_adapter_that_is_trained(
    served: Served, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_KEY", KEY)
    base = str(served.model)
    assert models(served) == {base}
    fast = {"kind": "adamw", "lr": 3e-2}  # so that it is seen in every token
    folder = trained(served, "lora-shared", trainable=LORA, sync={"kind": "shared"}, optimizer=fast)
    serves(served, folder)
    assert models(served) == {base, "tandem"}

    def sampled(model: str) -> tuple[list[int], list[float]]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        (choice,) = served.post("/v1/completions", {**body, "return_token_ids": True})["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    tokens, logprobs = sampled("tandem")
    assert tokens == served.generate(max_tokens=20, temperature=0.0)["token_ids"][0]
    policy = with_adapter(served, folder / "checkpoints/000003/adapter", PROMPT, tokens)
    assert near(logprobs, policy)
    assert not near(policy, scored(served.model, PROMPT, tokens)), "training changed nothing that is seen"
    tokens, logprobs = sampled(base)
    assert near(logprobs, scored(served.model, PROMPT, tokens))
    messages = [{"role": "user", "content": "hi"}]
    chat = served.post("/v1/chat/completions", {"model": "tandem", "messages": messages, "max_tokens": 3})
    assert chat["model"] == "tandem"

    assert reused(served, model="tandem") == 0
    assert reused(served, model="tandem") > 0
    assert reused(served) == 0, "keys and values of the adapter are not the base's"
    served.publish(lambda: None)
    assert reused(served, model="tandem") == 0
    before = sampled("tandem")
    other = {"lora_name": "tandem", "lora_path": str(adapters["one"]), "load_inplace": True}
    assert served.ask("/v1/load_lora_adapter", other)[0] == 409
    assert sampled("tandem") == before


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lora-hotswap", {"trainable": LORA, "sync": {"kind": "hotswap"}}),
        ("full-broadcast", {"trainable": {"kind": "full"}, "sync": {"kind": "broadcast"}}),
        ("full-shared", {"trainable": {"kind": "full"}, "sync": {"kind": "shared", "bridge": "logdir"}}),
    ],
)
def test_a_trainer_finds_it_by_its_url(
    served: Served, name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_KEY", KEY)
    monkeypatch.chdir(served.place)  # where the file of the weights is looked for
    monkeypatch.delenv("LOGDIR", raising=False)
    folder = trained(served, name, **changes)
    serves(served, folder)
    assert "tandem" not in models(served), "the adapter of an earlier trainer"
    if name == "full-broadcast":
        bridge = json.loads((folder / NCCL_FILE).read_text())
        assert (bridge["world_size"], bridge["param_metadata"][NORM]["shape"]) == (2, [64])


def test_the_wrong_key_is_told_before_the_run_begins(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_KEY", "another")
    with pytest.raises(Exception, match="API key"):
        trained(served, "wrong-key", trainable=LORA, sync={"kind": "shared"})


# Its end


def test_ctrl_c_ends_it_and_all_that_it_held(served: Served) -> None:
    pids = [worker["pid"] for worker in served.info()["workers"]]
    bridge = served.place / "logdir" / "vllm_bridge_config.json"
    exported = json.loads(bridge.read_text())["tandem"]["lent"].get("path")
    threading.Timer(0.1, served.process.send_signal, [signal.SIGINT]).start()
    assert served.process.wait(60) == 0, served.output()
    assert "Traceback" not in served.output()
    assert served.output().rstrip().endswith("ended")
    assert not any(alive(pid) for pid in pids)
    assert not bridge.exists()
    assert exported is None or not Path(exported).exists()
