"""Files are written in one place, so that a fault of the disk has one answer."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "pipetransformer"
OF_MODULES = {
    "os": {
        "open",
        "fdopen",
        "replace",
        "rename",
        "link",
        "symlink",
        "mkdir",
        "makedirs",
    },
    "shutil": {"copy", "copy2", "copyfile", "move"},
    "files": set(),  # the rooms' own, which use it
    "tempfile": {"mkstemp", "NamedTemporaryFile", "TemporaryFile", "mkdtemp"},
}
OF_PATHS = {"write_text", "write_bytes", "touch", "mkdir", "rename", "hardlink_to"}
# Besides core/disk.py: devices and FIFOs, which take no other way, and no file at all.
ELSEWHERE = {("core/text_files.py", "open"), ("cli/output.py", "open")}


def opens_to_write(call, *, place):
    """Tell whether a call of some `open` has a mode that allows writing."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    modes = [*call.args[place : place + 1], *named]
    texts = [m.value for m in modes if isinstance(m, ast.Constant)]
    return any(set("wax+") & set(text) for text in texts if isinstance(text, str))


def writes(tree):
    """Yield what each call that may write or make a file is named."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        called = call.func
        if isinstance(called, ast.Name):
            if called.id == "open" and opens_to_write(call, place=1):
                yield "open"
        elif isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            known = called.attr in OF_MODULES.get(owner, OF_PATHS)
            if known or called.attr == "open" and opens_to_write(call, place=0):
                yield called.attr


def found():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for call in writes(ast.parse(path.read_text())):
            yield name, call


def test_files_are_written_by_core_disk_alone():
    calls = set(found())
    assert {call for call in calls if call[0] != "core/disk.py"} == ELSEWHERE
    assert {("core/disk.py", "open"), ("core/disk.py", "replace")} <= calls
