#!/bin/sh
# Builds the extension in place, runs the GPU tests and benchmarks; a missing GPU is a
# failure.
#
#   tools/gpu_check.sh [--dry-run] OUT_DIR
#
# Order: build, the tests that would hang where CUDA's backward threads are blocked, all
# other tests of tests/gpu, those of the engine, benchmarks/gpu_*.py. Each part has a
# limit, and each test one of its own; together they end within nine minutes. A part
# that fails does not stop the next ones, except the build.
#
# With --dry-run the same parts run where there is no GPU: tests have a twin on the CPU,
# what has none is skipped, and benchmarks show their arguments.
#
# Writes OUT_DIR/environment.log, build.log, deadlock.log, tests.log, engine.log,
# BENCHMARK.log and .json, summary.log (a line per part: name, exit code, seconds) and exit_code: the first
# failure, 0 if there was none. PYTHON chooses the interpreter (with torch for CUDA,
# setuptools, ninja and pytest; with pytest-timeout tests have limits of their own).
# nvcc is optional: without it the same tests run on the ATen implementations, so
# environment.log says which it was.
#
# Not run on a GPU so far: the CUDA side has been compiled and linked only.
set -u
dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
if [ $# -ne 1 ]; then
  echo "usage: tools/gpu_check.sh [--dry-run] OUT_DIR" >&2
  exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "$dry" ]; then
  export FAIL_WITHOUT_CUDA=1
fi
started=$(date +%s)
total=535
first_failure=0
: >"$out/summary.log"

# part NAME LIMIT_S COMMAND...: runs a command within its limit and the total one.
part() {
  name=$1
  limit=$2
  shift 2
  begin=$(date +%s)
  left=$((started + total - begin))
  if [ "$left" -lt "$limit" ]; then
    limit=$left
  fi
  if [ "$limit" -lt 5 ]; then
    code=124
    echo "no time left" >"$out/$name.log"
  else
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
  fi
  echo "$name: exit code $code, $(($(date +%s) - begin)) s" | tee -a "$out/summary.log"
  if [ $code -ne 0 ] && [ $first_failure -eq 0 ]; then
    first_failure=$code
  fi
  return $code
}

finish() {
  echo "$first_failure" >"$out/exit_code"
  echo "gpu_check: exit code $first_failure, logs in $out"
  exit "$first_failure"
}

{
  "$python" -c '
import sys
import torch
print("python", sys.version)
print("torch", torch.__version__, "CUDA", torch.version.cuda)
for i in range(torch.cuda.device_count()):
    print("device", i, torch.cuda.get_device_name(i))
'
  nvcc --version 2>/dev/null || echo "nvcc: not on the path"
  nvidia-smi 2>/dev/null || echo "nvidia-smi: not on the path"
} >"$out/environment.log" 2>&1

# Kernels that do not compile are a failure here; without nvcc there are none.
export PIPETRANSFORMER_BUILD_KERNELS="${PIPETRANSFORMER_BUILD_KERNELS:-1}"
if ! part build 240 "$python" setup.py build_ext --inplace; then
  tail -n 20 "$out/build.log"
  finish
fi
"$python" -c '
from pipetransformer import _build_info
print("kernels built:", _build_info.WITH_CUDA_KERNELS)
' >>"$out/environment.log" 2>&1

limits=
long_limits=
if "$python" -c 'import pytest_timeout' 2>/dev/null; then
  # A test that is over its time fails; with the thread method it would end pytest.
  limits="--timeout=60 --timeout-method=signal"
  long_limits="--timeout=120 --timeout-method=signal"  # of runs of several processes
fi
# A cold installation of torch takes half a minute to load the first time.
device=${dry:+cpu}
# The tests of the device alone; in a dry run their twins on the host.
chosen="-m gpu"
if [ -n "$dry" ]; then
  chosen="-k twin"
fi
part warm_up 60 "$python" -c "import torch; torch.zeros(1, device='${device:-cuda}')"
# shellcheck disable=SC2086 - a list of options
part deadlock 180 "$python" -m pytest -v $limits --maxfail=2 \
  $chosen tests/gpu/test_deadlock.py
tail -n 15 "$out/deadlock.log"
# shellcheck disable=SC2086
part tests 180 "$python" -m pytest -v $limits tests/gpu \
  --ignore tests/gpu/test_deadlock.py --ignore tests/gpu/test_engine.py
tail -n 25 "$out/tests.log"
# shellcheck disable=SC2086
part engine 180 "$python" -m pytest -v $long_limits tests/gpu/test_engine.py
tail -n 25 "$out/engine.log"
for script in benchmarks/gpu_*.py; do
  if [ -f "$script" ]; then
    name=$(basename "$script" .py)
    if [ -n "$dry" ]; then
      part "$name" 120 "$python" "$script" --help
    else
      part "$name" 120 "$python" "$script" --json "$out/$name.json"
    fi
    tail -n 30 "$out/$name.log"
  fi
done
finish
