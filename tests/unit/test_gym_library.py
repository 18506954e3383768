"""reasoning-gym is loaded without matplotlib, and whoever draws with its parts still gets the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, path: Path | None = None) -> None:
    """Run code in a fresh interpreter, which searches ``path`` first."""
    search = os.pathsep.join(str(place) for place in (path, *sys.path) if place)
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": search}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_matplotlib_is_loaded_by_whoever_draws() -> None:
    pytest.importorskip("reasoning_gym")
    run(
        "import sys\n"
        "from tandem import gym_library\n"
        "game = gym_library.load().create_dataset('game_of_life', seed=1, size=1)\n"
        "assert game.score_answer(game[0]['answer'], game[0]) == 1\n"
        "assert not any(name.startswith(('matplotlib', 'mpl_toolkits')) for name in sys.modules)\n"
        "import cellpylib.ca_functions, matplotlib.pyplot\n"
        "assert cellpylib.ca_functions.plt.figure is matplotlib.pyplot.figure\n"
    )


def test_a_version_that_needs_more_of_matplotlib_gets_it(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("cm = 'colours'\n")
    (tmp_path / "reasoning_gym.py").write_text("from matplotlib import cm\n")
    run("from tandem import gym_library; assert gym_library.load().cm == 'colours'", tmp_path)
