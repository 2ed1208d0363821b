"""The committed drawings are those that the script makes of real runs and rules."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree

import pytest

import _room_graph
import _run_timeline
import draw
from check_layers import ARROWS
from harness.age import age
from harness.provenance import Tree

RUN = json.loads((draw.ROOT / draw.RUN).read_text())
DIAMOND = {
    "top": frozenset({"left", "right", "base"}),
    "left": frozenset({"base"}),
    "right": frozenset({"base"}),
    "base": frozenset(),
}


def texts(picture):
    """The words of a drawing that parses."""
    root = ElementTree.fromstring(picture)
    return [
        "".join(each.itertext()) for each in root.iter() if each.tag.endswith("}text")
    ]


def test_committed_drawings_are_what_the_script_draws(capsys):
    assert draw.main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def test_check_finds_an_edited_drawing_and_writes_nothing(tmp_path, capsys):
    shutil.copytree(draw.ROOT / draw.IMAGES, tmp_path / draw.IMAGES)
    edited = tmp_path / draw.IMAGES / "run.svg"
    edited.write_text(edited.read_text().replace("K=4", "K=5"))
    assert draw.main(["--check"], root=tmp_path) == 1
    assert f"{edited}: expected what tools/draw.py draws" in capsys.readouterr().out
    assert draw.main([], root=tmp_path) == 0
    assert draw.main(["--check"], root=tmp_path) == 0


def test_the_drawn_run_says_where_it_comes_from():
    assert not age(draw.ROOT, RUN["commit"], ["pipetransformer"]).foreign
    assert RUN["commit"][:7] in " ".join(texts(_run_timeline.draw(RUN)))


def test_the_drawn_run_shrinks_its_pipeline_and_freezes_more_and_more():
    epochs = RUN["epochs"]
    stages, replicas, frozen = (
        [each[key] for each in epochs]
        for key in ("num_stages", "num_replicas", "boundary")
    )
    assert stages == sorted(stages, reverse=True) and stages[0] > stages[-1]
    assert replicas == sorted(replicas) and replicas[0] < replicas[-1]
    assert frozen == sorted(frozen) and frozen[-1] < RUN["num_layers"]


def test_a_run_is_drawn_block_by_block():
    shown = _run_timeline.draw(RUN)
    tips = re.findall(r"<title>epoch (\d+): replica (\d+), stage (\d+)</title>", shown)
    assert tips == [
        (str(each["epoch"]), str(replica), str(stage))
        for slot in range(RUN["world_size"])
        for each in RUN["epochs"]
        for replica, stage in [divmod(slot, each["num_stages"])]
        if replica < each["num_replicas"]
    ]


@pytest.mark.parametrize("picture", [_run_timeline.draw(RUN), _room_graph.draw()])
def test_drawings_have_colours_for_light_and_dark_pages(picture):
    assert "@media (prefers-color-scheme: dark)" in picture
    classes = set(re.findall(r'class="([\w-]+)"', picture))
    light, dark = picture.split("@media")
    assert all(f".{name} {{" in light and f".{name} {{" in dark for name in classes)


def test_a_summary_is_reduced_to_what_is_shown(monkeypatch):
    monkeypatch.setattr(draw, "tree_of", lambda _: Tree("0" * 40, ()))
    epoch = {**RUN["epochs"][0], "seconds": 1.23456, "train_loss": 0.5}
    summary = {
        "world_size": 4,
        "total_seconds": 2.0,
        "epochs": [epoch],
        "transformations": [{"epoch": 1, "pause_seconds": 0.0721, "reason": "x"}],
    }
    found = draw.reduced(summary, "make demo", 14)
    assert (found["commit"], found["command"]) == ("0" * 40, "make demo")
    assert found["epochs"] == [{**RUN["epochs"][0], "seconds": 1.235}]
    assert found["pauses"] == [{"epoch": 1, "seconds": 0.072}]


def test_a_run_of_a_changed_tree_is_refused(monkeypatch):
    monkeypatch.setattr(draw, "tree_of", lambda _: Tree("0" * 40, ("a.py",)))
    with pytest.raises(ValueError, match="expected a clean tree, got a.py"):
        draw.reduced({}, "make demo", 14)


def test_every_room_is_drawn_once():
    shown = texts(_room_graph.draw())
    assert sorted(shown) == sorted(ARROWS)


def test_an_arrow_that_follows_is_left_out():
    graph = {room: set(uses) for room, uses in DIAMOND.items()}
    shown = _room_graph.reduced(graph)
    assert shown["top"] == {"left", "right"}
    assert shown["left"] == {"base"} and shown["base"] == set()
    # What is left out can still be reached.
    full = {room: {*uses} & {*ARROWS} for room, uses in ARROWS.items()}
    less = _room_graph.reduced(full)
    for room in full:
        assert _room_graph.reach(less, room) == _room_graph.reach(full, room)


def test_every_arrow_points_down():
    graph = {room: {*uses} & {*ARROWS} for room, uses in ARROWS.items()}
    floors = _room_graph.floors_of(graph)
    assert all(floors[room] > floors[uses] for room in graph for uses in graph[room])


def test_an_arrow_over_floors_has_a_place_on_each():
    graph = {"top": {"base", "middle"}, "middle": {"base"}, "base": set()}
    rows, chains = _room_graph.routed(graph, {"top": 2, "middle": 1, "base": 0})
    assert rows == [["top"], ["middle", "top>base:1"], ["base"]]
    assert ["top", "top>base:1", "base"] in chains
