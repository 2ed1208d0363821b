"""What may still be reserved: the machine's free memory and the cgroups' rest."""

import errno
import resource

import pytest

from pipetransformer.autocache import ActivationCache, _binding, available_memory

MIB = 1 << 20
FREE = 4096 * MIB
NO_LIMIT = 9223372036854771712  # what v1 shows where none is set


@pytest.fixture
def machine(tmp_path):
    """A root with 4 GiB free; ``machine(**files)`` adds files and asks."""

    def ask(files):
        for name, text in {
            "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {FREE // 1024} kB\n",
            **files,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return _binding.available_memory(f"{tmp_path}/")

    return ask


def v2(limit, used, cached=0, group=""):
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 7\nfile 9\ninactive_file {cached}\n",
    }


def v1(limit, used, cached=0, group=""):
    folder = f"sys/fs/cgroup/memory{group}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
    }


def own(text):
    return {"proc/self/cgroup": text}


KINDS = pytest.mark.parametrize(
    ("kind", "line"), [(v2, "0::"), (v1, "1:name=systemd:/x\n4:cpu,memory:")]
)


@KINDS
def test_limit_of_the_container_counts_less_what_is_used(machine, kind, line):
    assert machine(kind(1000 * MIB, 300 * MIB)) == 700 * MIB


@KINDS
def test_cached_files_count_as_free(machine, kind, line):
    assert machine(kind(1000 * MIB, 300 * MIB, cached=100 * MIB)) == 800 * MIB
    assert machine(kind(1000 * MIB, 300 * MIB, cached=400 * MIB)) == 1000 * MIB


@KINDS
def test_nothing_is_left_above_the_limit(machine, kind, line):
    assert machine(kind(100 * MIB, 300 * MIB)) == 0


@KINDS
def test_the_machine_limits_where_the_container_does_not(machine, kind, line):
    assert machine({}) == FREE
    assert machine(kind("max" if kind is v2 else NO_LIMIT, 300 * MIB)) == FREE
    assert machine(kind(2 * FREE, 300 * MIB)) == FREE


@KINDS
def test_the_tightest_group_above_the_process_limits(machine, kind, line):
    # As a batch system sets it, on a machine without containers.
    files = {
        **own(f"{line}/job/step\n"),
        **kind(1000 * MIB, 300 * MIB, group="/job"),
        **kind(900 * MIB, 100 * MIB, group="/job/step"),
        **kind(50 * MIB, 0, group="/another"),
    }
    assert machine(files) == 700 * MIB
    assert machine(kind(900 * MIB, 400 * MIB, group="/job/step")) == 500 * MIB


@KINDS
@pytest.mark.parametrize("group", ["/", "/docker/gone", "/../outside", "", "x"])
def test_a_group_that_is_not_there_does_not_limit(machine, kind, line, group):
    files = {**own(f"{line}{group}\n"), **kind(1000 * MIB, 300 * MIB)}
    outside = kind(50 * MIB, 0, group="/../outside")
    assert machine({**files, **outside}) == 700 * MIB


def test_both_kinds_limit_where_both_are_mounted(machine):
    files = {**v2(1000 * MIB, 0), **v1(800 * MIB, 100 * MIB)}
    assert machine(files) == 700 * MIB
    assert machine(v2(500 * MIB, 0)) == 500 * MIB


def test_a_file_that_makes_no_sense_does_not_limit(machine):
    assert machine({**v2("much", 0), **own("rubbish\n0:\n::\n")}) == FREE


@pytest.fixture
def no_large_files():
    """The kernel refuses what would otherwise be reserved until it ends processes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * MIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_slab_beyond_what_is_available_is_refused_before_it_is_reserved(
    no_large_files,
):
    available = available_memory()
    text = r"reserve \d+ bytes of shared memory with \d+ available"
    with pytest.raises(OSError, match=text) as refusal:
        ActivationCache.create(
            run_id="r",
            num_samples=2,
            slot_bytes=available,
            budget_bytes=3 * available,
        )
    assert refusal.value.errno == errno.ENOMEM
