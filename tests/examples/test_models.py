"""The examples for Hugging Face models, on slices, alongside plain loops."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support.pretrained import data_folder, model_folder, need

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_example(name, *options):
    """Run a script on two ranks; return the numbers of its last line and the text."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node=2", str(ROOT / "examples" / f"{name}.py"), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(line, capture_output=True, text=True, timeout=400, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    last = [line for line in result.stdout.splitlines() if "plain loop" in line]
    return [float(n) for n in re.findall(r"-?\d+\.\d+", last[0])], result.stdout


@pytest.mark.distributed
def test_images_are_learnt_as_in_a_plain_loop():
    need("transformers", "sklearn")
    (plain,), text = run_example(
        "image_classification", "--check", "--epochs", "3", "--pretrain", "12"
    )
    found = [float(n) for n in re.findall(r"epoch \d: accuracy (\S+)", text)]
    assert len(found) == 3
    assert plain > 0.5 and found[-1] > 0.5  # a guess: 0.1


@pytest.mark.distributed
def test_adapters_are_learnt_as_in_a_plain_loop(tmp_path):
    need("peft")
    model, data = model_folder(tmp_path), data_folder("sst2")
    (loss, _), text = run_example(
        "lora",
        *("--check", "--samples", "64", "--epochs", "3", "--first", "3"),
        *("--batch-size", "16", "--output", str(tmp_path)),
        *("--model", str(model), "--data", str(data)),
    )
    found = re.search(r"4 layers frozen, loss (\S+)", text)  # embeddings, 3 blocks
    assert float(found[1]) == pytest.approx(loss, rel=0.25)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.distributed
def test_a_language_model_is_learnt_as_in_a_plain_loop():
    need("transformers")
    (plain,), text = run_example(
        "causal_lm",
        *("--check", "--samples", "300", "--epochs", "3", "--batch-size", "16"),
        *("--accumulate", "2", "--data", str(data_folder("sst2"))),
    )
    found = [float(n) for n in re.findall(r"perplexity (\S+)", text)][:3]
    assert found[2] < found[1] < found[0] < 2500  # a guess: more than 2,000 words
    assert found[2] == pytest.approx(plain, rel=0.25)


@pytest.mark.distributed
def test_questions_are_answered_as_after_a_plain_loop(tmp_path):
    model, data = model_folder(tmp_path), data_folder("xquad")
    plain, text = run_example(
        "question_answering",
        *("--check", "--samples", "24", "--epochs", "2", "--length", "128"),
        *("--model", str(model), "--data", str(data), "--batch-size", "8"),
    )
    epochs = re.findall(r"epoch \d: \{'exact_match': (\S+), 'f1': (\S+)\}", text)
    assert len(epochs) == 2 and len(plain) == 2
    for exact, f1 in [*map(lambda e: map(float, e), epochs), plain]:
        assert 0 <= exact <= f1 <= 100
