"""Code in the documents: it says what it is; programs run, commands exist."""

import ast
import functools
import importlib
import json
import pathlib
import re
import shlex
import sys

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.cli.main import make_parser
from tests.explanation.cases import a_profile, cached_cluster
from tests.support.documents import PAGES, ROOT, blocks, name_of

# text: what a program prints, how a command is called, a drawing. console: commands,
# each after a dollar sign, with what they print.
KINDS = {"bash", "console", "cpp", "json", "python", "text"}
PROGRAMS = [page for page in PAGES if blocks(page, "python")]
# Whole programs, which other tests run, each in an interpreter of its own.
RUN_BY = {
    "README.md": "tests/examples/test_readme.py",
    "docs/from-ddp.md": "tests/examples/test_documents.py",
    "docs/huggingface.md": "tests/examples/test_documents.py",
    "docs/own-model.md": "tests/examples/test_documents.py",
}


def each(pages):
    return pytest.mark.parametrize("page", pages, ids=name_of)


def planned():
    """What a page on plans has: a model's costs, and what it is to run on."""
    cluster = cached_cluster(device_memory_bytes=150_000_000)
    return {"profile": a_profile(8, heavy=5), "cluster": cluster}


def pipelined():
    """What a page on the pipeline has: twelve layers, a batch and a loss."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return {
        "model": nn.Sequential(*layers),
        "x": torch.randn(16, 4),
        "y": torch.randint(4, (16,)),
        "criterion": nn.CrossEntropyLoss(),
    }


# What the blocks of a page find there, besides torch, nn and pt.
GIVEN = {
    "docs/explain.md": planned,
    "docs/pipe.md": pipelined,
    "docs/planning.md": planned,
}


@pytest.fixture
def imports():
    """Takes back the old import names that a page installs."""
    before = set(sys.modules)
    yield
    installed = [
        name
        for name in set(sys.modules) - before
        if name.partition(".pipeline")[0] == "torch.distributed"
        and (name + ".").startswith("torch.distributed.pipeline.")
    ]
    for name in installed:
        del sys.modules[name]
    if installed:
        del torch.distributed.pipeline


@each(PAGES)
def test_blocks_say_what_they_are(page):
    fences = re.findall(r"^ *```", page.read_text(), re.M)
    assert len(fences) == 2 * len(blocks(page))
    for block in blocks(page):
        assert block.kind in KINDS, block.line
        assert block.code.strip(), block.line


@each([page for page in PROGRAMS if name_of(page) not in RUN_BY])
def test_programs_run(page, tmp_path, monkeypatch, imports):
    monkeypatch.chdir(tmp_path)
    given = GIVEN.get(name_of(page), dict)()
    names = {"__name__": "document", "torch": torch, "nn": nn, "pt": pt, **given}
    for block in blocks(page, "python"):
        where = f"{name_of(page)}:{block.line}"
        exec(compile("\n" * block.line + block.code, where, "exec"), names)


def test_whole_programs_are_run_by_the_tests_of_examples():
    assert set(RUN_BY) <= {name_of(page) for page in PROGRAMS}
    for page, test in RUN_BY.items():
        assert f'"{pathlib.Path(page).stem}' in (ROOT / test).read_text(), page


def chain(node):
    """`a.b.c` as a list of names; None if it begins with anything but a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None


@each([page for page in PAGES if name_of(page) in RUN_BY])
def test_names_of_the_package_exist(page):
    """Also where the program itself cannot run, for want of a package or of weights."""
    imported = {"pt": pt}
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and "pipetransformer" in node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), alias.name
            names = chain(node)
            if names and names[0] in imported:
                functools.reduce(getattr, names[1:], imported[names[0]])


def commands(page):
    """The commands of a page, each as words, without variables and comments."""
    for block in blocks(page):
        lines = block.code.replace("\\\n", " ").splitlines()
        if block.kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
            assert lines, block.line
        elif block.kind != "bash":
            continue
        for line in lines:
            words = shlex.split(line, comments=True)
            while words and re.match(r"\w+=", words[0]):
                del words[0]
            if words:
                yield words


@each([page for page in PAGES if list(commands(page))])
def test_commands_exist(page):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for program, *rest in commands(page):
        if program == "torchrun" and "pipetransformer" in rest:
            at = rest.index("pipetransformer")
            assert rest[at - 1] == "-m"
            program, rest = rest[at], rest[at + 1 :]
        if program == "pipetransformer":
            assert make_parser().parse_args(rest).run
        elif program == "make":
            assert rest[0] in targets
        elif program == "python":
            assert (ROOT / rest[0]).is_file(), rest
        else:
            assert program == "torchrun" or (ROOT / program).is_file(), program


@each([page for page in PAGES if blocks(page, "json")])
def test_json_is_json(page):
    for block in blocks(page, "json"):
        assert json.loads(block.code), block.line


def test_cpp_stands_in_the_source_that_the_page_is_about():
    (found,) = [(p, block) for p in PAGES for block in blocks(p, "cpp")]
    page, block = found
    assert name_of(page) == "docs/adding-an-op.md"
    source = (ROOT / "csrc/autofreeze/squared_norms.cpp").read_text()
    for line in block.code.splitlines():
        head = re.sub(r"( \.\.\. \})? *(//.*)?$", "", line)
        assert "".join(head.split()) in "".join(source.split()), line
