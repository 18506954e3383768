"""Fixtures of every test: fixed threads, no network, a tiny random model with its tokenizer."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tandem import machine

# Read by torch, tokenizers and the hub when they load; child processes inherit them. More threads would only
# add noise: the models of these tests are tiny, and sums over a fixed number of threads are repeatable.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
# Else the first compilation of a process starts others to compile in, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

EXAMPLES = {"default": 50, "long": 100}
"""How many examples a property is looked at with, by profile; ``tiers.examples`` for those that want more or fewer."""
for name, number in EXAMPLES.items():
    hypothesis.settings.register_profile(
        name, max_examples=number, derandomize=True, deadline=None, print_blob=True, database=None
    )
hypothesis.settings.load_profile("default")

# A shell without job control starts what runs in the background with SIGINT ignored, and processes that tests end by
# Ctrl-C would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROOT = Path(__file__).parent
FAST = tuple(ROOT / name for name in ("unit", "contract", "house", "wire"))
"""Folders of the fast tier, which is what they hold less what is marked ``slow`` or ``long``."""

SCRATCH = pytest.StashKey[str]()
"""Folder of a session's temporary files."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The tiers: ``--quick`` is the fast one, ``--long`` is everything, neither is all but what is marked ``long``."""
    parser.addoption("--quick", action="store_true", help="the fast tier alone: no test marked slow, no integration")
    parser.addoption("--long", action="store_true", help="also tests marked long; fuzz and kill for minutes")
    parser.addoption("--golden", action="store_true", help="write tests/unit/compat_golden.json anew")


def pytest_configure(config: pytest.Config) -> None:
    """A run has one tier; properties have all their examples in the long one."""
    if config.getoption("--quick") and config.getoption("--long"):
        raise pytest.UsageError("--quick and --long are two tiers: give one of them")
    if config.getoption("--long"):
        hypothesis.settings.load_profile("long")
    if not hasattr(config, "workerinput"):
        # Processes that tests kill leave their temporary files. pytest's own folders stay where it puts them.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        # What torch compiled stays too: it halves the time of its tests in the next session.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "tandem-tests-compiled"))
        os.environ["TMPDIR"] = config.stash[SCRATCH] = tempfile.mkdtemp(prefix="tandem-tests-")
        tempfile.tempdir = None  # it is read once


def pytest_unconfigure(config: pytest.Config) -> None:
    """The session's temporary files go with it."""
    if SCRATCH in config.stash:
        shutil.rmtree(config.stash[SCRATCH], ignore_errors=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, from which modules may be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether ``--long`` was given."""
    return bool(request.config.getoption("--long"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tier does not import what is outside its folders."""
    if not config.getoption("--quick") or ROOT not in collection_path.parents:
        return None
    return None if any(folder in (collection_path, *collection_path.parents) for folder in FAST) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of the tier, and put files with slow tests first.

    Processes that share a suite must call a test by one name, and an object's address is another in each. Slow files
    come first so that at the end no process is left alone with one.
    """
    if wrong := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{wrong[0]} is named by an object's address; give its parameters ids=")
    others = {item for item in items if not _is_of_the_tier(item, config)}
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = [item for item in items if item not in others]
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("long")}
        items.sort(key=lambda item: item.path not in slow)


TOGETHER = (
    # fork ranks
    ("unit", ("context_parallel", "rank_slices", "sharded_weights", "sharing")),
    # import torch's compiler
    ("unit", ("adapted", "layers", "layers_whole", "logprobs")),
)
"""Folders and files of them that one process of a shared session has all of, for what each process imports for seconds.

With ``--long`` they are shared out, as there the tests themselves take longer by far.
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As ``--dist loadfile``, with files together that are to be."""
    if config.getoption("dist") != "loadfile" or config.getoption("--long"):
        return None
    from xdist.scheduler import LoadFileScheduling

    first = {f"{folder}/test_{name}.py": f"{folder}/{names[0]}" for folder, names in TOGETHER for name in names}

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return first.get("/".join(Path(file).parts[-2:]), file)

    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Libraries and tests are a million objects that stay: no collection looks through them, now or in a run."""
    with machine.importing():
        return (yield)


def _is_of_the_tier(item: pytest.Item, config: pytest.Config) -> bool:
    if config.getoption("--long"):
        return True
    left_out = ("slow", "long") if config.getoption("--quick") else ("long",)
    return not any(item.get_closest_marker(name) for name in left_out)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without a default system prompt."""


def build_tiny_model(folder: Path, *, seed: int = 0, tie: bool = True, context: int = 1024, head_dim: int = 16) -> Path:
    """Write a random float32 Llama (2 layers, hidden 64, 4 heads, 2 of them keys) with a byte-level tokenizer.

    Its 259 tokens are the 256 bytes, ``<|im_start|>``, ``<|im_end|>`` (end) and ``<|pad|>``: any text round-trips.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer(context)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context,
        initializer_range=0.1,  # wide enough that the next-token distribution is not uniform
        tie_word_embeddings=tie,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_tokenizer(context: int):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model and its tokenizer, as ``from_pretrained`` takes it. Never write into it."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def template(tiny_model: Path):  # type: ignore[no-untyped-def]
    """The tiny model's chat template."""
    from transformers import AutoTokenizer

    from tandem.rollout.template import Template

    return Template(AutoTokenizer.from_pretrained(tiny_model), {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeat what ``scripts/test`` found before the tests, so that it is not scrolled away."""
    if failed := os.environ.get("TANDEM_FAILED_CHECKS"):
        terminalreporter.section("checks that failed before the tests", red=True)
        terminalreporter.line(failed)
