"""Every planted defect is noticed: by the tests of the default tier that are to, or by a certificate."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from long.defects import DEFECTS, Defect
from long.plants import CUT, PLANTED, Planted
from support.tiers import long_but
from transformers import LlamaConfig

from tandem.config.loading import load
from tandem.tools.certify.case import certify
from tandem.tools.certify.certificate import CertificateLine

ROOT = Path(__file__).parents[2]
PACKAGES = sorted({str(Path(defect.file).parent) for defect in DEFECTS})
RECIPES = {(one.source, one.recipe): one for one in PLANTED}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig().save_pretrained(folder)
    return folder


def failing(model: Path, one: Planted) -> list[str]:
    """Names of the lines on which the certificate of its recipe fails."""
    overrides = [f"model={model}", "compile=false", *one.recipe]
    lines = certify(load(Path(f"recipes/{one.source}.yaml"), overrides).config).lines
    assert [line for line in lines if line.state == "skipped"] == list[CertificateLine]()
    return [line.name for line in lines if line.state == "fail"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted(defect: Defect) -> None:
    """Who changes the line that it is about changes the table too."""
    assert (ROOT / defect.file).read_text(encoding="utf-8").count(defect.before) == 1
    assert defect.after != defect.before
    chosen = [word for word in shlex.split(defect.tests) if ".py" in word]
    assert chosen
    assert all((ROOT / word.partition("::")[0]).is_file() for word in chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted", long_but([*PACKAGES, *PLANTED], PLANTED[0], PLANTED[8]), ids=lambda p: getattr(p, "name", p)
)
def test_planted_defects_are_noticed(planted: str | Planted, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a package by its tests, run on a copy of the sources; others by the lines of a certificate."""
    monkeypatch.chdir(ROOT)
    if isinstance(planted, str):
        names = [defect.name for defect in DEFECTS if str(Path(defect.file).parent) == planted]
        command = [sys.executable, str(Path(__file__).with_name("planted.py")), *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    if not CUT & set(planted.fails):
        monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    planted.plant(monkeypatch)
    names = failing(model, planted)
    assert [part for part in planted.fails if not any(part in name for name in names)] == []


@pytest.mark.long
@pytest.mark.parametrize("one", RECIPES.values(), ids=lambda one: " ".join([one.source, *one.recipe]))
def test_without_a_defect_the_same_recipe_passes(one: Planted, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    assert failing(model, one) == []
