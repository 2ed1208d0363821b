"""Child processes are timed as a tree and never outlive their deadline."""

import sys
import time
from pathlib import Path

import pytest

from harness.child import RunFailed, run_child

# A grandchild in a session of its own, as torchrun starts its workers.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
BUSY = """
import time
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
"""


def _run(code, tmp_path, **options):
    command = [sys.executable, "-c", code]
    options = {"timeout_s": 150.0, "log": tmp_path / "logs" / "run.log", **options}
    return run_child(command, **options)


def _is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_cpu_time_counts_the_children_of_children(tmp_path):
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
    sample = _run(nested, tmp_path)
    assert sample.cpu_s >= 0.3
    assert sample.wall_s > 0


def test_failed_child_names_command_status_and_end_of_log(tmp_path):
    code = "import sys; print('line'); print('last words'); sys.exit(3)"
    with pytest.raises(RunFailed) as caught:
        _run(code, tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{sys.executable} -c {code}: expected status 0")
    assert "got status 3" in text
    assert text.endswith(f"end of {tmp_path / 'logs' / 'run.log'}:\nline\nlast words")


def test_child_killed_by_a_signal_is_a_failure(tmp_path):
    with pytest.raises(RunFailed, match="got status -9"):
        _run("import os; os.kill(os.getpid(), 9)", tmp_path)


def test_timeout_leaves_no_process_of_the_tree(tmp_path):
    log = tmp_path / "run.log"
    with pytest.raises(RunFailed, match=r"within 8 s, got no end; killed"):
        _run(FAMILY, tmp_path, timeout_s=8.0, log=log)
    child, grandchild = map(int, log.read_text().split())
    assert not Path(f"/proc/{child}").exists()  # killed and reaped
    deadline = time.monotonic() + 60.0
    while _is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(grandchild)


def test_child_gets_the_environment_it_is_given(tmp_path):
    code = "import os, sys; sys.exit('HOME' in os.environ or os.environ['ONLY'] != '1')"
    _run(code, tmp_path, env={"ONLY": "1"})
