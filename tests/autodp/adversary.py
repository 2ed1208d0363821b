"""Somebody who reaches the port of a run's store, and of its groups, and has no secret.

``python -m tests.autodp.adversary --port P [--run-id ID] [--pids P ...]`` sends as
many messages as ``--messages`` says and prints how many of each kind as JSON. With
``--pace FILE`` it writes there how far it is. Nothing it does needs the project.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore

HOST = "127.0.0.1"
LARGEST = 10_000_000  # bytes
HIDDEN = "pt/[0-9a-f]{64}"  # a run's keys if it has a secret
LONGEST_BEAT = 32 + 3  # bytes: a seal and a number
WAIT = timedelta(seconds=20)
RANKS = 4
CALL = "0123456789abcdef" * 2
# Every key of the protocol, below a run's prefix, in docs/protocol.md's order.
KEYS = [
    "hb/{r}",
    "gen/{g}/abort",
    "gen/{g}/seen/{r}",
    "roll/{g}/{r}",
    "roll/{g}/list",
    "gen/{g}/lost",
    "gen/{g}/gather/signature/{r}",
    "gen/{g}/gather/plan/{r}",
    "head",
    "decision/{e}",
    "plan/{e}",
    "here/{e}/{r}",
    "ack/{e}/{r}",
    "gen/{g}/g/{e}/0/{r}",
    "gen/{g}/finish/{r}",
    "gen/{g}/left/{r}",
    "profile",
    "gen/{g}/pos/{e}",
    "slab/{r}/training",
    "slab/{r}/evaluation",
    "signature/text/{r}",
]
MEETING = [
    "pt/meet/4/call",
    f"pt/meet/4/{CALL}/{{r}}",
    f"pt/meet/4/{CALL}/end",
    f"pt/meet/4/{CALL}/hb/{CALL}",
    "pt/card/{r}",
]
VALUES = [
    b"failure 1\n1\n3\n-1.0\nheartbeat\nno heartbeat",
    b"failure 1\n99999999\n-5\nnan\n\x1b]0;x\x07\n\x1b[2J" + b"\xff" * 9,
    b"COMMIT",
    b"ABORT\n0,1,2,3\n0\nnever mind",
    b"OPEN",
    b"7\n0\n1",
    b"999999999999\n0\n0",
    b"ok",
    b"refused\nno",
    b"leaves",
    b"stays\n{}",
    b"2 3",
    b"1",
    b"-1",
    b"12345678901234567890123",
    b'{"pid": 1, "fd": 3, "slots": 1e400}',
    b"plan 1\n3\nx\ny\n0\n0,1\nz\n0123456789abcdef",
    f"gone 2\n{CALL}".encode(),
    CALL.encode(),
    b"",
]


def listening_ports(pids):
    """Return the ports that processes listen at, as /proc tells them."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if found := re.fullmatch(r"socket:\[(\d+)\]", target):
                        sockets.add(found[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                if fields[3] == "0A" and fields[9] in sockets:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


class Adversary:
    """Sends one message after the other.

    Args:
        port: Of the store.
        run_id: What is known of the run's prefix; a guess will do.
        pids: The ranks' processes, whose groups' ports are tried, too.
        seed: Equal seeds send the same, as far as it does not depend on the run.
        destroys: Whether keys that the store lists are overwritten and removed.
    """

    def __init__(self, port, run_id, pids, seed, *, destroys=False):
        self.port, self.run_id, self.pids = port, run_id, pids
        self.random = random.Random(seed)
        self.store = TCPStore(HOST, port, timeout=WAIT)
        self.counts = collections.Counter()
        self.open = collections.deque(maxlen=20)
        self.seen = {}  # what the run's keys held
        self.others = set()  # those of them that are no beats
        self.spared = set()  # beats that were written over; the next one stays
        self.kinds = {
            self.random_key: 20,
            self.crafted: 45,
            self.compare: 15,
            self.counter: 5,
            self.removal: 5,
            self.replay: 10,
            self.beat: 5,
            self.store_port: 2,
            self.group_port: 3,
        }
        if destroys:
            self.kinds[self.destroy] = 20

    def send(self):
        (kind,) = self.random.choices([*self.kinds], [*self.kinds.values()])
        # A store that shuts the door on this client ends no other message.
        try:
            self.counts[kind() or kind.__name__] += 1
        except RuntimeError as error:
            self.counts[f"refused: {type(error).__name__}"] += 1
            self.store = TCPStore(HOST, self.port, timeout=WAIT)

    def garbage(self):
        size = int(2 ** self.random.uniform(0, 12))
        if self.random.random() < 0.002:
            size = self.random.randint(0, LARGEST)
        return self.random.randbytes(size)

    def value(self):
        known = self.random.choice(VALUES)
        return self.random.choice([known, known, self.garbage(), known[:-1]])

    def name(self):
        pattern = self.random.choice(KEYS + MEETING)
        key = pattern.format(
            r=self.random.randrange(RANKS),
            g=self.random.randrange(2),
            e=self.random.randrange(6),  # stale, current and future plan epochs
        )
        return key if pattern in MEETING else f"pt/{self.run_id}/{key}"

    def random_key(self):
        self.store.set(self.random.randbytes(8).hex(), self.garbage())

    def crafted(self):
        self.store.set(self.name(), self.value())

    def compare(self):
        self.store.compare_set(self.name(), "", "COMMIT")

    def counter(self):
        self.store.add(f"adversary/{self.name()}", 1)

    def removal(self):
        self.store.delete_key(self.name())

    def listed(self, pattern="(?s:.*)"):
        """Return a key that is on the store; a torch that lists none has none."""
        names = self.store.list_keys() if hasattr(self.store, "list_keys") else []
        names = [name for name in names if re.fullmatch(pattern, name)]
        return self.random.choice(names) if names else None

    def replay(self):
        """Write what a rank wrote under the names of other keys."""
        source = self.listed()
        if source is None:
            return "replay of nothing"
        self.store.set(self.name(), self.taken(source))
        return None

    def taken(self, key):
        absent = "adversary: absent"
        return self.store.compare_set(key, absent, absent)

    def hidden(self):
        """Return the run's keys, of which nothing but hashes can be seen."""
        names = self.store.list_keys() if hasattr(self.store, "list_keys") else []
        return [name for name in names if re.fullmatch(HIDDEN, name)]

    def beat(self):
        """Write over what a rank wrote a moment ago, once for every two beats.

        Which keys are beats their values tell: they are the shortest ones that change.
        Of a rank of which no beat is left the others rightly say that it is lost.
        """
        beats = []
        for key in self.hidden():
            if key in self.others:
                continue
            before, now = self.seen.get(key), self.taken(key)
            self.seen[key] = now
            if before is None and len(now) > LONGEST_BEAT:
                self.others.add(key)
            elif before not in (None, now) and len(now) <= LONGEST_BEAT:
                if key not in self.spared:
                    beats.append(key)
                self.spared.discard(key)
        if not beats:
            return "beat: none new"
        key = self.random.choice(beats)
        another = self.random.choice([name for name in self.seen if name != key])
        cut = self.seen[key][:-1]
        value = self.random.choice([self.garbage(), self.seen[another], cut])
        self.store.set(key, value)
        self.seen[key] = value
        self.spared.add(key)
        return None

    def destroy(self):
        key = self.listed(HIDDEN)
        if key is None:
            return "destruction of nothing"
        if self.random.random() < 0.5:
            self.store.set(key, self.garbage())
        else:
            self.store.delete_key(key)
        return None

    def store_port(self):
        self.connect(self.port)

    def group_port(self):
        ports = sorted(listening_ports(self.pids) - {self.port})
        if not ports:
            return "group_port: none open"
        self.connect(self.random.choice(ports))
        return None

    def connect(self, port):
        """Send garbage and hang up, or stay."""
        with contextlib.suppress(OSError):
            stream = socket.create_connection((HOST, port), timeout=2)
            self.open.append(stream)
            stream.sendall(self.garbage())
            if self.random.random() < 0.5:
                stream.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--run-id", default="0" * 32)
    parser.add_argument("--pids", type=int, nargs="*", default=[])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--destroys", action="store_true")
    parser.add_argument("--pace")
    options = parser.parse_args()
    begin = time.monotonic()
    adversary = Adversary(
        options.port,
        options.run_id,
        options.pids,
        options.seed,
        destroys=options.destroys,
    )
    for sent in range(1, options.messages + 1):
        adversary.send()
        if options.pace and (sent % 100 == 0 or sent == options.messages):
            with open(f"{options.pace}.new", "w") as file:
                file.write(str(sent))
            os.replace(f"{options.pace}.new", options.pace)
    seconds = time.monotonic() - begin
    print(json.dumps({"seconds": round(seconds, 1), **adversary.counts}))


if __name__ == "__main__":
    main()
