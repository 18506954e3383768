"""Groups to and from the wire's parallel lists. What the wire cannot say travels in ``group_overrides``.

Reading is tolerant: a missing key, null and an empty list are the same; a sequence that cannot be trained on becomes a
failed rollout that says why, and its siblings stay.

Our own keys of ``group_overrides``: ``tandem_version`` (oldest policy step of the group), ``tandem_versions`` (for each
sequence ``[[step, tokens], ...]``), ``tandem_env``, ``tandem_task``, ``tandem_rewards`` (for each sequence by name) and
``tandem_finish`` (for each sequence). Where a rollout is several sequences, each has its score, and ``tandem_rollouts``
(for each sequence which rollout it is of) has them joined again. Any broker and trainer may ignore all of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import Any, TypeVar, get_args

from tandem.errors import BrokerError
from tandem.printable import named
from tandem.types import MASKED, NO_LOGPROB, UNKNOWN, Completion, Finish, Group, Json, Message, Rollout, Task, Turn
from tandem_broker.protocol.messages import LEAST_LOGPROB, MOST, ScoredGroup

Number = TypeVar("Number", int, float)

LEAST_SCORE = 1.1754943508222875e-38
"""Scores nearer to 0 are 0: float32 has no exact numbers below, and what differs by less teaches nothing."""
TEMPERATURES = (1e-6, 1e6)
"""Between these a temperature leaves logits finite in float32."""
_UNREAD = ("ref_logprobs", "distill_token_ids", "distill_logprobs", "images")
"""Lists of the wire that no objective here reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules by which groups are read."""

    max_tokens: int | None = None
    """Longer sequences are not trained on; None: any length is fine."""
    vocabulary: int | None = None
    """Token ids are below this; None: any id is fine."""
    temperature: float = 1.0
    """Of groups that say nothing of theirs."""
    env_advantages: bool = False
    """Take the advantages that an environment gives for each token."""
    policy_logprobs: bool = False
    """Where sampling logprobs are missing, let the policy's own stand in; otherwise a group without is refused."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Text of tokens, for people, where an environment sends no messages."""


@dataclass(slots=True)
class Notes:
    """Findings of one reading, for the caller to report."""

    failed: Counter[str] = field(default_factory=Counter)
    """Sequences that cannot be trained on, by why: malformed, too_long or untrained."""
    unread: set[str] = field(default_factory=set)
    """Fields of the wire that had something in them and were not read."""


@dataclass(frozen=True, slots=True)
class Wired:
    """One conversation of a rollout."""

    turns: tuple[Turn, ...]
    """Each continues the one before it, at one temperature."""
    places: tuple[int, ...]
    """Of every sampled token of these turns, its place among all that the rollout sampled."""

    @property
    def tokens(self) -> list[int]:
        """Everything that was said."""
        last = self.turns[-1]
        return [*last.prompt, *last.completion.tokens]

    @property
    def temperature(self) -> float:
        """Of every turn."""
        return self.turns[0].temperature

    @property
    def logprobs(self) -> list[float]:
        """Of the sampled tokens."""
        return [value for turn in self.turns for value in turn.completion.logprobs]

    @property
    def versions(self) -> list[int]:
        """Policy step of each sampled token."""
        return [step for turn in self.turns for step in turn.completion.versions]

    def spread(self, values: Sequence[Number], elsewhere: Number) -> list[Number]:
        """One value for each sampled token, laid out over all tokens."""
        row, done = [elsewhere] * len(self.tokens), 0
        for turn in self.turns:
            start, num = len(turn.prompt), len(turn.completion.tokens)
            row[start : start + num] = values[done : done + num]
            done += num
        return row


def sequences(rollout: Rollout) -> list[Wired]:
    """The conversations of a rollout, in the order in which they began; none where nothing was sampled.

    Of several that a turn could continue it continues the longest.
    """
    conversations: list[tuple[list[Turn], list[int]]] = []
    done = 0
    for turn in rollout.turns:
        places = range(done, done + len(turn.completion.tokens))
        done = places.stop
        if not places:
            continue
        fits = [entry for entry in conversations if _continues(turn, entry[0][-1])]
        if fits:
            turns, held = max(fits, key=lambda entry: len(_all_tokens(entry[0][-1])))
        else:
            turns, held = [], []
            conversations.append((turns, held))
        turns.append(turn)
        held.extend(places)
    return [Wired(tuple(turns), tuple(places)) for turns, places in conversations]


def _continues(turn: Turn, before: Turn) -> bool:
    history = _all_tokens(before)
    return turn.temperature == before.temperature and turn.prompt[: len(history)] == history


def _all_tokens(turn: Turn) -> tuple[int, ...]:
    return turn.prompt + turn.completion.tokens


def group_to_wire(group: Group) -> ScoredGroup:
    """The scored rollouts of a group as sequences, mostly one each; ``env_id`` is the client's to set."""
    pairs = [(rollout, wired) for rollout in group.scored for wired in sequences(rollout)]
    alike = len({wired.temperature for _, wired in pairs}) == 1
    overrides: list[dict[str, Json]] = [
        {
            **({} if alike else {"temperature": wired.temperature}),
            **({} if rollout.trained else {"set_advantage_to_zero": True}),
        }
        for rollout, wired in pairs
    ]
    return ScoredGroup(
        tokens=[wired.tokens for _, wired in pairs],
        masks=[wired.spread([t for turn in wired.turns for t in turn.completion.tokens], MASKED) for _, wired in pairs],
        scores=[rollout.reward or 0.0 for rollout, _ in pairs],
        advantages=_advantage_rows(pairs),
        inference_logprobs=[wired.spread(wired.logprobs, NO_LOGPROB) for _, wired in pairs],
        messages=[[m.as_dict() for m in rollout.messages] for rollout, _ in pairs],
        generation_params={"temperature": pairs[0][1].temperature} if alike else None,
        overrides=overrides if any(overrides) else None,
        group_overrides=_tandem_overrides(group, pairs),
    )


def _advantage_rows(pairs: Sequence[tuple[Rollout, Wired]]) -> list[list[float]] | None:
    """Advantages for each token, if every rollout has them."""
    rows = []
    for rollout, wired in pairs:
        if rollout.advantages is None:
            return None
        rows.append(wired.spread([rollout.advantages[place] for place in wired.places], 0.0))
    return rows


def _tandem_overrides(group: Group, pairs: Sequence[tuple[Rollout, Wired]]) -> dict[str, Json]:
    """What the wire has no field for."""
    if not pairs:
        return {}
    owners = {id(rollout): place for place, rollout in enumerate(group.scored)}
    several = len(pairs) > len(owners)
    return {
        "tandem_version": group.version_min,
        "tandem_versions": [[[step, len(list(run))] for step, run in groupby(w.versions)] for _, w in pairs],
        "tandem_env": group.env,
        "tandem_task": group.scored[0].task.id,
        "tandem_rewards": [rollout.rewards for rollout, _ in pairs],
        "tandem_finish": [wired.turns[-1].completion.finish for _, wired in pairs],
        **({"group_size": len(pairs), "tandem_rollouts": [owners[id(r)] for r, _ in pairs]} if several else {}),
    }


def group_from_wire(
    scored: ScoredGroup,
    *,
    id: str,
    version: int,
    index: int = 0,
    rules: Rules | None = None,
    notes: Notes | None = None,
) -> Group:
    """Convert a group for the trainer: each run of unmasked tokens of a sequence is one turn.

    Args:
        scored: as it came.
        id: what it is called here.
        version: policy step of tokens that do not say theirs.
        index: its place in the order of arrival.
        rules: what is trained on.
        notes: gathers what could not be.

    Raises:
        BrokerError: sampling logprobs are missing, and ``rules`` allow nothing in their place.
    """
    reading = _GroupReader(scored, id, version, rules or Rules(), notes or Notes())
    rollouts = tuple(reading.joined(n, places) for n, places in enumerate(reading.owned()))
    return Group(id=id, index=index, env=reading.env, rollouts=rollouts)


class _Refused(Exception):
    """A sequence that cannot be trained on: the kind of fault, then what a person should know."""


class _GroupReader:
    """One group under the rules."""

    def __init__(self, scored: ScoredGroup, id: str, version: int, rules: Rules, notes: Notes):
        self._scored = scored
        self._id = id
        self._rules = rules
        self._notes = notes
        self._overrides: Mapping[str, Json] = scored.group_overrides or {}
        self._version = _step(self._overrides.get("tandem_version"), version)
        self.env = named(str(self._overrides.get("tandem_env") or self._anonymous()))
        self._task = named(str(self._overrides.get("tandem_task") or id))
        self._note_unread()

    def _anonymous(self) -> str:
        return "foreign" if self._scored.env_id is None else f"foreign_{self._scored.env_id}"

    def _note_unread(self) -> None:
        """Remember what had something in it and is not read."""
        scored, notes = self._scored, self._notes
        notes.unread |= {name for name in _UNREAD if getattr(scored, name)}
        if scored.advantages and not self._rules.env_advantages:
            notes.unread.add("advantages")
        for entry in (self._overrides, *(scored.overrides or ())):
            if isinstance(entry, Mapping) and entry.get("sft"):
                notes.unread.add("sft")

    def owned(self) -> list[list[int]]:
        """Places of each rollout's sequences: one each, unless the sender says which belong together."""
        places = range(len(self._scored.tokens))
        owners = self._overrides.get("tandem_rollouts")
        if not isinstance(owners, list) or len(owners) != len(places) or not all(type(o) is int for o in owners):
            owners = places
        return [[at for at in places if owners[at] == owner] for owner in dict.fromkeys(owners)]

    def joined(self, n: int, places: Sequence[int]) -> Rollout:
        """A rollout of one or several sequences; one that cannot be trained on costs the others."""
        parts = [self.rollout(at) for at in places]
        failed = next((part for part in parts if part.status == "error"), None)
        advantages = [part.advantages for part in parts]
        is_complete = failed is None and None not in advantages
        return replace(
            failed or parts[0],
            id=f"{self._id}/{n}",
            turns=() if failed else tuple(turn for part in parts for turn in part.turns),
            advantages=tuple(value for row in advantages for value in row or ()) if is_complete else None,
        )

    def rollout(self, at: int) -> Rollout:
        """One sequence; one that cannot be trained on has its error and no reward."""
        messages = self._messages(at)
        prompt = tuple(takewhile(lambda message: message.role != "assistant", messages))
        task = Task(id=self._task, env=self.env, prompt=prompt, answer="")
        rollout_id = f"{self._id}/{at}"
        try:
            sampled = self._sampled(at)
            turns = tuple(self._turns(at, sampled))
            reward = self._score(at)
            advantages = self._advantages(at, sampled)
        except _Refused as refused:
            kind, error = refused.args
            self._notes.failed[kind] += 1
            return Rollout(id=rollout_id, task=task, turns=(), messages=messages, status="error", error=error)
        return Rollout(
            id=rollout_id,
            task=task,
            turns=turns,
            messages=messages,
            status="ok",
            rewards=self._rewards(at, reward),
            reward=reward,
            trained=not self._override(at).get("set_advantage_to_zero"),
            advantages=advantages,
        )

    def _sampled(self, at: int) -> list[int]:
        """Places of the trained tokens of a sequence. The first token has none before it that could predict it."""
        tokens, rules = self._scored.tokens[at], self._rules
        mask = _row(self._scored.masks, at, len(self._scored.tokens))
        if mask is None or len(mask) != len(tokens):
            got = "none" if mask is None else str(len(mask))
            raise _Refused("malformed", f"{len(tokens)} tokens have {got} masks; expected one for each")
        if any(on not in (MASKED, token) for on, token in zip(mask, tokens, strict=True)):
            raise _Refused("malformed", f"a mask is neither {MASKED} nor the id of its token")
        if rules.vocabulary is not None and tokens and not 0 <= min(tokens) <= max(tokens) < rules.vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < rules.vocabulary)
            raise _Refused("malformed", f"token {wrong} is none of this model, which has {rules.vocabulary}")
        if rules.max_tokens is not None and len(tokens) > rules.max_tokens:
            raise _Refused("too_long", f"{len(tokens)} tokens are more than the {rules.max_tokens} of the context")
        sampled = [place for place, on in enumerate(mask) if on != MASKED and place > 0]
        if not sampled:
            raise _Refused("untrained", "every token is masked")
        return sampled

    def _turns(self, at: int, sampled: Sequence[int]) -> Iterator[Turn]:
        """Runs of trained tokens, each after all the tokens before it."""
        tokens = tuple(self._scored.tokens[at])
        logprobs = self._logprobs(at, sampled)
        versions = self._versions(at, sampled)
        temperature = self._temperature(at)
        done = 0
        for start, end in _runs(sampled):
            here = slice(done, done + end - start)
            done += end - start
            completion = Completion(
                tokens=tokens[start:end],
                logprobs=tuple(logprobs[here]),
                versions=tuple(versions[here]),
                finish=self._finish(at) if done == len(sampled) else "stop",
            )
            yield Turn(prompt=tokens[:start], completion=completion, temperature=temperature)

    def _logprobs(self, at: int, sampled: Sequence[int]) -> list[float]:
        """Of the trained tokens; rounding may have lifted one a little above 0."""
        rows = self._scored.inference_logprobs
        if not rows:
            if self._rules.policy_logprobs:
                return [UNKNOWN] * len(sampled)
            raise BrokerError(
                f"group {self._id} of environment {self.env} has no inference_logprobs, and without the logprobs that "
                "its tokens were sampled with their ratio is unknown; let the environment send them (in Atropos: "
                "managed_server), or set broker.missing_logprobs: policy to train as if the policy of now had sampled"
            )
        row = self._row(rows, at, "inference_logprobs")
        logprobs = [row[place] for place in sampled]
        if not all(LEAST_LOGPROB <= value < 1e-3 for value in logprobs):
            wrong = next(value for value in logprobs if not LEAST_LOGPROB <= value < 1e-3)
            raise _Refused(
                "malformed",
                f"a trained token has a logprob that is none: {wrong:g}; expected {LEAST_LOGPROB:g} to 0",
            )
        return [min(value, 0.0) for value in logprobs]

    def _versions(self, at: int, sampled: Sequence[int]) -> list[int]:
        """Policy step of each trained token; the group's where the tokens' are not told, or do not add up."""
        runs = _row(self._overrides.get("tandem_versions"), at, len(self._scored.tokens))
        steps: list[int] = []
        for run in runs if isinstance(runs, list) else ():
            step, count = (_step(v, -1) for v in run) if isinstance(run, list) and len(run) == 2 else (-1, -1)
            if step < 0 or not 0 <= count <= len(sampled) - len(steps):
                return [self._version] * len(sampled)  # nothing is made of a run of more tokens than there are
            steps += [step] * count
        return steps if len(steps) == len(sampled) else [self._version] * len(sampled)

    def _temperature(self, at: int) -> float:
        """Of the sequence, else of the group, else the rules'; 0 and below is greedy, whose logprobs are those of 1."""
        for source in (self._override(at), self._scored.generation_params or {}, self._overrides):
            value = source.get("temperature")
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                least, most = TEMPERATURES
                if value > 0 and not least <= value <= most:
                    raise _Refused("malformed", f"its temperature is {value:g}; expected 0, or {least:g} to {most:g}")
                return float(value) if value > 0 else 1.0
        return self._rules.temperature

    def _override(self, at: int) -> Mapping[str, Json]:
        entry = _row(self._scored.overrides, at, None)
        return entry if isinstance(entry, Mapping) else {}

    def _finish(self, at: int) -> Finish:
        finish = _row(self._overrides.get("tandem_finish"), at, None)
        return finish if finish in get_args(Finish) else "stop"

    def _score(self, at: int) -> float:
        score = _row(self._scored.scores, at, len(self._scored.tokens))
        if score is None or not abs(score) <= MOST:
            raise _Refused("malformed", f"its score is {score}; expected a number up to ±{MOST:g} for each sequence")
        return _flushed(score)

    def _rewards(self, at: int, score: float) -> dict[str, float]:
        """By name where the environment tells them; else the score alone."""
        by_name = _row(self._overrides.get("tandem_rewards"), at, None)
        pairs = by_name.items() if isinstance(by_name, Mapping) else ()
        rewards = {named(str(name)): _flushed(v) for name, v in pairs if isinstance(v, int | float) and abs(v) <= MOST}
        return rewards or {"score": score}

    def _advantages(self, at: int, sampled: Sequence[int]) -> tuple[float, ...] | None:
        if not self._rules.env_advantages or not self._scored.advantages:
            return None
        row = self._row(self._scored.advantages, at, "advantages")
        advantages = tuple(float(row[place]) for place in sampled)
        if not all(abs(value) <= MOST for value in advantages):
            raise _Refused("malformed", f"an advantage is not within ±{MOST:g}")
        return advantages

    def _row(self, rows: Sequence[Sequence[float]], at: int, name: str) -> Sequence[float]:
        """One value for each token of a sequence."""
        row, num = _row(rows, at, len(self._scored.tokens)), len(self._scored.tokens[at])
        if row is None or len(row) != num:
            got = "none" if row is None else str(len(row))
            raise _Refused("malformed", f"{num} tokens have {got} {name}; expected one for each")
        return row  # type: ignore[no-any-return]

    def _messages(self, at: int) -> tuple[Message, ...]:
        """What the environment sent, else the text of the tokens where it can be told."""
        sent = _row(self._scored.messages, at, None)
        if sent:
            return tuple(Message(role=str(m.get("role", "")), content=_text(m.get("content"))) for m in sent)
        decode, tokens, mask = self._rules.decode, self._scored.tokens[at], _row(self._scored.masks, at, None)
        if decode is None or mask is None or len(mask) != len(tokens) or self._wrong_ids(tokens):
            return ()
        spans = [(on != MASKED, token) for on, token in zip(mask, tokens, strict=True)]
        return tuple(
            Message(role="assistant" if is_sampled else "user", content=decode([token for _, token in run]))
            for is_sampled, run in groupby(spans, key=lambda pair: pair[0])
        )

    def _wrong_ids(self, tokens: Sequence[int]) -> bool:
        return any(token < 0 or token >= (self._rules.vocabulary or math.inf) for token in tokens)


def _row(rows: Any, at: int, rows_expected: int | None) -> Any:
    """One sequence's entry of a parallel list; None where there is none, or the lists are not parallel."""
    if not isinstance(rows, list | tuple) or at >= len(rows) or rows_expected not in (None, len(rows)):
        return None
    return rows[at]


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of neighbours."""
    for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        span = [place for _, place in run]
        yield span[0], span[-1] + 1


def _flushed(value: float) -> float:
    """A score; 0 if it is too small for float32."""
    return float(value) if abs(value) >= LEAST_SCORE else 0.0


def _step(value: Json, otherwise: int) -> int:
    """A policy step, where the value is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _text(content: Json) -> str:
    """Text of a message, of which parts may be images."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
