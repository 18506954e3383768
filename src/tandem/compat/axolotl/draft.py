"""An Axolotl file as checked options, and the recipe that is made of it option by option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tandem.compat.axolotl.options import DATASET, GROUPS, TOP, TRL, VLLM
from tandem.compat.table import FILE, ForeignOption, Reader
from tandem.config.registry import did_you_mean
from tandem.config.tree import Branch, Items, Leaf, Problems, from_plain, plain
from tandem.types import Json


class AxolotlFile(Reader):
    """Options by path, such as ``trl.beta``; what is null, mistaken, idle or refused is not among them."""

    def __init__(self, tree: Branch, problems: Problems) -> None:
        """Read the whole file.

        Args:
            tree: as it was parsed.
            problems: where mistakes go.
        """
        super().__init__({}, problems, FILE)
        self.tree = tree
        self.places: dict[str, str] = {}
        self._read_branch("", tree, TOP)
        for group, options in (("trl", TRL), ("vllm", VLLM)):
            branch = tree.entries.get(group)
            if isinstance(branch, Branch):
                self._read_branch(f"{group}.", branch, options)
        for name in ("datasets", "test_datasets"):
            entries = tree.entries.get(name)
            for number, entry in enumerate(entries.items if isinstance(entries, Items) else ()):
                if isinstance(entry, Branch):
                    self._read_branch(f"{name}[{number}].", entry, DATASET)
                else:
                    problems.add(entry.where, f"{name}: each entry must be a mapping with path and type")

    def where(self, *paths: str) -> str:
        """Where the first of these options that is written is, or else the file and the name of the first."""
        written = next((self.places[path] for path in paths if path in self.places), None)
        return written or (f"{self.tree.where}: {paths[0]}" if paths else self.tree.where)

    def wrong(self, name: str, message: str) -> None:
        """Note a mistake."""
        self.problems.add(self.places.get(name, self.tree.where), f"{name}: {message}")

    def _read_branch(self, prefix: str, branch: Branch, options: Mapping[str, ForeignOption]) -> None:
        for name, tree in branch.entries.items():
            path, place = prefix + name, branch.key_where[name]
            if isinstance(tree, Leaf) and tree.value is None:
                continue
            if name not in options:
                self.problems.add(place, f"{path} is no option of Axolotl's that Tandem knows{_meant(name, options)}")
                continue
            self.places[path] = place
            self.table[path] = replace(options[name], name=path)
            self.read(path, plain(tree))
            if path in self.values and not self.settle(path):
                del self.values[path]


def _meant(name: str, options: Mapping[str, ForeignOption]) -> str:
    """A hint at the option that was meant, which may stand in another group."""
    if hint := did_you_mean(name, options):
        return hint
    homes = [group for group, others in GROUPS.items() if name in others]
    return f"; it belongs {f'in {homes[0]}' if homes[0] else 'to the top level'}" if homes else "; leave it out"


@dataclass(kw_only=True)
class Draft:
    """A recipe in the making."""

    file: AxolotlFile
    """What it is made of."""
    serving: bool
    """True if an engine alone is to be started."""
    tree: Branch = field(default_factory=lambda: Branch(where=""))
    """As far as it is made."""

    def put(self, path: str | tuple[str, ...], value: Json, *options: str) -> None:
        """Set an option of the recipe, said to be where the first of these options of the file is written."""
        words = path.split(".") if isinstance(path, str) else list(path)
        where = self.file.where(*options)
        branch = self.tree
        for word in words[:-1]:
            inner = branch.entries.get(word)
            if not isinstance(inner, Branch):
                inner = Branch(where=where)
                branch.put(word, inner, where)
            branch = inner
        branch.put(words[-1], from_plain(value, where), where)

    def copy(self, option: str, path: str) -> None:
        """Hand an option on as it is, if it is set."""
        if option in self.file:
            self.put(path, self.file.get(option), option)

    @property
    def plain(self) -> dict[str, Json]:
        """The file's options as plain data, as transforms are given them."""
        data = plain(self.file.tree)
        assert isinstance(data, dict)
        return data

    @property
    def updates(self) -> int:
        """Optimizer updates of one step; Axolotl counts each as a step."""
        iterations: int = self.file.get("trl.num_iterations", 1)
        return max(1, iterations)

    @property
    def completions(self) -> int:
        """Those that one step trains on."""
        size: int = self.file.get("micro_batch_size", 1) * self.file.get("gradient_accumulation_steps", 1)
        return size

    @property
    def generated(self) -> int:
        """Steps whose completions are sampled together, before the first of them is trained."""
        batch: int = self.file.get("trl.generation_batch_size", self.completions)
        return max(1, batch // max(1, self.completions))

    def per_step(self, count: float) -> int:
        """A number of Axolotl's steps as Tandem's."""
        return max(1, math.ceil(count / self.updates)) if count > 0 else 0

    def every(self, option: str, by_epoch: str, steps: int) -> int:
        """Steps from one time to the next of something that the file wants every so many steps; 0: never.

        Below 1 it is a share of the run's ``steps``, as transformers takes it, and so is what is wanted so often
        ``by_epoch``, as Axolotl hands it on.
        """
        asked: float = self.file.get(option, 0)
        if often := self.file.get(by_epoch, 0):
            if often < 0:
                self.file.wrong(by_epoch, f"expected how often in an epoch, got {often:g}")
            if option in self.file:
                self.file.wrong(by_epoch, f"Axolotl takes it or {option}, not both; leave one of them out")
            times: float = often * self.file.get("num_epochs", 1)
            return math.ceil(steps / max(1.0, times))
        if asked < 0 or (asked > 1 and asked != int(asked)):
            self.file.wrong(option, f"expected a number of steps, or a share of all below 1, got {asked:g}")
        return math.ceil(asked * steps) if 0 < asked < 1 else self.per_step(asked)
