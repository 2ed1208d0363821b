#!/bin/sh
# Builds the extension in place and runs the GPU tests; a missing GPU is a failure.
#
#   tools/gpu_check.sh OUT_DIR
#
# Writes OUT_DIR/environment.log, build.log, tests.log and exit_code. Ends within nine
# minutes: the build and the tests each have a limit. PYTHON chooses the interpreter
# (with torch for CUDA, setuptools, ninja and pytest). nvcc is optional: without it the
# same tests run on the ATen implementations, so environment.log says which it was.
#
# Not run on a GPU so far: the CUDA side has been compiled and linked only.
set -u
if [ $# -ne 1 ]; then
  echo "usage: tools/gpu_check.sh OUT_DIR" >&2
  exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}

finish() {
  echo "$1" >"$out/exit_code"
  echo "gpu_check: exit code $1, logs in $out"
  exit "$1"
}

timeout 300 "$python" setup.py build_ext --inplace >"$out/build.log" 2>&1
code=$?
if [ $code -ne 0 ]; then
  tail -n 20 "$out/build.log"
  finish $code
fi

{
  "$python" -c '
import sys
import torch
from pipetransformer import _build_info
print("python", sys.version)
print("torch", torch.__version__, "CUDA", torch.version.cuda)
print("kernels built:", _build_info.WITH_CUDA_KERNELS)
for i in range(torch.cuda.device_count()):
    print("device", i, torch.cuda.get_device_name(i))
'
  nvcc --version 2>/dev/null || echo "nvcc: not on the path"
  nvidia-smi 2>/dev/null || echo "nvidia-smi: not on the path"
} >"$out/environment.log" 2>&1

FAIL_WITHOUT_CUDA=1 timeout 200 "$python" -m pytest tests/gpu -v \
  >"$out/tests.log" 2>&1
code=$?
tail -n 20 "$out/tests.log"
finish $code
