"""Malformed profiles, clusters and plans: an error names the field; exit code 2."""

import re
import types

import pytest

from pipetransformer.cli import files, output
from pipetransformer.cli import main as cli
from pipetransformer.cli.arguments import add_command
from pipetransformer.planner import LayerProfile
from tests.planner.documents import CLUSTER, DROP, FORMATS, PLAN, PROFILE, changed, text

READERS = {
    "profile": files.read_profile,
    "cluster": files.read_cluster,
    "plan": files.read_plan,
}
L0 = ["layers", 0]
C0 = ["candidates", 0]
DEEP = [[[[[[["deep"]]]]]]]
HUGE = 10**400

# Format, path, new value, what the error says. A field below a layer is named with
# the layer's own name.
FIELDS = [
    ("profile", ["version"], DROP, "profile version: expected 1, got None"),
    ("profile", ["version"], 2, "profile version: expected 1, got 2"),
    ("profile", ["version"], 1.0, "profile version: expected 1, got 1.0"),
    ("profile", ["version"], True, "profile version: expected 1, got True"),
    ("profile", ["version"], "1", "profile version: expected 1, got '1'"),
    ("profile", ["name"], DROP, "profile name: expected a value, got none"),
    ("profile", ["name"], None, "profile name: expected a string, got None"),
    ("profile", ["name"], "\x1b[2J", "profile name: expected text without control ch"),
    ("profile", ["name"], "\ud800", "profile name: expected text without control cha"),
    ("profile", ["name"], "x" * 257, "profile name: expected at most 256 letters, got"),
    (
        "profile",
        [*L0, "name"],
        "x" * 257,
        "name: expected at most 256 letters, got 257",
    ),
    ("plan", ["reasons"], ["x" * 4097], "reasons[0]: expected at most 4096 letters"),
    ("profile", ["colour"], 1, "profile: expected known fields only, got 'colour'"),
    ("profile", ["x" * 10**4], 1, "profile: expected known fields only, got 'xxx"),
    ("profile", ["layers"], DROP, "profile layers: expected a value, got none"),
    ("profile", ["layers"], [], "profile layers: expected at least one layer, got"),
    ("profile", ["layers"], {}, "profile layers: expected a list, got {}"),
    ("profile", ["layers"], "abc", "profile layers: expected a list, got 'abc'"),
    ("profile", L0, None, "profile layers[0]: expected an object, got NoneType"),
    ("profile", L0, [1], "profile layers[0]: expected an object, got list"),
    ("profile", [*L0, "name"], DROP, "profile layers[0] name: expected a value"),
    ("profile", [*L0, "colour"], 1, "profile layers[0]: expected known fields only"),
    ("profile", [*L0, "forward_ns"], DROP, "layers[0] forward_ns: expected a value"),
    ("profile", [*L0, "forward_ns"], 10, "forward_ns: expected a list, got 10"),
    ("profile", [*L0, "forward_ns"], [1], "forward_ns: expected one entry per micro-"),
    ("profile", [*L0, "forward_ns"], [1] * 9999, "per micro-batch size (2), got 9999"),
    ("profile", [*L0, "forward_ns"], [[1], 2], "forward_ns[0]: expected an integer"),
    ("profile", [*L0, "input_grad_ns"], [1.5, 2], "input_grad_ns[0]: expected an int"),
    ("profile", [*L0, "input_grad_ns"], [1, -2], "input_grad_ns[1]: expected 0 to"),
    ("profile", [*L0, "weight_grad_ns"], [True, 2], "weight_grad_ns[0]: expected an"),
    ("profile", [*L0, "weight_grad_ns"], [2**62 + 1, 2], "weight_grad_ns[0]: expected"),
    ("profile", [*L0, "forward_only_ns"], [HUGE, 1], "forward_only_ns[0]: expected 0"),
    ("profile", [*L0, "forward_only_ns"], [], "forward_only_ns: expected one entry"),
    ("profile", [*L0, "parameter_bytes"], -1, "parameter_bytes: expected 0 to 2**62"),
    ("profile", [*L0, "optimizer_bytes"], -1, "optimizer_bytes: expected 0 to 2**62"),
    ("profile", [*L0, "parameter_bytes"], "8", "parameter_bytes: expected an integer"),
    ("profile", [*L0, "parameter_bytes"], DEEP, "parameter_bytes: expected an integer"),
    (
        "profile",
        [*L0, "activation_bytes_per_sample"],
        None,
        "activation_bytes_per_samp",
    ),
    ("profile", [*L0, "boundary_bytes_per_sample"], 0.0, "boundary_bytes_per_sample"),
    ("profile", [*L0, "trainable"], 1, "trainable: expected true or false, got 1"),
    ("profile", [*L0, "trainable"], DROP, "layers[0] trainable: expected a value"),
    ("profile", ["microbatch_samples"], [], "microbatch_samples: expected increasing"),
    ("profile", ["microbatch_samples"], [4, 1], "microbatch_samples: expected increas"),
    ("profile", ["microbatch_samples"], [1, 1], "microbatch_samples: expected increas"),
    ("profile", ["microbatch_samples"], [0, 4], "microbatch_samples: expected increas"),
    ("profile", ["microbatch_samples"], [1, "4"], "microbatch_samples[1]: expected an"),
    (
        "profile",
        ["microbatch_samples"],
        [1, 2, 3],
        "forward_ns: expected one entry per",
    ),
    ("profile", ["tied_layers"], [[0, 3]], "tied_layers: expected pairs of increasing"),
    ("profile", ["tied_layers"], [[2, 0]], "tied_layers: expected pairs of increasing"),
    ("profile", ["tied_layers"], [[1, 1]], "tied_layers: expected pairs of increasing"),
    ("profile", ["tied_layers"], [[0, 1, 2]], "tied_layers: expected pairs of increas"),
    ("profile", ["tied_layers"], [[-1, 1]], "tied_layers[0][0]: expected 0 to 2**62"),
    ("profile", ["tied_layers"], [0, 1], "tied_layers[0]: expected a list, got 0"),
    ("profile", ["skips"], [[0, 3]], "skips: expected pairs of increasing layer ind"),
    ("profile", ["skips"], [[1, 1]], "skips: expected pairs of increasing layer ind"),
    ("profile", ["skips"], [[0]], "skips: expected pairs of increasing layer indices"),
    ("profile", ["skips"], 3, "skips: expected a list, got 3"),
    ("cluster", ["version"], 0, "cluster version: expected 1, got 0"),
    ("cluster", ["version"], [1], "cluster version: expected 1, got [1]"),
    ("cluster", ["num_nodes"], 0, "cluster num_nodes: expected 1 to 2**62, got 0"),
    ("cluster", ["num_nodes"], 2.0, "cluster num_nodes: expected an integer, got 2.0"),
    ("cluster", ["num_nodes"], HUGE, "cluster num_nodes: expected 1 to 2**62, got 10"),
    ("cluster", ["devices_per_node"], -4, "cluster devices_per_node: expected 1 to"),
    ("cluster", ["devices_per_node"], DROP, "cluster devices_per_node: expected a val"),
    (
        "cluster",
        ["device_memory_bytes"],
        "1G",
        "device_memory_bytes: expected an integ",
    ),
    (
        "cluster",
        ["device_memory_bytes"],
        None,
        "device_memory_bytes: expected an integ",
    ),
    ("cluster", ["device_link_bytes_per_s"], 0, "device_link_bytes_per_s: expected 1"),
    ("cluster", ["device_link_latency_ns"], -1, "device_link_latency_ns: expected 0"),
    ("cluster", ["network_bytes_per_s"], False, "network_bytes_per_s: expected an int"),
    (
        "cluster",
        ["network_latency_ns"],
        None,
        "network_latency_ns: expected an integer",
    ),
    ("cluster", ["network_latency_ns"], DROP, "network_latency_ns: expected a value"),
    ("cluster", ["optimizer_bytes_per_parameter_byte"], -0.5, "a finite number from 0"),
    ("cluster", ["optimizer_bytes_per_parameter_byte"], "2", "expected a number, got"),
    ("cluster", ["optimizer_bytes_per_parameter_byte"], HUGE, "expected at most 2**62"),
    ("cluster", ["optimizer_bytes_per_parameter_byte"], True, "expected a number, got"),
    ("cluster", ["context_bytes"], -1, "cluster context_bytes: expected 0 to 2**62"),
    ("cluster", ["cache"], [], "cluster cache: expected an object, got list"),
    ("cluster", ["cache", "host_bytes"], -1, "cluster cache host_bytes: expected 0 to"),
    ("cluster", ["cache", "disk_bytes"], DROP, "cache disk_bytes: expected a value"),
    (
        "cluster",
        ["cache", "tape_bytes"],
        1,
        "cluster cache: expected known fields only",
    ),
    ("cluster", ["devices"], 1, "cluster: expected known fields only, got 'devices'"),
    ("plan", ["version"], 3, "plan version: expected 1, got 3"),
    ("plan", ["num_stages"], 0, "plan num_stages: expected 1 to 2**62, got 0"),
    ("plan", ["num_stages"], 3, "plan cuts: expected 4 layer indices (num_stages + 1)"),
    ("plan", ["num_stages"], DROP, "plan num_stages: expected a value, got none"),
    (
        "plan",
        ["num_replicas"],
        True,
        "plan num_replicas: expected an integer, got True",
    ),
    ("plan", ["num_microbatches"], -4, "plan num_microbatches: expected 1 to 2**62"),
    (
        "plan",
        ["samples_per_microbatch"],
        3,
        "plan samples_per_microbatch: expected 2 (global_batch 16 over 2 x 4 micro-",
    ),
    (
        "plan",
        ["samples_per_microbatch"],
        1.5,
        "samples_per_microbatch: expected an int",
    ),
    (
        "plan",
        ["global_batch"],
        None,
        "plan global_batch: expected an integer, got None",
    ),
    ("plan", ["boundary"], 0, "plan cuts: expected increasing layer indices from 0"),
    ("plan", ["boundary"], "1", "plan boundary: expected an integer, got '1'"),
    ("plan", ["cuts"], DROP, "plan cuts: expected a value, got none"),
    ("plan", ["cuts"], [1, 2], "plan cuts: expected 3 layer indices (num_stages + 1)"),
    ("plan", ["cuts"], [1, 4, 2], "plan cuts: expected increasing layer indices from"),
    ("plan", ["cuts"], [1, 1, 4], "plan cuts: expected increasing layer indices from"),
    ("plan", ["cuts"], [1, None, 4], "plan cuts[1]: expected an integer, got None"),
    ("plan", ["cuts"], {"1": 2}, "plan cuts: expected a list, got {'1': 2}"),
    ("plan", ["schedule"], "gpipe2", "plan schedule: expected one of"),
    ("plan", ["schedule"], ["gpipe"], "plan schedule: expected one of"),
    ("plan", ["checkpoint"], None, "plan checkpoint: expected one of"),
    ("plan", ["prefix"], "serial", "plan prefix: expected one of"),
    ("plan", ["cache"], 0, "plan cache: expected one of"),
    ("plan", ["copies"], "x" * 10**4, "plan copies: expected one of"),
    ("plan", ["predicted_step_ns"], -1, "plan predicted_step_ns: expected 0 to 2**62"),
    ("plan", ["simulated_step_ns"], 9.5, "plan simulated_step_ns: expected an integer"),
    ("plan", ["bubble_fraction"], 1.01, "plan bubble_fraction: expected 0 to 1"),
    ("plan", ["bubble_fraction"], "0", "plan bubble_fraction: expected a number"),
    ("plan", ["bubble_fraction"], HUGE, "plan bubble_fraction: expected at most 2**62"),
    ("plan", ["bytes_per_stage"], [1], "plan bytes_per_stage: expected 2 entries, got"),
    ("plan", ["bytes_per_stage"], [1, -1], "plan bytes_per_stage[1]: expected 0 to"),
    ("plan", ["idle_devices"], -1, "plan idle_devices: expected 0 to 2**62, got -1"),
    ("plan", ["transition"], [], "transition: expected an object, got list"),
    ("plan", ["transition", "kind"], "all", "transition kind: expected one of"),
    ("plan", ["transition", "rule"], DROP, "transition rule: expected a value"),
    ("plan", ["transition", "accepted"], 1, "transition accepted: expected true or"),
    ("plan", ["transition", "terms_ns", "sleep"], 1, "terms_ns: expected known fields"),
    ("plan", ["transition", "terms_ns", "move"], -1, "terms_ns move: expected 0 to"),
    (
        "plan",
        ["transition", "gain_ns_per_step"],
        -HUGE,
        "gain_ns_per_step: expected -2",
    ),
    ("plan", ["transition", "pay_back_steps"], 0.5, "pay_back_steps: expected an int"),
    ("plan", ["candidates"], {}, "plan candidates: expected a list, got {}"),
    ("plan", C0, 1, "plan candidates[0]: expected an object, got int"),
    ("plan", [*C0, "lost"], 3, "plan candidates[0] lost: expected a string, got 3"),
    ("plan", [*C0, "cuts"], DROP, "plan candidates[0] cuts: expected a value"),
    ("plan", [*C0, "num_stages"], 0, "plan candidates[0] num_stages: expected 1 to"),
    ("plan", [*C0, "cache"], "tape", "plan candidates[0] cache: expected one of"),
    ("plan", ["refusals"], ["a\nb"], "plan refusals[0]: expected text without control"),
    ("plan", ["reasons"], [1], "plan reasons[0]: expected a string, got 1"),
    ("plan", ["reasons"], "fast", "plan reasons: expected a list, got 'fast'"),
    (
        "plan",
        ["profile_hash"],
        -1,
        "plan profile_hash: expected 0 to 2**64 - 1, got -1",
    ),
    ("plan", ["profile_hash"], 2**64, "plan profile_hash: expected 0 to 2**64 - 1"),
    ("plan", ["cluster_hash"], "5", "plan cluster_hash: expected an integer, got '5'"),
    ("plan", ["plan_hash"], -1, "plan plan_hash: expected 0 to 2**64 - 1, got -1"),
    ("plan", ["plan_hash"], 7, "plan plan_hash: expected "),
    ("plan", ["plan_hash"], True, "plan plan_hash: expected an integer, got True"),
]
WHOLE = {name: text(document) for name, (_, document) in FORMATS.items()}


def texts(name):
    """Texts that are no such document at all, and what the error says."""
    whole = WHOLE[name]
    json = f"{name}: expected JSON, got text with "
    return [
        (b"", json + "Expecting value"),
        (b" \n", json + "Expecting value"),
        (b"null", f"{name}: expected an object, got NoneType"),
        (b"[]", f"{name}: expected an object, got list"),
        (b'"text"', f"{name}: expected an object, got str"),
        (b"1e999", f"{name}: expected an object, got float"),
        (whole[:-1].encode(), json),
        (whole[: len(whole) // 2].encode(), json),
        (whole.encode() + b"x", json + "Extra data"),
        (whole.replace("1", "NaN", 1).encode(), json + "the number NaN"),
        (whole.replace("1", "-Infinity", 1).encode(), json + "the number -Infinity"),
        (whole.replace("{", '{"version": 1, ', 1).encode(), "'version' twice"),
        (whole.replace('"', "'").encode(), json + "Expecting property name"),
        (whole.replace("1", "9" * 5000, 1).encode(), json + "Exceeds the limit"),
        (whole.replace("}", ",}").encode(), json),
        (whole.replace("1", "0x1", 1).encode(), json),
        (b"[" * 100_000, json + "maximum recursion depth"),
        (b'{"a":' * 100_000, json + "maximum recursion depth"),
        (b"\xef\xbb\xbf" + whole.encode(), json + "Unexpected UTF-8 BOM"),
        (whole.encode("utf-16"), "text: expected UTF-8, got byte 0x"),
        (whole.encode() + b"\x00", json + "Extra data"),
        (b'{"name": "\xff"}', "text: expected UTF-8, got byte 0xff at 10"),
        (b'{"name": "\x01"}', json + "Invalid control character"),
    ]


TEXTS = [(name, data, said) for name in FORMATS for data, said in texts(name)]


def test_there_are_more_than_forty_kinds_and_the_originals_are_valid():
    assert len(FIELDS) + len(texts("profile")) > 140
    for name, (kind, document) in FORMATS.items():
        assert kind.from_json(WHOLE[name]) == kind.from_json(text(document))


@pytest.mark.parametrize(("name", "path", "value", "said"), FIELDS)
def test_a_malformed_field_is_named(name, path, value, said):
    kind, document = FORMATS[name]
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        kind.from_json(text(changed(document, path, value)))
    assert len(str(caught.value)) < 400  # what was read is shown shortened


@pytest.fixture
def read(tmp_path, monkeypatch, capsys):
    """Reads bytes through the command line; returns exit code and error text."""
    path = tmp_path / "document.json"

    def act(arguments):
        READERS[act.name](str(path))
        return output.OK

    def add_parser(subparsers):
        add_command(subparsers, "act", act, summary="", description="", examples="act")

    monkeypatch.setattr(
        cli, "_COMMANDS", (types.SimpleNamespace(add_parser=add_parser),)
    )

    def through_the_command_line(name, data):
        act.name = name
        path.write_bytes(data)
        code = cli.main(["act"])
        return code, capsys.readouterr().err

    return through_the_command_line


def test_a_malformed_field_ends_a_command_with_one_line(read):
    for name, path, value, said in FIELDS:
        document = changed(FORMATS[name][1], path, value)
        code, error = read(name, text(document).encode())
        assert code == output.BAD_INPUT
        assert error.startswith("error: ") and error.count("\n") == 1
        assert "document.json: " in error and said in error
        assert "Traceback" not in error


@pytest.mark.parametrize(("name", "data", "said"), TEXTS)
def test_a_text_that_is_no_document_ends_a_command_with_one_line(
    read, name, data, said
):
    code, error = read(name, data)
    assert code == output.BAD_INPUT
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "document.json: " in error and said in error
    assert len(error) < 600


def test_a_valid_document_is_read_by_a_command(read):
    for name, whole in WHOLE.items():
        assert read(name, whole.encode()) == (output.OK, "")


def test_errors_of_objects_built_in_code_are_short_too():
    layer = dict(PROFILE["layers"][0], name="x" * 256, parameter_bytes=-1)
    with pytest.raises(ValueError, match="parameter_bytes: expected 0 to") as caught:
        LayerProfile(**layer)
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="at most 256 letters, got 1000000") as caught:
        LayerProfile(**dict(layer, name="x" * 10**6))
    assert len(str(caught.value)) < 400


def test_null_is_no_limit_and_no_transition():
    for field in ("device_link_bytes_per_s", "network_bytes_per_s", "cache"):
        kind = FORMATS["cluster"][0]
        assert (
            getattr(kind.from_json(text(changed(CLUSTER, [field], None))), field)
            is None
        )
    plan = FORMATS["plan"][0].from_json(text(changed(PLAN, ["transition"], None)))
    assert plan.transition is None
