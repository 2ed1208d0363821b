#!/bin/sh
# Stresses the C++ that is full of threads under gcc's sanitizers: the torch-free
# engine (worker pool, execution, schedules: tests/cpp/stress_execution.cpp), and
# the control plane and guarded groups over stand-ins of what they use of torch
# (tests/autodp/cpp/stress_plane.cpp). And what reads bytes and numbers of others,
# without threads: messages, changes of plan, profiles (tests/cpp/feed_readers.cpp)
# and shared memory (tests/autocache/cpp/fuzz_slab.cpp). Records on disk have both
# (tests/autocache/cpp/disk_test.cpp).
#
#   tools/sanitize.sh [thread|address|all] [ROUNDS] [SEED] [PROGRAM]
#
# PROGRAM: execution, plane, disk, readers, slab (the last two: address alone) or all. A
# round of the plane takes as long as 25 of the engine, and one of the engine as long
# as 100 of the slab or 10 of the disk: there are so many fewer or more of them. CXX chooses the
# compiler. Ends with status 1 when a sanitizer or a program finds something.
set -eu
cd "$(dirname "$0")/.."
which=${1:-all}
rounds=${2:-200}
seed=${3:-0}
program=${4:-all}
case $which/$program in
  thread/execution | address/execution | all/execution) ;;
  thread/plane | address/plane | all/plane) ;;
  thread/disk | address/disk | all/disk) ;;
  address/readers | all/readers | address/slab | all/slab) ;;
  thread/all | address/all | all/all) ;;
  *)
    echo "usage: tools/sanitize.sh [thread|address|all] [ROUNDS] [SEED]" \
      "[execution|plane|disk|readers|slab|all]; readers, slab: address or all" >&2
    exit 2
    ;;
esac

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
execution="tests/cpp/stress_execution.cpp csrc/pipe/execution.cpp csrc/pipe/cell_trace.cpp
  csrc/pipe/worker_pool.cpp csrc/planner/schedule/schedule.cpp
  csrc/planner/schedule/schedules.cpp"
# Not those of csrc/autodp that compute with tensors, which have no threads.
plane="tests/autodp/cpp/stress_plane.cpp csrc/core/hash.cpp csrc/core/plain_text.cpp"
for name in groups/active_group protocol/decision failure/failure groups/guarded_backend \
  groups/guarded_work membership/membership control_plane store/patient_store \
  protocol/plan_message membership/rendezvous_board failure/run_state \
  groups/single_backend store/store_board store/store_client failure/task_thread \
  protocol/transition protocol/transition_announce failure/watcher; do
  plane="$plane csrc/autodp/$name.cpp"
done
readers="tests/cpp/feed_readers.cpp csrc/core/hash.cpp csrc/core/plain_text.cpp
  csrc/planner/*/*.cpp csrc/simulator/*.cpp"
for name in protocol/decision failure/failure membership/membership protocol/plan_message \
  protocol/transition protocol/transition_announce
do
  readers="$readers csrc/autodp/$name.cpp"
done
slab="tests/autocache/cpp/fuzz_slab.cpp csrc/core/cgroups.cpp csrc/core/hash.cpp
  csrc/core/host_memory.cpp"
for name in own_file process record shared_memory slab slot superblock; do
  slab="$slab csrc/autocache/$name.cpp"
done
disk="tests/autocache/cpp/disk_test.cpp csrc/core/cgroups.cpp csrc/core/hash.cpp
  csrc/core/host_memory.cpp"
for name in aligned_buffers disk_index disk_io disk_io_uring disk_meter disk_tier own_file process \
  record shared_memory slot superblock; do
  disk="$disk csrc/autocache/$name.cpp"
done
# With io_uring, too, where it is installed.
uring=
if echo "#include <liburing.h>" | "${CXX:-g++}" -fsyntax-only -x c++ - 2> /dev/null; then
  uring=-luring
fi

# stress NAME FLAGS SOURCES ROUNDS
stress() {
  # shellcheck disable=SC2086 - lists of words
  "${CXX:-g++}" -std=c++20 -O0 -g1 -pthread $2 -Wall -Wextra -Werror \
    -Icsrc -Itests/autodp/cpp/standin $3 -o "$out/stress"
  echo "sanitize: $1, seed $seed"
  "$out/stress" "$seed" "$4"
}

sanitize() {
  case $program in
    execution | all) stress "execution, $1" "$2" "$execution" "$rounds" ;;
  esac
  case $program in
    plane | all) stress "plane, $1" "$2" "$plane" $(((rounds + 24) / 25)) ;;
  esac
  case $program in
    disk | all) stress "disk, $1" "$2 -Wno-tsan" "$disk $uring" $((rounds * 10)) ;;
  esac
  case $1/$program in
    address/readers | address/all) stress "readers, $1" "$2" "$readers" "$rounds" ;;
  esac
  case $1/$program in
    address/slab | address/all)
      stress "slab, $1" "$2 -Wl,--wrap=mmap,--wrap=munmap" "$slab" $((rounds * 100))
      ;;
  esac
}

export TSAN_OPTIONS="halt_on_error=1:${TSAN_OPTIONS:-}"
export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:${UBSAN_OPTIONS:-}"
if [ "$which" != address ]; then
  sanitize thread -fsanitize=thread
fi
if [ "$which" != thread ]; then
  sanitize address "-fsanitize=address,undefined -fno-sanitize-recover=all"
fi
