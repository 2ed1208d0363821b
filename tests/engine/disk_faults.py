"""Makes a disk fail at each operation of saves and resumes, one operation at a time.

    python -m tests.engine.disk_faults FOLDER [--saves 20] [--resumes 5]

A run saves, and is resumed, in one process. Each of its automatic saves is tried once
per operation on its folder, from the same files each time, and that one operation
fails: with an error, alone or with all that follow; by half a read or write; by another
byte than was written. So is each resume. Then the save or resume is done once on a slow
disk. What must hold after every one of these attempts is in `Judge`; the first that
does not ends the program.

Prints counts as JSON. Needs a C compiler and Linux.
"""

import argparse
import collections
import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import time

import torch

import pipetransformer as pt
from pipetransformer import autocache, planner
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import disk
from tests.engine.even_profile import even_profile, no_rates
from tests.engine.scenario import config, make_engine
from tests.support.private import run_of
from tests.support.toy import ToySet

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = pathlib.Path(__file__).with_suffix(".c")
COMPILER = shutil.which("gcc") or shutil.which("cc")
KEEP = 2
READ, WRITE, OTHER = 1, 2, 4
ANY = READ | WRITE | OTHER
FAIL, SHORT, LIE, SLOW, DEAD = 1, 2, 3, 4, 5
# Name -> which operations, what they do, and with which error.
SAVE_FAULTS = {
    "EIO": (ANY, FAIL, errno.EIO),
    "EACCES": (OTHER, FAIL, errno.EACCES),
    "ENOSPC": (WRITE, FAIL, errno.ENOSPC),
    "dead": (ANY, DEAD, errno.EIO),
    "short": (READ | WRITE, SHORT, 0),
    "changed": (READ | WRITE, LIE, 0),
}
RESUME_FAULTS = {
    "EIO": (ANY, FAIL, errno.EIO),
    "EMFILE": (OTHER, FAIL, errno.EMFILE),
    "ENOMEM": (ANY, FAIL, errno.ENOMEM),
    "ESTALE": (ANY, FAIL, errno.ESTALE),
    "dead": (ANY, DEAD, errno.EIO),
    "short": (READ | WRITE, SHORT, 0),
}
# Operations that must have been struck, or the library is not preloaded at all.
OF_SAVES = {"open", "close", "read", "write", "fsync", "rename", "unlink", "stat"}
OF_SAVES |= {"opendir", "readdir", "mkdir", "utime", "fstat", "lseek", "flock"}
OF_RESUMES = {"open", "close", "read", "stat", "opendir", "readdir", "unlink"}
OF_RESUMES |= {"mkdir", "fstat", "lseek", "flock"}


def build_shim():
    """Compile the library unless it is there already; return its path."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = ROOT / "build" / "tests" / f"disk_faults_{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        command = [COMPILER, "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        command += [str(SOURCE), "-ldl", "-o", str(partial)]
        subprocess.run(command, check=True, timeout=110)
        partial.replace(target)
    return target


class Shim:
    """The preloaded library of this process.

    Args:
        path: Of the library.
        folder: What is to fail.
    """

    def __init__(self, path, folder):
        self._library = ctypes.CDLL(path)  # the one that is loaded already
        self._library.disk_faults_disarm.restype = ctypes.c_char_p
        self._library.disk_faults_watch(os.fsencode(folder))
        self.struck = ""

    @contextlib.contextmanager
    def armed(self, number, fault):
        """Let one operation of the body fail; `struck` names it afterwards."""
        self._library.disk_faults_arm(ctypes.c_long(number), *fault)
        try:
            yield
        finally:
            self.struck = self._library.disk_faults_disarm().decode()


class Warnings(logging.Handler):
    """Collects what the library warns of where it reads and writes files."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        for name in ("autosave", "checkpoint", "files", "core.disk"):
            logging.getLogger(f"pipetransformer.{name}").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


class Folder:
    """The folder of checkpoints: what is in it, and how it was before."""

    def __init__(self, path):
        self.path = path

    def snapshot(self):
        """Return content and time of each regular file, by name."""
        files = [p for p in sorted(self.path.iterdir()) if p.is_file()]
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in files}

    def put_back(self, before):
        """Make the regular files those of a snapshot, all of them new ones."""
        for path in [p for p in self.path.iterdir() if p.is_file()]:
            path.unlink()
        for name, (data, time_ns) in before.items():
            path = self.path / name
            path.write_bytes(data)
            os.utime(path, ns=(time_ns, time_ns))


class Judge:
    """What must hold after an attempt.

    * Every checkpoint that was whole is there unchanged, or `KEEP` newer ones are, all
      of them whole: read to their ends, and loaded.
    * What has the name of a checkpoint is whole: no torn file took a place.
    * Nothing unfinished is left, but where its deletion is what failed.
    * A save that failed says so once, naming the file. One failure is one warning at
      most, of a save that was done too.
    * A resume goes on from the newest checkpoint, or ends in one error that names what
      could not be read. It never goes on from an older one, nor from the beginning.
    """

    def __init__(self, folder, warnings):
        self._folder = folder
        self._warnings = warnings

    def save(self, before, step, struck, fault):
        texts = self._warnings.texts
        now = self._folder.snapshot()
        new = checkpoint.path_of_step(self._folder.path, step).name
        unfinished = {name for name in now if name.startswith(".")}
        dead = fault[1] == DEAD
        may_be_left = dead or struck == "unlink"
        require(not unfinished or may_be_left, f"left behind: {unfinished}")
        checkpoints = {name: now[name] for name in now if name not in unfinished}
        order = sorted(checkpoints, key=lambda n: (checkpoints[n][1], n), reverse=True)
        for name in set(checkpoints) - set(before):
            require(name == new, f"an unknown file {name}")
            content = checkpoint.read(self._folder.path / name)
            require(content["progress"]["step"] == step, "another state was saved")
        for name, (data, time_ns) in before.items():
            if name in checkpoints:
                require(checkpoints[name][0] == data, f"{name} has changed")
            else:
                newer = [n for n in order if checkpoints[n][1] > time_ns]
                require(len(newer) >= KEEP, f"{name} is lost; there are {order}")
        require(dead or len(texts) <= 1, f"several warnings: {texts}")
        require(all(str(self._folder.path) in t for t in texts), f"unnamed: {texts}")
        failed = [t for t in texts if t.startswith(f"checkpoint of step {step} failed")]
        require(len(failed) <= 1, f"told more than once: {failed}")
        if new not in checkpoints:
            require(failed, f"a save failed without a word, at {struck}: {texts}")
            require(os.strerror(fault[2]) in failed[0] or fault[1] == LIE, failed[0])

    def resume(self, before, opened, error, fault):
        now = self._folder.snapshot()
        for name, (data, _) in before.items():
            if name.startswith("."):
                continue  # of a dead writer
            require(name in now and now[name][0] == data, f"{name} is lost")
        if error is None:
            newest = max(n for n in before if not n.startswith("."))
            found = checkpoint.path_of_step(self._folder.path, opened).name
            require(found == newest, f"went on from {found}, not {newest}")
            return
        kind = isinstance(error, OSError | ValueError)
        require(kind, f"expected an error of the disk, got {error!r}")
        text = str(error)
        require(str(self._folder.path) in text, f"an error without a name: {text}")
        require(os.strerror(fault[2]) in text, f"an error without its cause: {text}")


def require(holds, text):
    if not holds:
        raise AssertionError(text)


class Campaign:
    """Saves and resumes of one run, in parts of equal length.

    Args:
        folder: An empty one.
        shim: Watches it.
    """

    def __init__(self, folder, shim):
        self._folder = Folder(folder)
        self._shim = shim
        self._warnings = Warnings()
        self._judge = Judge(self._folder, self._warnings)
        self.struck = {"saves": collections.Counter(), "resumes": collections.Counter()}
        self.by_fault = collections.Counter()
        self.outcomes = collections.Counter()

    def train(self, epochs):
        """Go on up to an epoch, and strike the save at the end of each."""
        with self._engine() as engine:
            for _ in engine.epochs(epochs):
                for batch in engine.batches(ToySet(8), 8):
                    engine.step(batch)
                self._strike_saves(engine._open())
            # Leaving the body saves once more, undisturbed.

    def _strike_saves(self, coordinator):
        before = self._folder.snapshot()
        step = coordinator.run.state.step
        new = checkpoint.path_of_step(self._folder.path, step)

        def save():
            coordinator.autosave.after_epoch(coordinator.replica)

        for fault in self._each_fault("saves", SAVE_FAULTS, before, save):
            self._judge.save(before, step, self._shim.struck, fault)
            self.outcomes["saved" if new.exists() else "save failed"] += 1

    def resume(self):
        """Open the run again, once per operation."""
        dead = self._folder.path / f".step-0000000001.pt.{'0' * 16}.tmp"
        dead.write_bytes(b"half a file")
        before, ends = self._folder.snapshot(), []

        def resume():
            ends[:] = [None, None]
            try:
                with self._engine() as engine:
                    ends[0] = run_of(engine).state.step
            except Exception as error:
                ends[1] = error

        for fault in self._each_fault("resumes", RESUME_FAULTS, before, resume):
            self._judge.resume(before, *ends, fault)
            self.outcomes["resumed" if ends[1] is None else "resume refused"] += 1
        disk.clear_unfinished(self._folder.path)

    def _each_fault(self, kind, faults, before, act):
        """Yield each fault after `act` has met it, at one operation after the other."""
        for name, fault in faults.items():
            number = 0
            while True:
                number += 1
                self._folder.put_back(before)
                self._warnings.texts.clear()
                with self._shim.armed(number, fault):
                    act()
                if not self._shim.struck:
                    break  # it has no more operations
                self.struck[kind][self._shim.struck] += 1
                self.by_fault[name] += 1
                try:
                    yield fault
                except AssertionError as error:
                    where = f"{self._shim.struck}, operation {number}, {name}"
                    raise AssertionError(f"{kind}: {where}: {error}") from error
        self._folder.put_back(before)
        with self._shim.armed(1, (ANY, SLOW, 0)):
            act()
        require(self._shim.struck, "nothing was slow")
        self._folder.put_back(before)

    def _engine(self):
        wanted = pt.CheckpointConfig(
            directory=self._folder.path, keep=KEEP, resume=True, max_failures=10**9
        )
        return make_engine(
            freeze=pt.freeze.Never(), depth=1, config=config(checkpoint=wanted)
        )


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--resumes", type=int, default=5)
    parsed = parser.parse_args(arguments)
    shim = build_shim()
    if os.environ.get("LD_PRELOAD") != str(shim):
        command = [sys.executable, "-m", "tests.engine.disk_faults", *arguments]
        os.execve(sys.executable, command, {**os.environ, "LD_PRELOAD": str(shim)})
    torch.set_num_threads(1)
    planner.profile = even_profile
    autocache.measure_rates = no_rates
    folder = parsed.folder.resolve() / "checkpoints"
    folder.mkdir()
    os.mkfifo(folder / "step-0000009999.pt")  # no checkpoint, and nobody writes to it
    campaign = Campaign(folder, Shim(str(shim), folder))
    began = time.monotonic()
    for part in range(1, parsed.resumes + 1):
        campaign.train(part * parsed.saves // parsed.resumes)
        campaign.resume()
    saves, resumes = campaign.struck["saves"], campaign.struck["resumes"]
    for met, expected in ((saves, OF_SAVES), (resumes, OF_RESUMES)):
        require(set(met) >= expected, f"never struck: {expected - set(met)}")
    found = {
        "saves": parsed.saves,
        "resumes": parsed.resumes,
        "faults": sum(saves.values()) + sum(resumes.values()),
        "by_fault": dict(campaign.by_fault),
        "by_operation": {"saves": dict(saves), "resumes": dict(resumes)},
        "outcomes": dict(campaign.outcomes),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
