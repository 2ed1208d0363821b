#!/bin/sh
# Stresses the torch-free engine under gcc's sanitizers: worker pool, execution,
# schedules (tests/cpp/stress_execution.cpp).
#
#   tools/sanitize.sh [thread|address|all] [ROUNDS] [SEED]
#
# CXX chooses the compiler. Ends with status 1 when a sanitizer or the program finds
# something.
set -eu
cd "$(dirname "$0")/.."
which=${1:-all}
rounds=${2:-200}
seed=${3:-0}
case $which in
  thread | address | all) ;;
  *)
    echo "usage: tools/sanitize.sh [thread|address|all] [ROUNDS] [SEED]" >&2
    exit 2
    ;;
esac

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
sources="tests/cpp/stress_execution.cpp csrc/pipe/execution.cpp
  csrc/pipe/worker_pool.cpp csrc/planner/schedule.cpp csrc/planner/schedules.cpp"

stress() {
  # shellcheck disable=SC2086 - lists of words
  "${CXX:-g++}" -std=c++20 -O0 -g1 -pthread $2 \
    -Wall -Wextra -Werror -Icsrc $sources -o "$out/$1"
  echo "sanitize: $1, seed $seed"
  "$out/$1" "$seed" "$rounds"
}

export TSAN_OPTIONS="halt_on_error=1:${TSAN_OPTIONS:-}"
export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:${UBSAN_OPTIONS:-}"
if [ "$which" != address ]; then
  stress thread -fsanitize=thread
fi
if [ "$which" != thread ]; then
  stress address "-fsanitize=address,undefined -fno-sanitize-recover=all"
fi
