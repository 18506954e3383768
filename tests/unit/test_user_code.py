"""Code of the user's in a run: a change is told, and none that lies in a run's folder is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tandem.api.publishing import export
from tandem.api.targets import to_evaluate
from tandem.config.loading import from_options, load
from tandem.errors import RewardError
from tandem.trainer import run_folder

REWARD = "def half(rollout):\n    return 0.5\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with a reward, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    Path("own_rewards.py").write_text(REWARD)
    return tmp_path / "own_rewards.py"


def made() -> Path:
    """A run with that reward, and a checkpoint."""
    options = {"model": "m", "steps": 3, "env": "arithmetic", "rewards": {"own_rewards:half": 1.0}, "name": "a"}
    folder = run_folder.new_folder(from_options(options, [], Path("recipe")).config)
    (folder / "checkpoints/000003/model").mkdir(parents=True)
    return folder


def test_a_changed_reward_is_told_on_resume_and_before_an_evaluation(
    module: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made()
    kept = folder / "sources/own_rewards.py"
    assert kept.read_text() == REWARD
    to_evaluate(folder, [], None)
    assert caplog.text == ""
    module.write_text(REWARD.replace("0.5", "0.25"))
    to_evaluate(folder, [], None)
    assert f"{module} is not what this run was trained with (see {kept})" in caplog.text
    run_folder.keep_code(load(folder / "config.yaml").config, folder)
    assert kept.read_text() == REWARD, "what the run was begun with"


@pytest.mark.parametrize("places", ["within", "relative", "none"])
def test_nothing_in_a_run_folder_is_imported_and_an_export_needs_no_code(module: Path, places: str) -> None:
    folder = made()
    own = folder / "own_rewards.py"
    own.write_text("raise SystemExit('it was run')\n")
    recorded = {"within": [str(folder.resolve())], "relative": [str(folder)], "none": []}[places]
    (folder / "modules.json").write_text(json.dumps(recorded))
    module.unlink()
    del sys.modules["own_rewards"]
    with pytest.raises(RewardError, match="there is no module 'own_rewards'"):
        load(folder / "config.yaml")
    assert "exported the model of step 3" in export(folder, Path("out"), None, False)
