"""An Axolotl file as checked options, and the recipe that is made of it; every value knows its line of the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tandem.config.registry import did_you_mean
from tandem.config.tree import Branch, Items, Leaf, Problems, from_plain, plain
from tandem.types import Json
from tandem_compat.axolotl.options import DATASET, GROUPS
from tandem_compat.sharding import Sharding
from tandem_compat.table import ForeignOption, Reader


class AxolotlRecipe(Reader):
    """Options by path, such as ``trl.beta``, and the recipe made of them so far.

    What is null or mistaken in the file is not among the options.
    """

    updates = "trl.num_iterations"

    def __init__(self, file: Branch, problems: Problems, *, serving: bool) -> None:
        """Read the whole file.

        Args:
            file: as it was parsed.
            problems: where mistakes go.
            serving: True if an engine alone is to be started.
        """
        rows = {f"{group}.{name}".lstrip("."): row for group, rows in GROUPS.items() for name, row in rows.items()}
        super().__init__(rows, problems)
        self.file = file
        self.plain: Any = plain(file)
        """The file's options as plain data, as transforms are given them."""
        self.serving = serving
        self.sharding = Sharding(shard="states")
        self.ranks = 1
        self.batches = 1
        self.tree = Branch(where=file.where)
        self.places: dict[str, str] = {}
        self._read_branch("", file, GROUPS[""])
        for group in ("trl", "vllm"):
            if isinstance(branch := file.entries.get(group), Branch):
                self._read_branch(f"{group}.", branch, GROUPS[group])
        for name in ("datasets", "test_datasets"):
            entries = file.entries.get(name)
            for number, entry in enumerate(entries.items if isinstance(entries, Items) else ()):
                if isinstance(entry, Branch):
                    self._read_branch(f"{name}[{number}].", entry, DATASET)
                else:
                    problems.add(entry.where, f"{name}: each entry must be a mapping with path and type")

    def _read_branch(self, prefix: str, branch: Branch, rows: Mapping[str, ForeignOption]) -> None:
        for name, tree in branch.entries.items():
            path, place = prefix + name, branch.key_where[name]
            if isinstance(tree, Leaf) and tree.value is None:
                continue
            if name not in rows:
                self.problems.add(place, f"{path} is no option of Axolotl's that Tandem knows{_meant(name, rows)}")
                continue
            self.places[path] = place
            self.table[path] = rows[name]
            self.read(path, plain(tree))

    def wrong(self, name: str, message: str) -> None:
        """Note a mistake."""
        self.problems.add(self.places.get(name, self.file.where), f"{name}: {message}")

    def put(self, path: str | tuple[str, ...], value: Json, *options: str) -> None:
        """Set an option of the recipe, said to be where the first of these options of the file is written."""
        *words, last = path.split(".") if isinstance(path, str) else path
        where = next((self.places[option] for option in options if option in self.places), "")
        where = where or (f"{self.file.where}: {options[0]}" if options else self.file.where)
        branch = self.tree
        for word in words:
            inner = branch.entries.get(word)
            if not isinstance(inner, Branch):
                inner = Branch(where=where)
                branch.put(word, inner, where)
            branch = inner
        branch.put(last, from_plain(value, where), where)

    @property
    def completions(self) -> int:
        """Those that one step trains on, of all ranks."""
        return int(self["micro_batch_size"] * self["gradient_accumulation_steps"]) * self.batches

    @property
    def generated(self) -> int:
        """Steps whose completions are sampled together, before the first of them is trained."""
        return max(1, int(self.get("trl.generation_batch_size", 1)) // self.completions)

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine, at least 1; that the file says no less is checked with the engine's options."""
        return max(1, int(self.get("vllm.tensor_parallel_size", 1)))

    @property
    def asynchronous(self) -> bool:
        """True if Axolotl would train with its asynchronous trainer, which has defaults of its own."""
        return bool(self["trl.use_data_producer"] or self["trl.async_prefetch"])

    def every(self, option: str, by_epoch: str, steps: int) -> int:
        """Steps from one time to the next of something that the file wants every so many steps; 0: never.

        Below 1 it is a share of the run's ``steps``, as transformers takes it, and so is what is wanted so often
        ``by_epoch``, as Axolotl hands it on.
        """
        if often := self.get(by_epoch, 0):
            times: float = often * self["num_epochs"]
            return math.ceil(steps / max(1.0, times))
        return self.interval(option, steps)


def _meant(name: str, rows: Mapping[str, ForeignOption]) -> str:
    """A hint at the option that was meant, which may stand in another group."""
    paths = [f"{group}.{name}".lstrip(".") for group, others in GROUPS.items() if name in others]
    return did_you_mean(name, rows) or (f"; write it as {paths[0]}" if paths else "; leave it out")
