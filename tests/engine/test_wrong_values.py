"""Checkpoints whose checksums are right and whose content is not: one error, by name.

Whoever makes them is no run of this library: a mistaken script, another program.
"""

import io
import shutil
import zipfile

import pytest
import torch

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import tensor_files as files
from tests.engine.scenario import config, make_engine, moments
from tests.support.private import run_of
from tests.support.toy import ToySet


def an_engine(**wanted):
    return make_engine(freeze=pt.freeze.Manual(), depth=1, config=config(**wanted))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "saved.pt"
    with an_engine() as engine:
        for batch in engine.batches(ToySet(12), 4):
            engine.step(batch)
            if batch.index == 1:
                engine.save(path)  # within the pass
    return path


def changed(source, target, change):
    """Write a checkpoint as this library does, after a change to its content."""
    content = torch.load(source, weights_only=True)
    change(content)
    files.write(target, content)
    return target


def put(*names, value):
    """Return a change that sets an entry, named from the outside in."""

    def change(content):
        for name in names[:-1]:
            content = content[name]
        content[names[-1]] = value

    return change


def in_message(change):
    """Return a change of what the optimizer's message holds."""

    def outer(content):
        message = io.BytesIO(content["optimizer_message"])
        tree = torch.load(message, weights_only=True)
        change(tree)
        packed = io.BytesIO()
        torch.save(tree, packed)
        content["optimizer_message"] = packed.getvalue()

    return outer


def number_tensors(number):
    def change(tree):
        tree["optimizer"]["state"][0]["exp_avg"]["__tensor__"] = number

    return in_message(change)


def squeeze(content):
    """Pack the message as no version of torch does: 64 MiB of zeros in 64 KiB."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(2**26))
    content["optimizer_message"] = packed.getvalue()


# What is wrong -> the change, and what the error says besides the file's name.
IN_FILE = {
    "format": (put("format", value=torch.ones(2)), "format 1, got a Tensor"),
    "no progress": (put("progress", value={}), "step of its progress"),
    "huge step": (put("progress", "step", value=10**30), "step of its progress"),
    "longest step": (put("progress", "step", value=10**500), "step of its progress"),
    "negative step": (put("progress", "step", value=-7), "step of its progress"),
    "step no int": (put("progress", "step", value=3.0), "step of its progress"),
    "epoch a bool": (put("progress", "epoch", value=True), "epoch of its progress"),
    "batch beyond": (put("progress", "batch", value=10**9), "one of 3 of its pass"),
    "last batch": (put("progress", "batch", value=3), "one of 3 of its pass"),
    "decision": (put("progress", "decided_epoch", value=-2), "a count from -1"),
    "policy 5": (put("extra", "policy", value=5), "policy to be a dict"),
    "pass 5": (put("extra", "pass", value=5), "the pass to be a dict"),
    "model's names": (put("model", 3, value=torch.ones(1)), "name of its model"),
    "tensors": (put("optimizer_tensors", 0, value=5), "optimizer_tensors to be"),
    "tensor 99": (number_tensors(99), "a number below"),
    "tensor -1": (number_tensors(-1), "a number below"),
    "tensor x": (number_tensors("x"), "a number below"),
    "garbage": (put("optimizer_message", value=b"\x80\x02garbage"), "optimizer: expec"),
    "short message": (put("optimizer_message", value=b"x"), "optimizer: expected"),
    "bomb": (squeeze, "a compressed entry 'a/data.pkl'"),
    "no optimizer": (in_message(lambda t: t.pop("optimizer")), "optimizer to be a d"),
    "no scheduler": (in_message(lambda t: t.pop("scheduler")), "scheduler to be a d"),
    "metrics": (in_message(put("metrics", value={"a": "b"})), "metrics to be numbers"),
    "evaluated": (
        in_message(put("evaluated", value={"a": 1.5})),
        "evaluated to be counts",
    ),
    "freezes": (in_message(put("freezes", value=[{"epoch": "x"}])), "freezes to be"),
    "gradients": (in_message(put("gradients", value={"x": 1})), "gradients to be"),
}


@pytest.mark.parametrize("kind", IN_FILE)
def test_wrong_values_are_refused_before_anything_is_loaded_and_skipped(
    kind, tmp_path, whole, caplog
):
    change, text = IN_FILE[kind]
    newest = checkpoint.path_of_step(tmp_path, 9)
    older = checkpoint.path_of_step(tmp_path, 8)
    shutil.copy(whole, older)
    changed(whole, newest, change)
    with an_engine() as engine:
        before = engine.state_dict()
        with pytest.raises(ValueError) as caught:
            engine.load(newest)
        assert str(newest) in str(caught.value) and text in str(caught.value)
        run = run_of(engine)
        assert run.state.step == 0 and run.loaded is None
        torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)
    assert checkpoint.newest_valid(tmp_path)[0] == older
    assert f"skipped: checkpoint {newest}" in caplog.text


FLOOD = bytes(10**4)  # an error that quotes it has 40,000 letters

# Nothing in the file is impossible, but it does not fit this run's model or policy.
IN_RUN = {
    "units": (put("progress", "frozen_units", value=9), "at most 1 frozen_units"),
    "wish": (put("progress", "wanted_units", value=9), "at most 1 wanted_units"),
    "policy": (put("extra", "policy", value={"num_frozen": "x"}), "state of Manual"),
    "other policy": (put("extra", "policy", value={"a": 1}), "state of Manual"),
    "pauses": (put("extra", "pauses", value=7), "expected measured pauses"),
    "pause time": (put("extra", "reshaped_ns_ago", value=10**400), "measured pauses"),
    "shape": (put("model", "0.bias", value=torch.ones(9)), "expected 0.bias with (8,)"),
    "missing": (lambda c: c["model"].pop("0.bias"), "got no such tensor"),
    "no tensor": (put("model", "0.bias", value=[1]), "got a list"),
    "console": (put("model", "\x1b[2J", value=torch.ones(1)), "expected '\\x1b[2J'"),
    "policy's flood": (put("extra", "policy", "num_frozen", value=FLOOD), "of Manual"),
    "pause flood": (put("extra", "reshaped_ns_ago", value=FLOOD), "measured pauses"),
    "dimensions": (put("model", "0.bias", value=torch.ones([1] * 999)), "(1, 1, 1"),
}


@pytest.mark.parametrize("kind", IN_RUN)
def test_values_that_do_not_fit_the_run_name_the_file_and_load_nothing(
    kind, tmp_path, whole
):
    change, text = IN_RUN[kind]
    path = changed(whole, tmp_path / "x.pt", change)
    with an_engine() as engine:
        before = engine.state_dict()
        with pytest.raises(ValueError) as caught:
            engine.load(path)
        found = str(caught.value)
        assert found.startswith(f"checkpoint {path}: expected") and text in found
        assert found.isprintable() and len(found) < len(str(path)) + 1000
        assert run_of(engine).state.step == 0
        torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)


def test_a_gradient_sum_of_no_parameter_is_refused(tmp_path, whole):
    sums = {-1: torch.zeros(8)}  # as the last parameter is
    path = changed(whole, tmp_path / "x.pt", in_message(put("gradients", value=sums)))
    engine = make_engine(
        freeze=pt.freeze.AlphaCap(0.5, gradient_term=True), depth=1, config=config()
    )
    content = torch.load(path, weights_only=True)
    content["extra"]["policy"] = engine._arguments.policy.state_dict()
    files.write(path, content)
    with engine, pytest.raises(ValueError, match="x.pt: .* gradient sum -1: expected"):
        engine.load(path)


def test_optimizer_state_that_does_not_load_names_the_file(tmp_path, whole):
    groups = in_message(put("optimizer", "param_groups", value=5))
    path = changed(whole, tmp_path / "x.pt", groups)
    with an_engine() as engine:
        text = f"checkpoint {path}: expected the optimizer's state, got what does not"
        with pytest.raises(ValueError, match=text):
            engine.load(path)
        assert run_of(engine).loaded is None


def test_batches_of_another_kind_are_quoted_in_short(tmp_path, whole):
    path = changed(whole, tmp_path / "x.pt", put("extra", "pass", "seed", value=FLOOD))
    with an_engine() as engine:
        engine.load(path)
        with pytest.raises(ValueError, match="batches of {'num_") as caught:
            engine.prepare(ToySet(12), 4)
        assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_what_was_saved_passes_every_check(tmp_path, whole):
    path = changed(whole, tmp_path / "x.pt", lambda content: None)
    with an_engine() as engine:
        engine.load(path)
        engine.prepare(ToySet(12), 4)
        assert moments(engine)["step"] == 2


# -- archives --------------------------------------------------------------------


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "step-0000000001.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("x/data/0", bytes(2**24))
    unpacked = []
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda _: unpacked.append(1))
    with pytest.raises(ValueError, match="got: a compressed entry 'x/data.pkl'"):
        checkpoint.read(path)
    with pytest.raises(ValueError, match="a compressed entry"):
        files.require_whole(path, "file")
    assert not unpacked


def test_entries_that_share_their_bytes_are_refused(tmp_path):
    """Each is stored as it is, and together they are larger than the file."""
    path = tmp_path / "step-0000000001.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data/0", bytes(2**16))
        archive.filelist += archive.filelist * 99
    with pytest.raises(ValueError, match=r"got: entries of 6553600 bytes in \d+"):
        checkpoint.read(path)


def test_what_torch_quotes_from_a_file_is_short_and_printable(tmp_path, whole):
    path = tmp_path / "step-0000000001.pt"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith("/byteorder"):
                data = b"\x1b[2J" * 1000
            target.writestr(entry.filename, data)
    with pytest.raises(ValueError, match="got: Unknown endianness type") as caught:
        checkpoint.read(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
