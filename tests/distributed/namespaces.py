"""Two hosts as network namespaces of one machine, joined by a pair of interfaces.

    host 0: lo, 10.77.0.1 ---- cable ---- 10.77.0.2, lo :host 1

Needs Linux, root and iproute2. Nothing of the machine's own network is touched.
"""

import ctypes
import os
import shutil
import subprocess

NODES = range(2)
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:99"  # no interface has this hardware address


def missing():
    """Return why there can be no namespaces here, None where there can."""
    if shutil.which("ip") is None:
        return "no `ip` command (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pt-{os.getpid()}-try"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode != 0:
        return f"no network namespaces: {probe.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def _ip(*arguments):
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        text = done.stderr.strip()
        raise RuntimeError(f"{' '.join(command)}: expected status 0, got: {text}")
    return done.stdout


def enter(name):
    """Move the calling thread, and what it starts, to the namespace `name`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")


class TwoHosts:
    """Makes the hosts; as a context manager it removes them whatever happens."""

    def __init__(self):
        self.names = [f"pt-{os.getpid()}-{node}" for node in NODES]

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_):
        self._remove()

    @staticmethod
    def address(node):
        return f"10.77.0.{1 + node}"

    def _make(self):
        for name in self.names:
            _ip("netns", "add", name)
            enter_and_run = ["ip", "netns", "exec", name, "sysctl", "-qw"]
            off = "net.ipv6.conf.all.disable_ipv6=1"
            subprocess.run([*enter_and_run, off], check=True, timeout=30)
        first, second = self.names
        _ip(
            *("link", "add", "cable0", "netns", first, "type", "veth"),
            *("peer", "name", "cable1", "netns", second),
        )
        for node, name in enumerate(self.names):
            _ip("-n", name, "addr", "add", f"{self.address(node)}/24", *_of(node))
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"cable{node}", "up")

    def _remove(self):
        for name in self.names:
            if os.path.exists(f"/run/netns/{name}"):
                for pid in _ip("netns", "pids", name).split():
                    os.kill(int(pid), 9)
                _ip("netns", "del", name)

    def listening(self, node):
        """Return where the host's processes listen: ``ADDRESS:PORT``, as `ss` says."""
        lines = _ip("netns", "exec", self.names[node], "ss", "-ltnH").splitlines()
        return sorted(line.split()[3] for line in lines)

    def unplug(self):
        """Take the link down: both ends know that they have no carrier."""
        _ip("-n", self.names[1], "link", "set", "cable1", "down")

    def plug(self):
        """Bring the link up again."""
        _ip("-n", self.names[1], "link", "set", "cable1", "up")

    def swallow(self, nodes=NODES):
        """Let every packet of `nodes` vanish while both ends see a good link."""
        for node in nodes:
            entry = ("lladdr", _NOBODY, "nud", "permanent")
            self._neighbour("replace", node, *entry)

    def heal(self):
        """Let packets through again."""
        for node in NODES:
            self._neighbour("replace", node, "nud", "delay")
            self._neighbour("del", node)

    def _neighbour(self, what, node, *entry):
        """Change what host `node` knows of where the other one is."""
        other = self.address(1 - node)
        _ip("-n", self.names[node], "neigh", what, other, *entry, *_of(node))


def _of(node):
    return "dev", f"cable{node}"
