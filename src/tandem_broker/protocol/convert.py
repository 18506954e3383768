"""Groups to and from the wire's parallel lists. What the wire cannot say travels in ``group_overrides``.

Reading is tolerant: a missing key, null and an empty list are the same; a sequence that cannot be trained on becomes a
failed rollout that says why, and its siblings stay. Lists whose lengths disagree were refused before (``submission``).

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
from typing import Annotated, Any, TypeVar

import msgspec

from tandem.errors import BrokerError
from tandem.printable import named
from tandem.types import MASKED, NO_LOGPROB, UNKNOWN_LOGPROB, Completion, Finish, Group, Message, Rollout, Task, Turn
from tandem_broker.protocol.messages import Real, ScoredGroup

Number = TypeVar("Number", int, float)
Step = Annotated[int, msgspec.Meta(ge=0)]

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


@dataclass(slots=True)
class Wired:
    """One conversation of a rollout."""

    turns: list[Turn]
    """Each continues the one before it, at one temperature."""
    places: list[int]
    """Of every sampled token of these turns, its place among all that the rollout sampled."""

    def is_continued_by(self, turn: Turn) -> bool:
        """True if a turn repeats all of it, at the same temperature."""
        return turn.temperature == self.temperature and list(turn.prompt[: len(self.tokens)]) == self.tokens

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
    conversations: list[Wired] = []
    done = 0
    for turn in rollout.turns:
        places = range(done, done + len(turn.completion.tokens))
        done = places.stop
        if not places or not turn.trained:  # to the trainer it is part of what the next turn answers
            continue
        if fits := [each for each in conversations if each.is_continued_by(turn)]:
            conversation = max(fits, key=lambda each: len(each.tokens))
        else:
            conversations.append(conversation := Wired([], []))
        conversation.turns.append(turn)
        conversation.places.extend(places)
    return conversations


def group_to_wire(group: Group) -> ScoredGroup:
    """The scored rollouts of a group as sequences, mostly one each; ``env_id`` is the client's to set."""
    pairs = [(rollout, wired) for rollout in group.scored for wired in sequences(rollout)]
    alike = len({wired.temperature for _, wired in pairs}) == 1
    overrides: list[dict[str, Any]] = [{} if alike else {"temperature": wired.temperature} for _, wired in pairs]
    for entry, (rollout, _) in zip(overrides, pairs, strict=True):
        if not rollout.trained:
            entry["set_advantage_to_zero"] = True
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


def _tandem_overrides(group: Group, pairs: Sequence[tuple[Rollout, Wired]]) -> dict[str, Any]:
    """What the wire has no field for."""
    if not pairs:
        return {}
    owners = {id(rollout): place for place, rollout in enumerate(group.scored)}
    several = len(pairs) > len(owners)
    versions = [[[step, len(list(run))] for step, run in groupby(wired.versions)] for _, wired in pairs]
    # An engine of others may not say them: then the broker's own guess is the better one.
    steps = {} if group.version_min < 0 else {"tandem_version": group.version_min, "tandem_versions": versions}
    return {
        **steps,
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
        scored: as ``submission.read_scored`` checked it.
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
        self._overrides: Mapping[str, Any] = scored.group_overrides or {}
        self._version: int = _as(Step, self._overrides.get("tandem_version"), version)
        anonymous = "foreign" if scored.env_id is None else f"foreign_{scored.env_id}"
        self.env = named(str(self._overrides.get("tandem_env") or anonymous))
        self._task = named(str(self._overrides.get("tandem_task") or id))
        notes.unread |= {name for name in _UNREAD if getattr(scored, name)}
        if scored.advantages and not rules.env_advantages:
            notes.unread.add("advantages")
        if any(entry.get("sft") for entry in (self._overrides, *(scored.overrides or ()))):
            notes.unread.add("sft")

    def owned(self) -> list[list[int]]:
        """Places of each rollout's sequences: one each, unless the sender says which belong together."""
        places = range(len(self._scored.tokens))
        owners = _as(list[int], self._overrides.get("tandem_rollouts"), places)
        if len(owners) != len(places):
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
        sent = self._entry(self._scored.messages, at) or ()
        messages = tuple(Message(role=str(m.get("role", "")), content=_text(m.get("content"))) for m in sent)
        turns: tuple[Turn, ...] = ()
        error, reward, advantages = "", None, None
        try:
            sampled = self._sampled(at)
            messages = messages or self._decoded(at)
            turns = tuple(self._turns(at, sampled))
            reward, advantages = self._scored.scores[at], self._advantages(at, sampled)
        except _Refused as refused:
            kind, error = refused.args
            self._notes.failed[kind] += 1
        prompt = tuple(takewhile(lambda message: message.role != "assistant", messages))
        return Rollout(
            id=f"{self._id}/{at}",
            task=Task(id=self._task, env=self.env, prompt=prompt, answer=""),
            turns=turns,
            messages=messages,
            status="error" if error else "ok",
            error=error,
            rewards={} if reward is None else self._rewards(at, reward),
            reward=reward,
            trained=bool(error) or not self._override(at).get("set_advantage_to_zero"),
            advantages=advantages,
        )

    def _sampled(self, at: int) -> list[int]:
        """Places of the trained tokens of a sequence. The first token has none before it that could predict it."""
        tokens, rules = self._scored.tokens[at], self._rules
        mask = self._scored.masks[at]
        if any(on not in (MASKED, token) for on, token in zip(mask, tokens, strict=True)):
            raise _Refused("malformed", f"a mask is neither {MASKED} nor the id of its token")
        wrong = [token for token in tokens if not 0 <= token < (rules.vocabulary or math.inf)]
        if wrong:
            raise _Refused("malformed", f"token {wrong[0]} is none of this model, which has {rules.vocabulary}")
        if rules.max_tokens is not None and len(tokens) > rules.max_tokens:
            raise _Refused("too_long", f"{len(tokens)} tokens are more than the {rules.max_tokens} of the context")
        sampled = [place for place, on in enumerate(mask) if on != MASKED and place > 0]
        if not sampled:
            raise _Refused("untrained", "every token is masked")
        return sampled

    def _turns(self, at: int, sampled: Sequence[int]) -> Iterator[Turn]:
        """Runs of trained tokens, each after all the tokens before it."""
        tokens, temperature = tuple(self._scored.tokens[at]), self._temperature(at)
        trained = zip(sampled, self._logprobs(at, sampled), self._versions(at, sampled), strict=True)
        for _, run in groupby(enumerate(trained), key=lambda pair: pair[1][0] - pair[0]):
            places, logprobs, versions = zip(*(entry for _, entry in run), strict=True)
            start, end = places[0], places[-1] + 1
            finish = self._finish(at) if places[-1] == sampled[-1] else "stop"
            completion = Completion(tokens=tokens[start:end], logprobs=logprobs, versions=versions, finish=finish)
            yield Turn(prompt=tokens[:start], completion=completion, temperature=temperature)

    def _logprobs(self, at: int, sampled: Sequence[int]) -> list[float]:
        """Of the trained tokens; rounding may have lifted one a little above 0."""
        rows = self._scored.inference_logprobs
        if not rows:
            if self._rules.policy_logprobs:
                return [UNKNOWN_LOGPROB] * len(sampled)
            raise BrokerError(
                f"group {self._id} of environment {self.env} has no inference_logprobs; let it send them (in Atropos: "
                "managed_server), or set broker.missing_logprobs: policy to train as if the policy of now had sampled"
            )
        logprobs = [rows[at][place] for place in sampled]
        if max(logprobs) > 1e-3:
            raise _Refused("malformed", f"a trained token has a logprob that is none: {max(logprobs):g}")
        return [min(value, 0.0) for value in logprobs]

    def _versions(self, at: int, sampled: Sequence[int]) -> list[int]:
        """Policy step of each trained token; the group's where the tokens' are not told, or do not add up."""
        runs = _as(list[tuple[Step, Step]], self._entry(self._overrides.get("tandem_versions"), at), [])
        if sum(count for _, count in runs) != len(sampled):
            return [self._version] * len(sampled)
        return [step for step, count in runs for _ in range(count)]

    def _temperature(self, at: int) -> float:
        """Of the sequence, else of the group, else the rules'; 0 and below is greedy, whose logprobs are those of 1."""
        for source in (self._override(at), self._scored.generation_params or {}, self._overrides):
            value = _as(float, source.get("temperature"), math.nan)
            if math.isfinite(value):
                least, most = TEMPERATURES
                if value > 0 and not least <= value <= most:
                    raise _Refused("malformed", f"its temperature is {value:g}; expected 0, or {least:g} to {most:g}")
                return float(value) if value > 0 else 1.0
        return self._rules.temperature

    def _override(self, at: int) -> Mapping[str, Any]:
        return self._entry(self._scored.overrides, at) or {}

    def _finish(self, at: int) -> Finish:
        finish: Finish = _as(Finish, self._entry(self._overrides.get("tandem_finish"), at), "stop")
        return finish

    def _rewards(self, at: int, score: float) -> dict[str, float]:
        """By name where the environment tells them; else the score alone."""
        by_name = _as(dict[str, Real], self._entry(self._overrides.get("tandem_rewards"), at), {})
        return {named(name): value for name, value in by_name.items()} or {"score": score}

    def _advantages(self, at: int, sampled: Sequence[int]) -> tuple[float, ...] | None:
        if not self._rules.env_advantages or not self._scored.advantages:
            return None
        row: Any = self._scored.advantages[at]
        return tuple(float(row[place]) for place in sampled)

    def _entry(self, rows: Any, at: int) -> Any:
        """One sequence's entry of a list with one for each; None where there is none, or it is no such list."""
        return rows[at] if isinstance(rows, list) and len(rows) == len(self._scored.tokens) else None

    def _decoded(self, at: int) -> tuple[Message, ...]:
        """The text of the tokens, where it can be told."""
        decode = self._rules.decode
        if decode is None:
            return ()
        spans = zip(self._scored.masks[at], self._scored.tokens[at], strict=True)
        return tuple(
            Message(role="assistant" if is_sampled else "user", content=decode([token for _, token in run]))
            for is_sampled, run in groupby(spans, key=lambda pair: pair[0] != MASKED)
        )


def _as(kind: Any, value: Any, otherwise: Any) -> Any:
    """The value where it is of this type: what others send in fields of ours may be anything."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return otherwise


def _text(content: Any) -> str:
    """Text of a message, of which parts may be images."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
