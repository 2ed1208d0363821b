"""The memory that a job has: the machine's, less what its cgroups do not give."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from pipetransformer._extension import host_memory
from tests.support import cgroups

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
TOTAL = 8192 * MIB
FREE = 4096 * MIB
NO_LIMIT = 9223372036854771712  # what v1 shows where none is set


class Host(cgroups.Host):
    """A host with a memory and memory cgroups.

    Args:
        root: Folder to build it in.
        version: Of the memory cgroups.
    """

    def __init__(self, root, version):
        super().__init__(root, version, "memory")
        self.write(
            "/proc/meminfo",
            f"MemTotal: {TOTAL // 1024} kB\nMemFree: 5 kB\n"
            f"MemAvailable: {FREE // 1024} kB\n",
        )

    def group(self, group, limit, used=0, point=None, **stat):
        """Make a group, or change it; sizes in MiB."""
        folder = (point or self.default) + group
        names = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            2: ("memory.max", "memory.current"),
        }[self.version]
        limit = limit * MIB if isinstance(limit, int) else limit
        self.write(f"{folder}/{names[0]}", f"{limit}\n")
        self.write(f"{folder}/{names[1]}", f"{used * MIB}\n")
        lines = [f"{name} {mib * MIB}\n" for name, mib in stat.items()]
        self.write(f"{folder}/memory.stat", "".join(["anon 7\n", *lines, "file 9\n"]))

    def read(self):
        return host_memory(str(self.root))

    @property
    def limit(self):
        return self.read().limit_bytes / MIB

    @property
    def available(self):
        return self.read().available_bytes / MIB


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def host(request, tmp_path):
    return Host(tmp_path, request.param)


@pytest.fixture
def host_v1(tmp_path):
    return Host(tmp_path, 1)


@pytest.fixture
def host_v2(tmp_path):
    return Host(tmp_path, 2)


def test_without_cgroups_the_machine_alone_limits(host):
    memory = host.read()
    assert (memory.total_bytes, memory.limit_bytes) == (TOTAL, TOTAL)
    assert (memory.available_bytes, memory.limited_by) == (FREE, "")


def test_a_group_without_a_limit_or_above_the_machines_does_not_limit(host):
    host.own("/")
    host.mount()
    for limit in ("max" if host.version == 2 else str(NO_LIMIT), 2 * TOTAL // MIB):
        host.group("", limit, 300)
        assert (host.limit, host.available) == (TOTAL / MIB, FREE / MIB)
        assert host.read().limited_by == ""


def test_container_with_its_own_cgroup_namespace(host):
    host.own("/")
    host.mount()
    host.group("", 1000, 300)
    assert (host.limit, host.available) == (1000, 700)


def test_container_with_the_hosts_cgroup_namespace(host):
    # It knows its group by the host's name; the mount shows that group on top.
    host.own("/docker/ab/worker")
    host.mount(top="/docker/ab")
    host.group("", 1000, 300)
    host.group("/worker", 900, 100)
    assert (host.limit, host.available) == (900, 700)


def test_container_whose_mount_does_not_name_its_group(host):
    host.own("/docker/gone")
    host.mount()
    host.group("", 1000, 300)
    assert (host.limit, host.available) == (1000, 700)


def test_group_outside_of_the_namespace_is_not_looked_for_above_the_mount(host):
    host.own("/../outside")
    host.mount()
    host.group("", 1000, 300)
    host.group("/../outside", 50)
    assert host.limit == 1000
    # A mount made outside of the namespace does show it.
    host.mount(top="/..", point="/mnt/all")
    host.group("/outside", 60, point="/mnt/all")
    assert host.limit == 60


@pytest.mark.parametrize(
    ("version", "groups"),
    [
        pytest.param(1, "/slurm/uid_7/job_42/step_0/task_0", id="slurm-v1"),
        pytest.param(
            2,
            "/system.slice/slurmstepd.scope/job_42/step_0/user/task_0",
            id="slurm-v2",
        ),
        pytest.param(
            2, "/user.slice/user-7.slice/user@7.service/app.slice/a.scope", id="systemd"
        ),
    ],
)
def test_the_tightest_of_all_groups_above_the_process_limits(tmp_path, version, groups):
    host = Host(tmp_path, version)
    host.own(groups)
    host.mount()
    names = groups.split("/")[1:]
    parents = ["/" + "/".join(names[:n]) for n in range(1, len(names) + 1)]
    for group in parents:
        host.group(group, "max" if version == 2 else str(NO_LIMIT), 5)
    host.group("/another", 10)
    for n, group in enumerate(parents):
        host.group(group, 900 - n, 100)
        memory = host.read()
        assert memory.limit_bytes == (900 - n) * MIB
        assert memory.available_bytes == (800 - n) * MIB
        assert memory.limited_by == f"{tmp_path}{host.default}{group}"
    host.group(parents[0], 900, 850)  # other jobs took it
    assert host.available == 50


def test_mounts_are_found_wherever_they_are(host):
    point = "/mnt/my groups\t\\"
    host.own("/job")
    host.mount(point="/mnt/my\\040groups\\011\\134")
    host.group("/job", 700, 100, point=point)
    host.group("/job", 20)  # the usual place, where nothing is mounted
    assert (host.limit, host.available) == (700, 600)


def test_of_several_mounts_those_that_show_the_own_group_count(host):
    host.own("/docker/a/job")
    for place, top in enumerate(["/docker/a", "/docker/a/j", "/docker", "/other"]):
        host.mount(top=top, point=f"/mnt/{place}")
    host.group("/job", 900, point="/mnt/0")
    host.group("ob", 10, point="/mnt/1")
    host.group("", 15, point="/mnt/1")
    host.group("", 800, point="/mnt/2")
    host.group("", 20, point="/mnt/3")
    assert host.limit == 800


def test_memory_of_v1_beside_v2_without_memory(host_v1):
    # systemd's hybrid mode: v2 is mounted, its groups have no memory files.
    host_v1.own("/job")
    host_v1.mount()
    line = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    host_v1.write("/proc/self/mountinfo", line, mode="a")
    line = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    host_v1.write("/proc/self/mountinfo", line, mode="a")
    host_v1.write("/sys/fs/cgroup/unified/cgroup.procs", "1\n")
    host_v1.group("/job", 30, point="/sys/fs/cgroup/cpu")
    host_v1.group("/job", 700, 100)
    assert (host_v1.limit, host_v1.available) == (700, 600)


def test_what_the_kernel_can_take_back_counts_as_available(host):
    host.own("/")
    host.mount()
    prefix, more = ("total_", 0) if host.version == 1 else ("", 30)
    cached = {f"{prefix}inactive_file": 100, f"{prefix}active_file": 50}
    if more:
        cached["slab_reclaimable"] = more
    host.group("", 1000, 300, **cached)
    assert host.available == 850 + more
    host.group("", 1000, 120, **cached)
    assert (host.limit, host.available) == (1000, 1000)


def test_nothing_is_available_above_the_limit(host):
    host.own("/")
    host.mount()
    host.group("", 100, 300)
    assert (host.limit, host.available) == (100, 0)


def test_a_group_that_is_slowed_down_above_a_size_is_limited_to_it(host_v2):
    host_v2.own("/job")
    host_v2.mount()
    host_v2.group("/job", 1000, 100)
    host_v2.write("/sys/fs/cgroup/job/memory.high", f"{600 * MIB}\n")
    assert (host_v2.limit, host_v2.available) == (600, 500)


def test_v1_tells_the_limits_above_what_a_container_sees(host_v1):
    host_v1.own("/")
    host_v1.mount()
    host_v1.group("", 1000, 100, hierarchical_memory_limit=700)
    assert (host_v1.limit, host_v1.available) == (700, 600)


def test_a_removed_group_leaves_those_above_it(host):
    host.own("/job/gone (deleted)")
    host.mount()
    host.group("/job", 1000, 100)
    assert host.limit == 1000


@pytest.mark.parametrize("text", ["", "much\n", "-5\n", "0x10\n", "\0"])
def test_files_that_make_no_sense_do_not_fail(host, text):
    host.own("/job")
    host.mount()
    host.group("/job", 1000, 100)
    for path in (host.root / host.default[1:] / "job").iterdir():
        path.write_text(text)
    memory = host.read()
    assert memory.available_bytes <= memory.limit_bytes <= memory.total_bytes


def test_any_text_under_proc_is_read_without_a_fault(tmp_path):
    draw = random.Random(7)
    host = Host(tmp_path, 2)
    pieces = ["0::", "4:memory:", ":", "/", "/..", "/a", "\n", " ", "\\", "\\04", "-"]
    pieces += [" - cgroup2 x rw", " - cgroup x rw,memory", "\\057", ",", "1 2 3 / /a"]
    for _ in range(2000):
        for name in ("cgroup", "mountinfo"):
            text = "".join(draw.choices(pieces, k=draw.randrange(40)))
            host.write(f"/proc/self/{name}", text)
        assert host.limit == TOTAL / MIB


def test_a_machine_that_does_not_tell_its_memory_is_an_error(host):
    for text in ("", "MemTotal: much kB\n"):
        host.write("/proc/meminfo", text)
        with pytest.raises(RuntimeError, match="meminfo: expected a line MemTotal"):
            host.read()


# --- a real group --------------------------------------------------------------

READERS = """
import json
from pipetransformer.autocache import ActivationCache
from pipetransformer.cli.machine import read_facts
from pipetransformer._extension import host_memory
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.toy import ToySet

try:
    ActivationCache.create(  # more than the group may have
        run_id="r", num_samples=3, slot_bytes=1 << 30, budget_bytes=4 << 30
    )
    refusal = ""
except OSError as error:
    refusal = str(error)
with make_engine(freeze=schedule(1), config=config()) as engine:
    engine.prepare(ToySet(24), 12)
    run = run_of(engine)
    facts, memory = read_facts({}), host_memory()
    print(json.dumps({
        "slot": run.inputs.cluster.device_memory_bytes * run.num_slots,
        "cache": run.caches.budget_bytes() * 4,
        "doctor": facts.memory_limit,
        "limited_by": facts.memory_limited_by,
        "limit": memory.limit_bytes,
        "available": memory.available_bytes,
        "refusal": refusal,
    }))
"""


@pytest.fixture
def real_group():
    """A memory cgroup with a limit of 2 GiB; yields its folder."""
    lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    groups = {line.split(":")[1]: line.split(":", 2)[2] for line in lines}
    if "memory" in groups:
        parent = pathlib.Path("/sys/fs/cgroup/memory" + groups["memory"])
        name = "memory.limit_in_bytes"
    else:  # alongside this process's: a group with processes has no groups below
        parent = pathlib.Path("/sys/fs/cgroup" + groups.get("", "/")).parent
        name = "memory.max"
    folder = parent / f"pipetransformer-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make a memory cgroup: {error}")
    try:
        try:
            (folder / name).write_text(str(2 << 30))
        except OSError as error:
            pytest.skip(f"this user may not limit a memory cgroup: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_cache_planner_and_doctor_follow_the_limit_of_a_real_group(real_group):
    enter = f'echo $$ > {real_group}/cgroup.procs && exec "$@"'
    run = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-c", READERS],
        cwd=ROOT,
        timeout=200,
        capture_output=True,
        text=True,
    )
    if "cgroup.procs" in run.stderr:
        pytest.skip(f"this user may not enter its memory cgroup: {run.stderr}")
    assert run.returncode == 0, run.stderr[-4000:]
    seen = json.loads(run.stdout.splitlines()[-1])
    limit = 2 << 30
    assert seen["limit"] == seen["doctor"] == limit
    assert seen["limited_by"] == str(real_group)
    assert limit - 1000 < seen["slot"] <= limit
    assert 0 < seen["available"] < limit
    assert 0 < seen["cache"] < limit
    assert "reserve 3221" in seen["refusal"]
