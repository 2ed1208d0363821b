#!/bin/sh
# Compiles the torch-free C++ with no torch, Python or CUDA on the include path.
# The list of files is that of tools/check_layers.py. CXX chooses the compiler.
set -eu
cd "$(dirname "$0")/.."
files=$(python3 tools/check_layers.py --list-torch-free)
for file in $files; do
  "${CXX:-c++}" -std=c++20 -fsyntax-only -Wall -Wextra -Werror -Icsrc "$file"
  echo "torch-free: $file"
done
