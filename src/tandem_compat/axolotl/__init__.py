"""Axolotl's files with ``rl: grpo`` or ``gdpo``, read as recipes wherever a recipe is read.

``options`` lists every option. One that would change the result and cannot be had is refused with the reason,
one that cannot matter is told to change nothing; none is accepted and ignored.
"""

from __future__ import annotations

import os

from tandem.config.dialects import Translated
from tandem.config.tree import Branch, Leaf, Problems
from tandem_compat.axolotl.recipe import AxolotlRecipe
from tandem_compat.axolotl.rules import make


def translate(tree: Branch, serving: bool, problems: Problems) -> Translated:
    """The recipe that an Axolotl file comes to.

    Args:
        tree: the file.
        serving: True if the engine alone is to be started, as by ``axolotl vllm-serve``.
        problems: where mistakes go; with any, what is returned is no whole recipe.
    """
    method = tree.entries.get("rl")
    if not isinstance(method, Leaf) or method.value not in ("grpo", "gdpo"):
        where = method.where if method else tree.where
        problems.add(where, "this is an Axolotl file, and of those Tandem trains the ones with rl: grpo or gdpo")
        return Branch(where=tree.where), ()
    recipe = AxolotlRecipe(tree, problems, serving=serving)
    make(recipe, os.environ)
    return recipe.tree, recipe.notes
