"""A made-up host: its /proc, and the cgroups that limit this process there."""


class Host:
    """A made-up /proc and the cgroups that are mounted on it.

    Args:
        root: Folder to build it in.
        version: Of the cgroups.
        controller: "cpu" or "memory": of v1, whose folder the usual mount is; it has
            both.
    """

    def __init__(self, root, version, controller):
        self.root, self.version = root, version
        self.default = "/sys/fs/cgroup" + (f"/{controller}" if version == 1 else "")
        self.write("/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n")

    def write(self, path, text, mode="w"):
        path = self.root / path.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(text)

    def own(self, group):
        """Say which group this process is in."""
        lines = {
            1: f"9:name=systemd:/x\n4:cpu,memory:{group}\n1:cpuset:/\n0::/unified\n",
            2: f"0::{group}\n",
        }
        self.write("/proc/self/cgroup", lines[self.version])

    def mount(self, top="/", point=None):
        """Mount the hierarchy, or the part of it from the group `top` on."""
        kind = {1: "cgroup cgroup rw,cpu,memory", 2: "cgroup2 cgroup2 rw,nsdelegate"}
        line = f"35 31 0:32 {top} {point or self.default} rw,relatime shared:9"
        more = f"{line} - {kind[self.version]}\n"
        self.write("/proc/self/mountinfo", more, mode="a")
