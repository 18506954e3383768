"""The policy: one causal language model that both the trainer and an in-process engine run, and its tokenizer."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tandem import clone, hub
from tandem.errors import ConfigError
from tandem.machine import cores, keep_few_kernels
from tandem.model import packing as packings
from tandem.model.attention import Packed, Plan, sequential_positions
from tandem.model.compilation import Compile
from tandem.model.logprobs import LogitEnd, token_logprobs
from tandem.model.packing import Packing
from tandem.observability import waits

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """A thread that runs one function at a time, for an actor that waits for it."""

    def __init__(self, name: str, *, actor: str, initializer: Callable[[], None] | None = None):
        self._name, self._actor = name, actor
        self._pool = ThreadPoolExecutor(1, name, initializer=initializer)

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` there and await its result."""
        loop = asyncio.get_running_loop()
        reason = getattr(function, "__qualname__", type(function).__name__)
        async with waits.waiting(waits.actor(self._actor), reason, on=f"{self._name} thread"):
            return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Let the current call finish and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Compute(WorkerThread):
    """The thread on which all tensor work runs.

    Engine steps and training passes take turns on it: on a CPU two threads of products would only fight for
    the same cores, and on one device nothing is ever sampled while weights are being written.
    """

    def __init__(self, threads: int = 0):
        self.threads = threads or cores()
        keep_few_kernels()
        # By default the event loop waits 5 ms for this thread to leave Python, and engines stand still meanwhile.
        sys.setswitchinterval(0.001)
        super().__init__("compute", actor="trainer", initializer=self._begin)

    def _begin(self) -> None:
        torch.set_num_threads(self.threads)  # here: OpenMP has a count for each calling thread
        # The compiler's workers inherit this. One that a scheduler ended, with the whole run, would be waited for.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


class Policy:
    """Model, tokenizer and the thread they run on; ``compile`` is for the arithmetic of logprobs."""

    def __init__(self, model: nn.Module, tokenizer: Any, *, name: str, compute: Compute, compile: Compile = False):
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.compute = compute
        self.compile = compile

    @property
    def causal(self) -> Any:
        """The transformers model itself, adapters injected but unwrapped."""
        return getattr(self.model, "get_base_model", lambda: self.model)()

    @property
    def config(self) -> Any:
        """The transformers configuration of the text model."""
        return self.causal.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.head.weight.dtype

    @property
    def head(self) -> nn.Linear:
        """Hidden states to logits."""
        head: nn.Linear = self.causal.get_output_embeddings()
        return head

    @cached_property
    def end(self) -> LogitEnd | None:
        """What the model does to its head's logits."""
        return packings.compared(self.causal.config).end

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits of last hidden states, float32."""
        logits = self.head(hidden).float()
        return logits if self.end is None else self.end(logits)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""
        ids: set[int] = set()
        for value in (self.causal.generation_config.eos_token_id, getattr(self.tokenizer, "eos_token_id", None)):
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        return frozenset(ids)

    def take_part(self) -> Tensor | None:
        """Take part in a pass of other ranks, which need nothing of this one where weights are whole."""
        return None

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor, plan: Plan) -> Tensor:
        """Last hidden states, (B, T, hidden size)."""
        return packings.hidden(self.causal, tokens_BT, positions_BT, plan)

    def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token but the first given those before it, as the trainer computes it.

        All are NaN where a token is none of the model's: on a GPU, to look one up would end the process.
        """
        return self.scores(tokens, temperature)[0]

    def scores(self, tokens: Sequence[int], *temperatures: float) -> list[list[float]]:
        """The same at several temperatures, by one pass."""
        logprobs_of_rows, vocabulary = list[Tensor](), self.head.weight.shape[0]
        if not all(0 <= token < vocabulary for token in tokens):
            return [[math.nan] * (len(tokens) - 1) for _ in temperatures]
        plan = Packed(lengths=(len(tokens) - 1,), parents=(None,))
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.tensor(sequential_positions(plan), device=self.device)
        with torch.no_grad():
            hidden = self.hidden(ids[None, :-1], positions[None], plan)[0]
            weight, bias = self.head.weight, self.head.bias  # of a model that is cut, whole from here on
            for temperature in temperatures:
                how: dict[str, Any] = {"bias": bias, "end": self.end, "compile": self.compile}
                logprobs_of_rows.append(token_logprobs(hidden, weight, ids[1:], temperature, **how)[0])
            rows: list[list[float]] = torch.stack(logprobs_of_rows).tolist()
        return rows

    def close(self) -> None:
        """End its thread."""
        self.compute.close()


def load_tokenizer(name: str, *, chat_template: str | None = None) -> Any:
    """Tokenizer of a hub id or folder.

    Raises:
        ConfigError: there is none, or it has no chat template and none was given.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **_options(name))
    except (OSError, ValueError) as error:
        raise ConfigError(_missing(name, "tokenizer", error)) from error
    if chat_template:
        # A path where there is such a file, the template itself otherwise.
        is_file = "\n" not in chat_template and "{" not in chat_template
        if is_file and not Path(chat_template).is_file():
            raise ConfigError(f"chat_template: there is no file {chat_template!r}, and it is no Jinja template either")
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8") if is_file else chat_template
    if tokenizer.chat_template is None:
        raise ConfigError(f"model {name!r} has no chat template; give one with chat_template: (Jinja text or a path)")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name!r} has no end-of-sequence token; set eos_token in its config")
    return tokenizer


def load_config(name: str) -> Any:
    """transformers configuration of a hub id or folder.

    Raises:
        ConfigError: there is none, or transformers has no language model for it.
    """
    try:
        config = AutoConfig.from_pretrained(name, **_options(name))
    except (OSError, ValueError) as error:
        raise ConfigError(_missing(name, "configuration", error)) from error
    packings.causal_class(config)
    return config


def most_positions(config: Any) -> int:
    """Most tokens that a model of this (text) configuration was made for; one without positions has no limit."""
    names = ("max_position_embeddings", "model_max_length", "n_positions", "max_seq_len", "seq_length")
    return next((int(most) for name in names if (most := getattr(config, name, None))), 1 << 20)


def load_model(name: str, *, dtype: torch.dtype, device: torch.device, packing: Packing = "auto") -> Any:
    """Weights of a hub id or folder, with Tandem's attention where packed rows are computed as trees.

    Raises:
        ConfigError: they cannot be read, some of the model's weights are missing from the folder, or its logits would
            be computed wrongly.
    """
    disable_progress_bar()  # our own console is on the same terminal
    try:
        # loading reports what was not found instead of leaving random weights unnoticed
        config = load_config(name)
        attention = packings.attention(config, packing)
        loaded: Any = packings.causal_class(config).from_pretrained(
            name, dtype=dtype, output_loading_info=True, **attention, **_options(name)
        )
        model, info = loaded
    except (SafetensorError, UnpicklingError, EOFError) as error:
        why = str(error).partition(". ")[0] or "it is empty"  # what follows advises to run what the file says
        raise ConfigError(f"a weights file of model {name!r} is damaged ({why}); fetch the model again") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(_missing(name, "weights", error)) from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"model {name!r} lacks {len(missing)} weights, first {missing[0]}; is the folder complete?")
    return model.to(device).eval()


def _options(name: str) -> dict[str, bool]:
    """How everything of a model is read: without its repository's code, about which transformers would ask."""
    return {"local_files_only": _kept_only(name), "trust_remote_code": False}


def _kept_only(name: str) -> bool:
    """True for a hub id while the hub is away: then only what is kept on this machine is looked at."""
    return not Path(name).is_dir() and bool(hub.away())


def _missing(name: str, what: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        message = f"the {what} of model {name!r} needs code from its repository (trust_remote_code)"
        return f"{message}, and Tandem runs none; use a model whose architecture is in transformers"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local and not Path(name).expanduser().is_dir():
        remedy = clone.where(name) or "; give a Hugging Face folder or a hub id such as Qwen/Qwen3-0.6B"
        return f"model folder {name!r} does not exist; relative paths start at {Path.cwd()}{remedy}"
    if _kept_only(name):
        return f"the {what} of model {name!r} is not on this machine, and {hub.away()}; name a local copy: model=FOLDER"
    return f"the {what} of model {name!r} cannot be read: {first}"
