"""Programs that stand in documents run as they stand there."""

import os
import subprocess
import sys

import pytest

from tests.support.documents import ROOT, blocks
from tests.support.pretrained import model_folder, need


def run_blocks(name, folder, replace=lambda text: text):
    """Run the Python of a document as one program; return what it printed."""
    programs = [b.code for b in blocks(ROOT / "docs" / f"{name}.md", "python")]
    assert programs
    script = folder / "script.py"
    script.write_text(replace("\n".join(programs)))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_the_script_that_was_one_of_ddp_learns(tmp_path):
    lines = run_blocks("from-ddp", tmp_path).splitlines()
    losses = [float(line.split()[1]) for line in lines]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_ones_own_model_becomes_an_engine(tmp_path):
    run_blocks("own-model", tmp_path)


@pytest.mark.distributed
def test_a_hugging_face_model_is_trained_and_exported(tmp_path):
    need("peft")
    model = str(model_folder(tmp_path))
    name = "sentence-transformers/all-MiniLM-L6-v2"

    def local(text):
        assert name in text
        return text.replace(name, model)

    run_blocks("huggingface", tmp_path, local)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    assert (tmp_path / "merged" / "model.safetensors").exists()
