"""Atropos' messages: their types, and how bytes become them. ``-100`` and the logprob 1.0 exist on this wire alone.

A message is JSON or MessagePack, chosen by its content type. It is decoded once, strictly and typed, by msgspec; only
if that fails is it read again leniently (``_lax``), which either understands it or says what is wrong. Of groups in
JSON the long lists of numbers are checked without making objects of them (``_skim``); what is unusual there is decoded
like the rest. A group keeps the bytes of its values, with the optional keys that it lacks added as null: a batch is a
join of such payloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import astuple

from tandem.broker._checks import LEAST_LOGPROB, MOST, MOST_STEP, check
from tandem.broker._complete import completed, flat_advantages
from tandem.broker._decoding import Encoding as Encoding
from tandem.broker._decoding import decoder, plain
from tandem.broker._lax import Malformed, coerce, refuse
from tandem.broker._skim import REALS, STAND_INS, cut
from tandem.broker._weight import MOST_FREE, MOST_NUMBERS, check_weight

T = TypeVar("T")

MASKED = -100
"""In ``masks``, a position that is not trained."""
NO_LOGPROB = 1.0
"""In ``inference_logprobs``, a position that was not sampled."""

Real = Annotated[float, Meta(ge=-MOST, le=MOST)]
Logprob = Annotated[float, Meta(ge=LEAST_LOGPROB, le=MOST)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
MaskToken = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**53)]
Signed = Annotated[int, Meta(ge=-1, lt=2**53)]
Text = Annotated[str, Meta(max_length=4096)]


class RunParameters(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``POST /register``: what the trainer says of its run."""

    wandb_group: Text
    """Group of the run's charts; may be empty."""
    wandb_project: Text
    """Project of the run's charts; may be empty."""
    batch_size: Count
    """Sequences of one batch."""
    max_token_len: Signed
    """Most tokens of one sequence; zero or less: no limit."""
    checkpoint_dir: Text
    """Where the trainer keeps checkpoints; environments keep theirs beneath."""
    save_checkpoint_interval: Signed
    """Steps between checkpoints."""
    starting_step: Annotated[int, Meta(ge=0, lt=MOST_STEP)]
    """Steps trained already."""
    num_steps: Signed
    """Steps the run shall take."""


class Registered(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to ``POST /register``."""

    uuid: int
    """A number for this registration; no later call uses it."""


class EnvRegistration(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``POST /register-env``."""

    max_token_length: Annotated[int, Meta(ge=0, lt=2**53)]
    """Most tokens of its sequences; scales its weight."""
    desired_name: Text
    """Its name; a number is appended."""
    weight: Annotated[float, Meta(ge=0, le=MOST)]
    """Its share of the work against the others'."""
    group_size: Count
    """Sequences of its groups."""
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Least share of each batch, 0 to 1; null: none."""


class EnvAccepted(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to ``POST /register-env`` once the trainer has started."""

    status: str = "success"
    """success."""
    env_id: int
    """Its number from now on."""
    wandb_name: str
    """Its name with a number."""
    checkpoint_dir: str
    """The trainer's."""
    starting_step: int
    """The present step."""
    checkpoint_interval: int
    """The trainer's."""
    num_steps: int
    """The trainer's."""


class EnvName(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``GET /status-env`` and ``POST /disconnect-env``."""

    env_id: Annotated[int, Meta(ge=-(2**53), lt=2**53)]
    """The environment's number."""


class BatchName(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``POST /ack`` and ``POST /release``."""

    batch: Text
    """The leased batch."""


class Info(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to ``GET /info``; both -1 before a trainer registered."""

    batch_size: int
    """Sequences of one batch."""
    max_token_len: int
    """Most tokens of one sequence."""


class WandbInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to ``GET /wandb_info``; nulls before a trainer registered."""

    group: str | None
    """The run's group."""
    project: str | None
    """The run's project."""


class ScoredGroup(msgspec.Struct, kw_only=True):
    """A group on the wire: n sequences of one task in parallel lists, unpadded and unshifted.

    Of an optional list, null and ``[]`` both mean that it is absent.
    """

    tokens: list[list[Token]]
    """Prompt and completion ids of each sequence."""
    masks: list[list[MaskToken]]
    """``-100`` where a token is not trained, else the token."""
    scores: list[Real]
    """A reward per sequence."""
    advantages: list[list[Real]] | None = None
    """Per token."""
    ref_logprobs: list[list[Real]] | None = None
    """Per token, a reference model's."""
    messages: list[list[dict[str, Any]]] | None = None
    """Per sequence a chat, whose messages have role and content."""
    generation_params: dict[str, Any] | None = None
    """How it was sampled, such as ``{"temperature": 1.0}``."""
    inference_logprobs: list[list[Logprob]] | None = None
    """Per token, the behaviour policy's; 1.0 where nothing was sampled."""
    overrides: list[dict[str, Any]] | None = None
    """Per sequence: set_advantage_to_zero, temperature, sft."""
    group_overrides: dict[str, Any] | None = None
    """Per group: group_size, temperature, sft, and what Tandem adds: tandem_version, tandem_task, ..."""
    images: Any = None
    """Opaque."""
    env_id: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    """Who made it; null: anonymous."""
    distill_token_ids: list[list[list[Token]]] | None = None
    """Per sequence, position and rank: a teacher's tokens."""
    distill_logprobs: list[list[list[Real]]] | None = None
    """Their logprobs."""


FIELDS = tuple(field.name for field in msgspec.structs.fields(ScoredGroup))
"""The 14 keys of a group, in the order in which answers give them."""
_OPTIONAL = tuple(field.name for field in msgspec.structs.fields(ScoredGroup) if not field.required)
_NUMBERS = ("tokens", "masks", "scores", *REALS, "distill_token_ids", "distill_logprobs")
_LISTS = {name: FIELDS.index(name) for name in STAND_INS}
_KEYS = tuple(f'{"," if place else "{"}"{name}":'.encode() for place, name in enumerate(FIELDS))
WEIGH_BYTES = 1 << 20
"""Of groups above this the values are counted before any is made."""
LENIENT_BYTES, LENIENT_VALUES = 8 << 20, 4_000_000
"""Groups above this are not read again leniently, for which everything in them becomes a value."""
SKIM_BYTES = 40 << 10
"""Groups below this are decoded sooner than looked at by their bytes."""

# Each key's value as the bytes that were sent.
_Slices: Any = msgspec.defstruct("_Slices", [(name, msgspec.Raw | UnsetType, UNSET) for name in FIELDS])

# The same with absent told from null, and without room for unknown fields: what it takes can be kept as it came.
_Sent: Any = msgspec.defstruct(
    "_Sent",
    [(f.name, f.type | UnsetType, UNSET) for f in msgspec.structs.fields(ScoredGroup) if not f.required],
    bases=(ScoredGroup,),
    kw_only=True,
    forbid_unknown_fields=True,
)

_known: dict[Any, Any] = {}
_TO_JSON, _TO_MSGPACK = msgspec.json.Encoder(), msgspec.msgpack.Encoder()


def write(value: Any, encoding: Encoding = "json") -> bytes:
    """A message as bytes."""
    return _TO_JSON.encode(value) if encoding == "json" else _TO_MSGPACK.encode(value)


def read(body: bytes, kind: type[T], encoding: Encoding = "json") -> T:
    """A message from bytes, leniently.

    Raises:
        Malformed: it is none, or not of this type.
    """
    try:
        made: T = decoder(kind, encoding).decode(body)
    except (ValueError, RecursionError):
        made = msgspec.convert(coerce(plain(body, encoding), kind, _known), kind)
    return made


class Submission(msgspec.Struct, frozen=True):
    """A group that was accepted: what the broker needs to know of it, and the bytes to keep."""

    payload: bytes
    """The group with all 14 keys, in the encoding it came in. Every length agrees and every number is finite."""
    size: int
    """Sequences."""
    env_id: int | None
    """Who made it; None: anonymous."""
    version: int | None
    """Oldest policy step that sampled a token of it, if its maker said."""


def read_group(body: bytes, encoding: Encoding = "json") -> Submission:
    """A group from bytes.

    Args:
        body: one object.
        encoding: of the bytes.

    Returns:
        The group. Values stay byte for byte as sent, unless one had to be coerced.

    Raises:
        Malformed: a field is missing, of another type or not finite, or lengths disagree.
    """
    skimmed = _skimmed(body) if encoding == "json" and len(body) >= SKIM_BYTES else None
    return skimmed or _read_group(body, encoding)


def _read_group(body: bytes, encoding: Encoding) -> Submission:
    """The same with every number decoded: what decides where ``_skimmed`` does not."""
    if len(body) > WEIGH_BYTES:
        _weigh_all(body, encoding)
    try:
        group = decoder(_Sent, encoding).decode(body)
    except (ValueError, RecursionError) as error:
        if len(body) > LENIENT_BYTES:
            raise refuse("value_error", (), f"Value error, {error}") from None
        if len(body) > WEIGH_BYTES:
            check_weight(body, encoding, LENIENT_VALUES, "")
        group = _understood(body, encoding)
        return _checked(group, write(group, encoding))
    missing = [name for name in _OPTIONAL if getattr(group, name) is UNSET]
    for name in missing:
        setattr(group, name, None)
    return _checked(group, completed(body, missing, encoding))


def _weigh_all(body: bytes, encoding: Encoding) -> None:
    """Count the values of a large group, of which nothing is known, without making them.

    Raises:
        Malformed: there are too many, or it is no group at all.
    """
    try:
        slices = decoder(_Slices, encoding).decode(body)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{encoding}_invalid", (), f"Value error, {error}") from None
    _weigh({name: getattr(slices, name) for name in FIELDS}, encoding)


def _weigh(fields: Mapping[str, Any], encoding: Encoding) -> None:
    numbers, free = MOST_NUMBERS, MOST_FREE
    for name, raw in fields.items():
        if raw is UNSET:
            continue
        if name in _NUMBERS:
            numbers -= check_weight(raw, encoding, numbers, name)
        else:
            free -= check_weight(raw, encoding, free, name)


def _checked(group: ScoredGroup, payload: bytes) -> Submission:
    check(group)
    version = (group.group_overrides or {}).get("tandem_version")
    return Submission(payload=payload, size=len(group.tokens), env_id=group.env_id, version=version)


def _skimmed(body: bytes) -> Submission | None:
    """A group in JSON whose long lists are checked by their bytes; None if anything about it is unusual.

    Raises:
        Malformed: its lengths disagree, or a free field holds what it may not.
    """
    found = cut(body)
    if found is None:
        return None
    try:
        slices = decoder(_Slices, "json").decode(found.rest)
    except (ValueError, RecursionError):
        return None
    values: list[bytes | memoryview] = [b"null" if raw is UNSET else bytes(raw) for raw in astuple(slices)]
    if len(body) > WEIGH_BYTES:
        _weigh({name: values[place] for place, name in enumerate(FIELDS) if name not in found.lists}, "json")
    light = list(values)
    for name, place in _LISTS.items():
        if name in found.lists and values[place] == STAND_INS[name]:  # nowhere else is one: this is that list
            values[place], light[place] = found.lists[name], b"[]"
        elif name in found.lists or values[place] not in (b"null", b"[]"):
            return None
    try:
        group: ScoredGroup = decoder(ScoredGroup, "json").decode(_object(light))
    except (ValueError, RecursionError):
        return None
    for name, rows in found.rows.items():
        setattr(group, name, rows)  # all that is looked at is how long they are
    return _checked(group, _object(values))


def _object(values: Sequence[bytes | memoryview]) -> bytes:
    """A JSON object of the values of all keys, which are JSON already."""
    return b"".join((*chain.from_iterable(zip(_KEYS, values, strict=True)), b"}"))


def _understood(body: bytes, encoding: Encoding) -> ScoredGroup:
    """A group that has unknown fields, or that says things in other words."""
    try:
        group: ScoredGroup = decoder(ScoredGroup, encoding).decode(body)
    except (ValueError, RecursionError):
        fields = coerce(flat_advantages(plain(body, encoding)), ScoredGroup, _known)
        group = msgspec.convert(fields, ScoredGroup)
    return group


def read_groups(body: bytes, encoding: Encoding = "json", *, most: int = 10_000) -> list[Submission]:
    """A list of at most ``most`` groups from bytes, all or none.

    Raises:
        Malformed: one of them cannot be accepted; its place leads the problem's.
    """
    try:
        raws = decoder(list[msgspec.Raw], encoding).decode(body)
    except (ValueError, RecursionError) as error:
        if len(body) <= WEIGH_BYTES:
            coerce(plain(body, encoding), list[Any], _known)  # says what is wrong
        raise refuse("list_type", (), f"Input should be a valid list, {error}") from None
    if len(raws) > most:
        raise refuse("too_long", (), f"List should have at most {most} groups", len(raws))
    made = []
    for place, raw in enumerate(raws):
        try:
            made.append(read_group(bytes(raw), encoding))
        except Malformed as error:
            for one in error.problems:
                one.loc.insert(1, place)
            raise Malformed(error.problems) from None
    return made


def encoding_of(payload: bytes) -> Encoding:
    """Which encoding a stored group is in: JSON objects begin with a brace, MessagePack maps never do."""
    return "json" if payload[:1] == b"{" else "msgpack"


def recode(payload: bytes, encoding: Encoding) -> bytes:
    """A stored group in the encoding that is asked for, whatever bounds held when it was taken: its reader judges."""
    found = encoding_of(payload)
    return payload if found == encoding else write(decoder(Any, found).decode(payload), encoding)


def write_batch(payloads: Sequence[bytes] | None, encoding: Encoding = "json", lease: Any = None) -> bytes:
    """Answer to ``GET /batch``.

    Args:
        payloads: stored groups, each already in the encoding; None: there is no batch.
        encoding: of the answer.
        lease: what a trainer that asked for a lease is told beside the groups, under the key ``tandem``.
    """
    if payloads is None:
        return write({"batch": None}, encoding)
    if encoding == "json":
        extra = b"" if lease is None else b',"tandem":' + write(lease)
        return b"".join((b'{"batch":[', b",".join(payloads), b"]", extra, b"}"))
    head = b"\x81" if lease is None else b"\x82\xa6tandem" + write(lease, encoding)
    return b"".join((head, b"\xa5batch\xdd", len(payloads).to_bytes(4, "big"), *payloads))
