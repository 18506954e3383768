"""Every planted defect is noticed: by the tests of the default tier that are to, or by a certificate.

pytest tests/long/test_planted.py --long -k "checksum or padding"    # those whose name has one of these words
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from defects import CUT, DEFECTS, EDITED, Defect, Edit
from support.tiers import long_but
from transformers import LlamaConfig

from tandem.config.loading import load
from tandem.tools.certify.case import certify
from tandem.tools.certify.policy import CertificateLine

ROOT = Path(__file__).parents[2]
PLANTED = [defect for defect in DEFECTS if not defect.tests]
RECIPES = {(one.source, one.recipe): one for one in PLANTED}
ON_A_COPY = """
import sys, pytest, tandem
assert tandem.__file__.startswith(sys.argv[1]), tandem.__file__
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
KILLED = (1, 2)
"""Exit status of pytest where tests fail, or nothing can be imported; every other but 0 is a mistake in the table."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig().save_pretrained(folder)
    return folder


def failing(model: Path, one: Defect) -> list[str]:
    """Names of the lines on which the certificate of its recipe fails."""
    overrides = [f"model={model}", "compile=false", *one.recipe]
    lines = certify(load(Path(f"recipes/{one.source}.yaml"), overrides).config).lines
    assert [line for line in lines if line.state == "skipped"] == list[CertificateLine]()
    return [line.name for line in lines if line.state == "fail"]


@pytest.mark.parametrize("defect", EDITED, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted(defect: Defect) -> None:
    """Whoever changes the line that it is about changes the table too."""
    edit = defect.plant
    assert isinstance(edit, Edit)
    assert (ROOT / edit.file).read_text(encoding="utf-8").count(edit.before) == 1
    assert edit.after != edit.before
    chosen = [word for word in shlex.split(defect.tests) if ".py" in word]
    assert chosen
    assert all((ROOT / word.partition("::")[0]).is_file() for word in chosen)


@pytest.mark.slow
@pytest.mark.parametrize("defect", long_but(EDITED), ids=lambda defect: defect.name)
def test_tests_notice_a_planted_defect(defect: Defect, tmp_path: Path) -> None:
    """They run on a copy of the sources that has it."""
    sources = shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    edit = defect.plant
    assert isinstance(edit, Edit)
    file = tmp_path / edit.file
    file.write_text(file.read_text(encoding="utf-8").replace(edit.before, edit.after), encoding="utf-8")
    command = [sys.executable, "-c", ON_A_COPY, str(sources), f"--basetemp={tmp_path / 'tmp'}"]
    command += shlex.split(defect.tests)
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in KILLED, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("planted", long_but(PLANTED, PLANTED[0], PLANTED[8]), ids=lambda planted: planted.name)
def test_a_certificate_notices_a_planted_defect(planted: Defect, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if not CUT & set(planted.fails):
        monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    assert not isinstance(planted.plant, Edit)
    planted.plant(monkeypatch)
    names = failing(model, planted)
    assert [part for part in planted.fails if not any(part in name for name in names)] == []


@pytest.mark.long
@pytest.mark.parametrize("one", RECIPES.values(), ids=lambda one: " ".join([one.source, *one.recipe]))
def test_without_a_defect_the_same_recipe_passes(one: Defect, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    assert failing(model, one) == []
