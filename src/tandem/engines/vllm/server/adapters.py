"""LoRA adapters of a live engine: one that is overwritten in place, and any number that are swapped by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.protocol import IN_PLACE, Refusal
from tandem.engines.vllm.server.frontend import Frontend

FOLDERS = "TANDEM_ADAPTER_FOLDERS"
"""Environment variable: folders, separated as in PATH, that adapters may be loaded from."""
IN_PLACE_ID = 1_000_000
"""Id of the adapter that is written in place; vLLM counts its own from 1."""


class Adapters:
    """LoRA adapters of the engine: the /lora/* routes, and lookup by name for /generate."""

    def __init__(self, frontend: Frontend, state: Any):
        self._frontend = frontend
        self._state = state
        self._loaded: dict[str, Any] = {}
        self.in_place: Any = None

    async def export_adapter(self, request: wire.ExportAdapter) -> list[Any]:
        """Give the adapter in place a slot and lend it to be written now; what each rank answers.

        It is taken to hold what no trainer has stamped yet.
        """
        self.require_enabled()
        arguments = json.dumps(request.config), json.dumps(request.tensors)
        ranks = await self._frontend.rpc("tandem_export_adapter", IN_PLACE_ID, *arguments)
        self._frontend.written = True
        self.written()
        return [json.loads(text) for text in ranks]

    def written(self) -> None:
        """The adapter in place holds values: requests use it once its step is stamped, those to /v1 as a model."""
        from vllm.lora.request import LoRARequest

        self.in_place = LoRARequest(lora_name=IN_PLACE, lora_int_id=IN_PLACE_ID, lora_path="in-memory")
        self._state.openai_serving_models.lora_requests[IN_PLACE] = self.in_place

    def require_enabled(self) -> None:
        """Raise Refusal unless the engine was started with LoRA."""
        if self._frontend.client.vllm_config.lora_config is None:
            raise Refusal(409, "this engine was started without adapters; start it with trainable: lora in the recipe")

    def named(self, name: str) -> Any:
        """The request object of a loaded adapter.

        Raises:
            Refusal: there is none of that name.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name == IN_PLACE and self.in_place is not None:
            return self.in_place
        raise Refusal(404, f"there is no adapter {name!r}; loaded: {', '.join(self._loaded) or 'none'}")

    async def status(self, _: None) -> Any:
        """GET /lora/status."""
        served = self._frontend.adapter
        return {
            "enabled": self._frontend.client.vllm_config.lora_config is not None,
            "served": served.lora_name if served else None,
            "loaded": [{"name": r.lora_name, "id": r.lora_int_id, "path": r.lora_path} for r in self._loaded.values()],
            "in_place": self.in_place is not None,
        }

    async def load(self, request: wire.LoadAdapter) -> Any:
        """POST /lora/load: a PEFT folder becomes an adapter by name; served at once where no trainer stamps steps."""
        self.require_enabled()
        folder = allowed(request.adapter_path)
        name = request.adapter_name or folder.name
        require_free_name(name)
        if name in self._loaded:
            raise Refusal(409, f"there is an adapter {name!r} already: give a new version a new name, or unload it")
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        models = self._state.openai_serving_models  # vLLM's own list, so that /v1 knows the name too
        answer = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=str(folder)))
        if not isinstance(answer, str):
            raise Refusal(400, f"vLLM refuses the adapter in {folder}: {answer.error.message}")
        self._loaded[name] = models.lora_requests[name]
        if request.served and self._frontend.step < 0:  # no trainer stamps versions: what was loaded last is served
            self._frontend.adapter = self._loaded[name]
        return {"status": "ok", "adapter_name": name, "id": self._loaded[name].lora_int_id}

    async def unload(self, request: wire.UnloadAdapter) -> Any:
        """POST /lora/unload."""
        loaded = [*self._loaded, *([] if self.in_place is None else [IN_PLACE])]
        names = loaded if request.adapter_name is None else [request.adapter_name]
        if request.unless_used:
            names = [name for name in names if not self._frontend.places.users[name]]
        for name in names:
            lora_request = self.named(name)
            self._frontend.forget(lora_request)
            self._loaded.pop(name, None)
            self._state.openai_serving_models.lora_requests.pop(name, None)
            if name == IN_PLACE:
                self.in_place = None
                await self._frontend.rpc("tandem_forget", IN_PLACE_ID)
            else:
                await self._frontend.client.remove_lora(lora_request.lora_int_id)
        return {"status": "ok", "unloaded": names}


def require_free_name(name: str) -> None:
    """Raise Refusal where loading an adapter of this name would replace the one that is trained."""
    if name == IN_PLACE:
        raise Refusal(409, f"the name {IN_PLACE!r} is kept for the adapter that is written in place")


def allowed(path: str) -> Path:
    """The folder, links resolved, if it and all its files are within one that adapters may come from.

    Raises:
        Refusal: they are not, or it holds no adapter.
    """
    places = [Path(place).resolve() for place in os.environ.get(FOLDERS, "").split(os.pathsep) if place]
    folder = Path(path).resolve()
    for file in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        if not path or not any(file.resolve().is_relative_to(place) for place in places):
            known = ", ".join(map(str, places)) or f"none; name some in {FOLDERS}"
            raise Refusal(403, f"adapters may not be loaded from {path!r} ({file.resolve()}); allowed folders: {known}")
    if not (folder / "adapter_config.json").is_file():
        raise Refusal(404, f"{path!r} is no adapter: it holds no adapter_config.json")
    return folder
