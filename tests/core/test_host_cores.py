"""The cores that a job has: the least that its cgroups and all above them allow."""

import math

import pytest

from pipetransformer._extension import host_cores
from tests.support import cgroups

PERIOD = 100_000  # microseconds


class Host(cgroups.Host):
    """A host with cpu cgroups.

    Args:
        root: Folder to build it in.
        version: Of the cpu cgroups.
    """

    def __init__(self, root, version):
        super().__init__(root, version, "cpu")

    def group(self, group, cores, point=None, period=PERIOD):
        """Make a group, or change it; None: without a limit."""
        folder = (point or self.default) + group
        if self.version == 2:
            quota = "max" if cores is None else int(cores * period)
            self.write(f"{folder}/cpu.max", f"{quota} {period}\n")
        else:
            quota = -1 if cores is None else int(cores * period)
            self.write(f"{folder}/cpu.cfs_quota_us", f"{quota}\n")
            self.write(f"{folder}/cpu.cfs_period_us", f"{period}\n")

    @property
    def cores(self):
        return host_cores(str(self.root))


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def host(request, tmp_path):
    return Host(tmp_path, request.param)


def test_without_cgroups_or_their_limits_no_cores_are_taken(host):
    assert host.cores == math.inf
    host.own("/job")
    host.mount()
    assert host.cores == math.inf  # the topmost group has no such file
    host.group("/job", None)
    assert host.cores == math.inf


def test_container_with_its_own_cgroup_namespace(host):
    host.own("/")
    host.mount()
    host.group("", 1.5)
    assert host.cores == 1.5
    host.group("", 0.25, period=50_000)
    assert host.cores == 0.25


@pytest.mark.parametrize(
    "groups", ["/slurm/uid_7/job_42/step_0", "/system.slice/a.scope/user/task_0"]
)
def test_the_tightest_of_all_groups_above_the_process_limits(host, groups):
    host.own(groups)
    host.mount()
    names = groups.split("/")[1:]
    parents = ["/" + "/".join(names[:n]) for n in range(1, len(names) + 1)]
    for group in parents:
        host.group(group, None)
    host.group("/another", 0.5)
    for n, group in enumerate(parents):
        host.group(group, 8 - n)
        assert host.cores == 8 - n
    host.group(parents[0], 2.5)
    assert host.cores == 2.5


def test_container_with_the_hosts_cgroup_namespace(host):
    # It knows its group by the host's name; the mount shows that group on top.
    host.own("/docker/ab/worker")
    host.mount(top="/docker/ab", point="/mnt/groups")
    host.group("", 3, point="/mnt/groups")
    host.group("/worker", 2, point="/mnt/groups")
    host.group("/worker", 1)  # the usual place, where nothing is mounted
    assert host.cores == 2


def test_cores_of_v1_beside_v2_without_them(tmp_path):
    # systemd's hybrid mode: v2 is mounted, its groups have no cpu files.
    host = Host(tmp_path, 1)
    host.own("/job")
    host.mount()
    line = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    host.write("/proc/self/mountinfo", line, mode="a")
    line = "32 31 0:29 / /sys/fs/cgroup/mem rw - cgroup cgroup rw,memory\n"
    host.write("/proc/self/mountinfo", line, mode="a")
    host.write("/sys/fs/cgroup/unified/cgroup.procs", "1\n")
    host.group("/job", 1, point="/sys/fs/cgroup/mem")
    host.group("/job", 4)
    assert host.cores == 4


@pytest.mark.parametrize("text", ["", "much\n", "-5\n", "0\n", "0 0\n", "\0"])
def test_files_that_make_no_sense_do_not_limit(host, text):
    host.own("/job/task")
    host.mount()
    host.group("/job", 2)
    host.group("/job/task", 1)
    for path in (host.root / host.default[1:] / "job/task").iterdir():
        path.write_text(text)
    assert host.cores == 2


@pytest.mark.parametrize("period", [0, -PERIOD])
def test_a_period_that_makes_no_sense_does_not_limit(host, period):
    host.own("/job")
    host.mount()
    host.group("/job", 1)
    if host.version == 2:
        host.write("/sys/fs/cgroup/job/cpu.max", f"{PERIOD} {period}\n")
    else:
        host.write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", f"{period}\n")
    assert host.cores == math.inf
