"""How Tandem publishes to vLLM, family by family; run by the engine's interpreter on folders of tiny models.

Each folder is loaded, sampled from and written to by a process of its own: what ends one ends no other. They are forked
from this one, which has imported vLLM. What was seen lies in a folder's ``seen.json``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TANDEM_IN_PLACE": "1"}
AS_TEXT = {"hf_overrides": {"architectures": ["TransformersForCausalLM"]}}
"""What has vLLM run a model of images as one of text, for which its processors need not be there."""
EXACT = 1e-2
"""Most by which a logprob in float32 may differ from transformers'; in bfloat16, by whole steps of its own, 0.5."""
SECONDS = 600
"""Of one family, at most."""


def main(folders: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    # Before the first fork, for all.
    import vllm.model_executor.models.transformers
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import tandem.engines.vllm.worker.extension  # noqa: F401

    for folder in map(Path, folders):
        for dtype in ("float32", "bfloat16"):  # some kernels have the second alone
            if _apart(folder, dtype):
                break


def _apart(folder: Path, dtype: str) -> bool:
    """Look at a family in a process of its own; whether vLLM runs it."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        log = os.open(folder / f"{dtype}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            seen = _seen(folder, dtype)
        except BaseException as error:
            traceback.print_exc()
            missing = re.findall(r"ModuleNotFoundError: .*", (folder / f"{dtype}.log").read_text())
            seen = {"fails": missing[-1] if missing else f"{type(error).__name__}: {error}"}
        (folder / "seen.json").write_text(json.dumps(seen))
        os._exit("fails" in seen)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        (folder / "seen.json").write_text(json.dumps({"fails": f"ended by signal {os.WTERMSIG(status)}"}))
    return status == 0


def _seen(folder: Path, dtype: str) -> dict[str, Any]:
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    from tandem.engines.vllm.worker.extension import WorkerExtension
    from tandem.engines.vllm.worker.parameter_map import share
    from tandem.errors import EngineError

    registry._run_in_subprocess = lambda look: look()  # this process is one already
    has_images = "text_config" in json.loads((folder / "model/config.json").read_text())
    llm = LLM(
        str(folder / "model"),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,  # it would keep what older weights made
        **(AS_TEXT if has_images else {}),
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
    )
    prompt, *expected = json.loads((folder / "expected.json").read_text())

    def far(logprobs: list[float]) -> float:
        sampling = SamplingParams(prompt_logprobs=0, max_tokens=2, detokenize=False)
        (answer,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        theirs = [place[token].logprob for place, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)]
        return max(abs(a - b) for a, b in zip(theirs, logprobs, strict=True))

    seen = {"dtype": dtype, "started": far(expected[0])}
    if seen["started"] > (EXACT if dtype == "float32" else 0.5):
        return {"fails": f"it computes something else: logprobs are {seen['started']:.1g} from transformers'"}
    try:
        llm.collective_rpc("tandem_export_weights")
        (places,) = llm.collective_rpc("tandem_places")
    except EngineError as error:
        return {**seen, "refused": str(error)}
    for name, tensor in load_file(folder / "new.safetensors").items():
        for place in places[name]:
            place.tensor.copy_(share(tensor.to(place.tensor.dtype), place))
    stale = llm.collective_rpc("tandem_checksums")
    llm.collective_rpc("tandem_derive")
    derived = llm.collective_rpc("tandem_checksums")
    return {**seen, "derives": stale != derived, "published": far(expected[1])}


if __name__ == "__main__":
    main(sys.argv[1:])
