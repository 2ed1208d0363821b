#!/usr/bin/env python3
"""Checks who may include and import whom; the rules are the tables below.

Usage: ``python3 tools/check_layers.py [ROOT]``. Prints one line per finding and exits
with 1 if there is any. ``--list-torch-free`` prints the C++ files that must compile
without torch. Needs nothing but the standard library.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

PACKAGE = "pipetransformer"

# Room -> rooms it may use, in C++ as in Python. What is no room (the package's
# own `__init__` and `__main__`) may use all of them.
_FEATURES = frozenset({"planner", "pipe", "autodp", "autocache", "autofreeze"})
ARROWS: dict[str, frozenset[str]] = {
    # What a part of the work needs; most have a C++ side.
    "core": frozenset(),
    "skip": frozenset(),
    "network": frozenset(),
    "planner": frozenset({"core", "skip"}),
    "simulator": frozenset({"planner", "core"}),
    "device": frozenset({"core"}),
    "pipe": frozenset({"device", "planner", "core", "skip"}),
    "autodp": frozenset({"device", "core", "network"}),
    "autocache": frozenset({"device", "core", "skip"}),
    "autofreeze": frozenset({"device", "core", "skip"}),
    "data": frozenset({"core"}),
    "report": frozenset({"planner", "core"}),
    "explanation": frozenset({"report", "planner", "simulator", "core"}),
    # A run, bottom up: each room may use those above it in this list.
    "config": frozenset({"autodp"}),
    "state": frozenset({"autodp", "autofreeze", "core"}),
    "run": frozenset(
        {"state", "config", "data", "report", "device", "core"} | _FEATURES - {"pipe"}
    ),
    "replica": frozenset(
        {"run", "data", "report", "skip", "device", "core"} | _FEATURES - {"autofreeze"}
    ),
    "checkpoint": frozenset({"replica", "run", "state", "pipe", "core"}),
    "transformation": frozenset(
        {"replica", "run", "state", "data", "report", "explanation", "core"} | _FEATURES
    ),
    "progress": frozenset(
        {"transformation", "replica", "run", "data", "report", "autodp"}
        | {"device", "core"}
    ),
    "recovery": frozenset(
        {"progress", "transformation", "replica", "run", "state", "autodp", "core"}
    ),
    "loop": frozenset(
        {"recovery", "progress", "transformation", "checkpoint", "replica", "run"}
    )
    | {"state", "data", "report", "autodp", "autocache", "device", "core"},
    "engine": frozenset(
        {"loop", "progress", "transformation", "checkpoint", "replica", "run", "state"}
    )
    | {"config", "data", "report", "explanation", "planner", "autodp", "autofreeze"}
    | {"autocache", "pipe"}
    | {"core", "skip"},
    # At the edge.
    "testing": frozenset({"pipe", "planner", "simulator", "core"}),
    "cli": frozenset(
        {"explanation", "report", "simulator", "planner", "network", "autocache"}
    )
    | {"core", PACKAGE},  # its version
    "adapters": frozenset({"autocache", "pipe"}),
    "compat": frozenset({"pipe", "skip"}),
}
# The C++ room that joins the others to Python; nobody includes it.
BINDINGS = "python"

# Folders and single files (without suffix) of csrc that include no torch.
TORCH_FREE = (
    "core",
    "planner",
    "simulator",
    "autodp/store/board",
    "autodp/protocol/decision",
    "autodp/failure/failure",
    "autodp/failure/liveness",
    "autodp/membership/membership",
    "autodp/protocol/plan_message",
    "autodp/failure/run_state",
    "autodp/failure/task_thread",
    "autodp/store/text_lines",
    "autodp/protocol/transition",
    "autodp/protocol/transition_announce",
    "autofreeze/alpha_cap",
    "autocache/aligned_buffers",
    "autocache/codec",
    "autocache/codec_format",
    "autocache/disk_index",
    "autocache/disk_io",
    "autocache/disk_io_uring",
    "autocache/disk_meter",
    "autocache/disk_tier",
    "autocache/own_file",
    "autocache/shared_memory",
    "autocache/slab",
    "autocache/slot",
    "autocache/superblock",
    "pipe/cell_trace",
    "pipe/dispatch",
    "pipe/execution",
    "pipe/lanes",
    "pipe/rows",
    "pipe/worker_pool",
)

# What a header belongs to, by its path; the first match counts.
HEADER_KINDS = {
    "Python": r"Python\.h|pybind11/.*|torch/(extension|python)\.h"
    r"|torch/csrc/.*(pybind|python).*",
    "torch's CUDA": r"(ATen|c10|torch)/(.*/)?cuda/.*",
    "torch": r"(ATen|c10|c10d|caffe2|torch)/.*",
    "CUDA": r"cuda.*|cub/.*|nccl\.h|nvrtc\.h|thrust/.*",
}

# Python: a room uses its own part of the extension, core's and what is listed here.
EXTENSION = f"{PACKAGE}._C"
LOADER = f"{PACKAGE}._extension"  # counts as core
OTHER_PARTS = {"simulator": {"planner"}, "testing": {"planner", "simulator"}}
# What asks the loader, and what goes past it or gives the extension another name.
LOADING = f"'from {PACKAGE} import _C'"
PAST_LOADER = re.compile(rf"{PACKAGE}(\._C\b| import .*\b_C as )")
# The only modules that are in no room.
LOOSE = frozenset({LOADER, EXTENSION, f"{PACKAGE}.__main__", f"{PACKAGE}._build_info"})
NEVER_IMPORTED = frozenset({"tests", "benchmarks", "examples", "tools"})

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def main(arguments: list[str]) -> int:
    """Print the findings for a tree; 1 if there are any."""
    paths = [a for a in arguments if not a.startswith("--")]
    here = pathlib.Path(__file__).resolve().parent.parent
    root = pathlib.Path(paths[0]) if paths else here
    if "--list-torch-free" in arguments:
        for path in sorted((root / "csrc").rglob("*.cpp")):
            if is_torch_free(path.relative_to(root / "csrc")):
                print(path.relative_to(root))
        return 0
    findings = [*check_cpp(root), *check_python(root)]
    for finding in findings:
        print(finding)
    print(f"check_layers: {len(findings)} findings" if findings else "check_layers: ok")
    return 1 if findings else 0


# --- C++ ---------------------------------------------------------------------


def check_cpp(root: pathlib.Path) -> Iterator[str]:
    """Findings below csrc/."""
    csrc = root / "csrc"
    graph: dict[str, list[str]] = {}
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        name = path.relative_to(csrc)
        room = name.parts[0]
        if room not in ARROWS and room != BINDINGS:
            yield f"csrc/{name}: room {room} is not in the table of rooms"
            continue
        graph[name.as_posix()] = []
        for number, header in includes_of(path):
            where = f"csrc/{name}:{number}"
            if (csrc / header).is_file():
                graph[name.as_posix()].append(header)
                yield from check_own_include(where, room, header)
            else:
                yield from check_foreign_include(where, name, header)
    yield from cycles(graph, "include")


def includes_of(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Line and path of each include."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        found = INCLUDE.match(line)
        if found:
            yield number, found.group(2)


def check_own_include(where: str, room: str, header: str) -> Iterator[str]:
    """An include of the project's own header against the arrows."""
    target = header.split("/")[0]
    if target != room and room != BINDINGS and target not in ARROWS[room]:
        yield f"{where}: {room} must not include {header} ({may_use(room)})"


def check_foreign_include(
    where: str, name: pathlib.PurePath, header: str
) -> Iterator[str]:
    """An include of a header from elsewhere against what the file may see."""
    kind = next(
        (kind for kind, form in HEADER_KINDS.items() if re.fullmatch(form, header)),
        None,
    )
    is_kernel = name.suffix in {".cu", ".cuh"}
    if kind == "Python" and name.parts[0] != BINDINGS:
        yield f"{where}: only {BINDINGS} may include {header}"
    elif kind == "torch's CUDA":
        yield f"{where}: {header} is missing from a CPU torch; use c10's virtual guards"
    elif kind == "torch" and is_kernel:
        yield f"{where}: a kernel file must not include torch ({header})"
    elif kind == "CUDA" and not is_kernel:
        yield f"{where}: only kernel files (.cu, .cuh) may include {header}"
    if kind is not None and is_torch_free(name):
        yield f"{where}: torch-free code must not include {header}"
    if kind is None and is_room_header(header):
        yield f"{where}: {header} does not exist"


def is_room_header(header: str) -> bool:
    """Whether a header's path starts with one of our rooms."""
    return header.split("/")[0] in {*ARROWS, BINDINGS} and "/" in header


def is_torch_free(name: pathlib.PurePath) -> bool:
    """Whether a file of csrc/ is in ``TORCH_FREE``."""
    stem = name.with_suffix("").as_posix()
    return any(stem == entry or stem.startswith(entry + "/") for entry in TORCH_FREE)


def may_use(room: str) -> str:
    """The room's arrows in words."""
    allowed = ", ".join(sorted(ARROWS[room]))
    return f"it may use {allowed}" if allowed else "it may use no other room"


# --- Python ------------------------------------------------------------------


def check_python(root: pathlib.Path) -> Iterator[str]:
    """Findings below pipetransformer/."""
    files = {
        module_name(path.relative_to(root)): path
        for path in sorted((root / PACKAGE).rglob("*.py"))
    }
    graph: dict[str, list[str]] = {}
    for module, path in files.items():
        graph[module] = []
        room = room_of(module)
        if room is not None and room not in ARROWS:
            yield f"{path.relative_to(root)}: {room} is not in the table of rooms"
            continue
        tree = ast.parse(path.read_text(), filename=str(path))
        yield from check_extension(path.relative_to(root), module, tree)
        for number, target in imports_of(tree, module, path, files):
            where = f"{path.relative_to(root)}:{number}"
            yield from check_import(where, module, target)
            if target in files:
                graph[module].append(target)
    yield from cycles(graph, "import")


def module_name(path: pathlib.PurePath) -> str:
    """Dotted name of a source file."""
    parts = list(path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(
    tree: ast.Module, module: str, path: pathlib.Path, files: dict[str, pathlib.Path]
) -> Iterator[tuple[int, str]]:
    """Line and module of each import; ``from a import b`` is a.b if that exists.

    What only a type checker imports counts, too: it ties the two files together.
    A private name that is imported from another room is given as a.b.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level > 0:
                up = node.level - (1 if path.name == "__init__.py" else 0)
                parents = module.split(".")
                package = ".".join(parents[: len(parents) - up])
                base = f"{package}.{base}" if base else package
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in {*files, EXTENSION}
                is_private = alias.name.startswith("_") and alias.name[1:2] != "_"
                yield node.lineno, full if is_module or is_private else base


def check_extension(
    path: pathlib.PurePath, module: str, tree: ast.Module
) -> Iterator[str]:
    """How a module imports the extension, and whose parts of it it uses."""
    room = "core" if module == LOADER else room_of(module)
    parts = {room, "core"} | OTHER_PARTS.get(room, set()) if room else set()
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                if PAST_LOADER.search(ast.unparse(node)):
                    yield f"{path}:{node.lineno}: _C is imported as {LOADING} alone"
            case ast.Attribute(ast.Name("_C"), part) if part not in parts:
                yield f"{path}:{node.lineno}: {room} must not use _C.{part}"


def check_import(where: str, module: str, target: str) -> Iterator[str]:
    """One import against the arrows."""
    top, *rest = target.split(".")
    if top in NEVER_IMPORTED:
        yield f"{where}: the package must not import {target}"
    if top != PACKAGE:
        return
    room, target_room = room_of(module), room_of(target)
    if target in {LOADER, EXTENSION} or target_room == room:
        return
    if any(part.startswith("_") for part in rest):
        yield f"{where}: {target} is private to {target_room}"
    if room is None:
        return
    if (target_room or PACKAGE) not in ARROWS[room]:
        yield f"{where}: {room} must not import {target} ({may_use(room)})"


def room_of(module: str) -> str | None:
    """Room of a module; None for what joins the rooms, and for foreign modules."""
    parts = module.split(".")
    if parts[0] != PACKAGE or len(parts) < 2 or module in LOOSE:
        return None
    return parts[1]


# --- both --------------------------------------------------------------------


def cycles(graph: dict[str, list[str]], verb: str) -> Iterator[str]:
    """One finding per edge that closes a cycle, depth first."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        pending: list[tuple[str, Iterator[str]]] = []
        if start not in done:
            path.append(start)
            pending.append((start, iter(graph[start])))
        while pending:
            node, targets = pending[-1]
            target = next(targets, None)
            if target is None:
                pending.pop()
                path.pop()
                done.add(node)
            elif target in path:
                circle = [*path[path.index(target) :], target]
                yield f"cycle of {verb}s: {' -> '.join(circle)}"
            elif target not in done and target in graph:
                path.append(target)
                pending.append((target, iter(graph[target])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
