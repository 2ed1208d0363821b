"""Build of ``pipetransformer._C``: one C++20 extension, CUDA kernels when found.

The tensor-side C++ needs no CUDA header. Files below ``csrc/**/cuda/*.cu`` hold
kernels only; they are compiled by nvcc when one is found (``CUDA_HOME`` or
``PATH``) and left out otherwise; each kernel has an ATen fallback. Set
``PIPETRANSFORMER_BUILD_KERNELS=0`` to leave them out on purpose.

Records of the activation cache on disk are read through io_uring where liburing is
found, else by threads; ``PIPETRANSFORMER_BUILD_URING=0`` leaves liburing out.

Files of a room are compiled in groups; ``PIPETRANSFORMER_BUILD_GROUPED=0`` compiles
each alone. A ccache on the ``PATH`` is used unless ``CXX`` names a compiler.
"""

import itertools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, get_cxx_compiler

ROOT = pathlib.Path(__file__).resolve().parent
LINES_PER_GROUP = 2000
LINES_PER_GROUP_OF_BINDINGS = 800  # a line of pybind11 takes long


def find_nvcc() -> str | None:
    if os.environ.get("PIPETRANSFORMER_BUILD_KERNELS", "1") == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    if home and (pathlib.Path(home) / "bin" / "nvcc").exists():
        return str(pathlib.Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def cuda_architectures(release: str) -> tuple[str, ...]:
    """Return what kernels are compiled for; later devices take the newest.

    ``TORCH_CUDA_ARCH_LIST`` chooses others, such as ``7.0;9.0+PTX``.
    """
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    numbers = {
        (int(major + minor), major + minor + kind)
        for major, minor, kind in re.findall(r"\b(\d+)\.(\d)([a-z]?)", wanted)
    }
    if numbers:
        return tuple(number for _, number in sorted(numbers))
    oldest = ("70",) if int(release.partition(".")[0]) < 13 else ()
    return (*oldest, "75", "80", "90")


def compile_kernels(
    nvcc: str, architectures: tuple[str, ...], build_dir: pathlib.Path
) -> list[str]:
    """Compile every kernel file; an object newer than its source is kept.

    Returns none where the compiler fails, as with a host compiler that it does not
    know: tensors on devices then take the ATen implementations. With
    ``PIPETRANSFORMER_BUILD_KERNELS=1`` that is an error.
    """
    wanted = os.environ.get("PIPETRANSFORMER_BUILD_KERNELS") == "1"
    objects = []
    headers = [
        path.stat().st_mtime
        for pattern in ("csrc/**/*.cuh", "csrc/**/cuda/*.h")
        for path in ROOT.glob(pattern)
    ]
    for source in sorted(ROOT.glob("csrc/**/cuda/*.cu")):
        target = build_dir / source.relative_to(ROOT).with_suffix(".o")
        newest = max([source.stat().st_mtime, *headers])
        if not target.exists() or target.stat().st_mtime < newest:
            target.parent.mkdir(parents=True, exist_ok=True)
            codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
            # What "a" or "f" stands behind runs on its own architecture alone.
            last = [name for name in architectures if name.isdigit()] or ["75"]
            codes.append(f"-gencode=arch=compute_{last[-1]},code=compute_{last[-1]}")
            command = [nvcc, "-std=c++20", "-O3", "-I", str(ROOT / "csrc"), *codes]
            command += ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
            command += ["-c", str(source), "-o", str(target)]
            if subprocess.run(command, check=wanted).returncode != 0:
                print(f"kernels left out: {nvcc} cannot compile {source.name}")
                return []
        objects.append(str(target))
    return objects


def find_cuda_home(nvcc: str) -> pathlib.Path:
    # nvcc on the PATH may be a script or a link; it knows its own home.
    shown = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull],
        check=True,
        capture_output=True,
        text=True,
    )
    for line in shown.stderr.splitlines():
        name, _, value = line.removeprefix("#$ ").partition("=")
        if name == "TOP":
            return pathlib.Path(value)
    return pathlib.Path(nvcc).resolve().parent.parent


def cuda_release(nvcc: str) -> str:
    """Return the CUDA release that a compiler is of, such as ``13.0``."""
    shown = subprocess.run(
        [nvcc, "--version"], check=True, capture_output=True, text=True
    )
    found = re.search(r"release (\d+\.\d+)", shown.stdout)
    return found[1] if found else "unknown"


def cuda_link_flags(nvcc: str, release: str) -> list[str] | None:
    """Flags that link the CUDA runtime, or None where that does not work."""
    built_for = torch.version.cuda
    if built_for is not None and built_for.split(".")[0] != release.split(".")[0]:
        # Two runtimes in one process, or one that is not installed.
        print(f"kernels left out: {nvcc} is of CUDA {release}, torch of {built_for}")
        return None
    # On a CUDA torch the runtime is torch's own shared library; on a CPU torch
    # the static one lets the extension load where no CUDA is installed.
    shared = torch.version.cuda is not None
    library = "libcudart.so" if shared else "libcudart_static.a"
    home = find_cuda_home(nvcc)
    for name in ("lib64", "targets/x86_64-linux/lib", "lib"):
        if (home / name / library).exists():
            flags = [f"-L{home / name}"]
            if shared:
                return [*flags, "-lcudart"]
            return [*flags, "-lcudart_static", "-lrt", "-ldl", "-lpthread"]
    print(f"kernels left out: {nvcc} found, but no {library} below {home}")
    return None


def uring_link_flags() -> list[str] | None:
    """Flags that link liburing; None: it is left out, or its library is missing."""
    if os.environ.get("PIPETRANSFORMER_BUILD_URING", "1") == "0":
        return None
    code = (
        "#include <liburing.h>\n"
        "int probe(io_uring* ring) { return io_uring_queue_init(1, ring, 0); }\n"
    )
    # Statically where that works: the extension then loads where it is missing.
    for library in ("-l:liburing.a", "-luring"):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "probe.cpp"
            source.write_text(code)
            command = [*shlex.split(get_cxx_compiler()), "-std=c++20", "-fPIC"]
            command += ["-shared", str(source), "-o", f"{folder}/probe.so", library]
            found = subprocess.run(command, check=False, capture_output=True)
        if found.returncode == 0:
            return [library]
    return None


def use_ccache() -> None:
    """Compile by ccache where it is installed, with hits across copies of the code."""
    ccache = shutil.which("ccache")
    if ccache is None or "CXX" in os.environ:
        return
    # By that name ccache is the compiler: torch warns of a CXX of two words.
    link = ROOT / "build" / "ccache" / "c++"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(ccache)
    os.environ["CXX"] = str(link)
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))


def grouped_sources() -> list[str]:
    """Write one source per group of files of a room; return their paths.

    Torch's headers take most of a file's compilation: a group pays for them once.
    A group is rewritten only where it changes, so that nothing else is compiled.
    """
    sources = sorted(p.relative_to(ROOT) for p in ROOT.glob("csrc/**/*.cpp"))
    if os.environ.get("PIPETRANSFORMER_BUILD_GROUPED", "1") == "0":
        return [str(source) for source in sources]
    groups: dict[str, list[pathlib.Path]] = {}
    for room, files in itertools.groupby(sources, lambda path: path.parts[1]):
        members = list(files)
        lengths = [(ROOT / file).read_text().count("\n") for file in members]
        most = LINES_PER_GROUP_OF_BINDINGS if room == "python" else LINES_PER_GROUP
        parts = -(-sum(lengths) // most)
        before = 0
        for file, length in zip(members, lengths, strict=True):
            part = before * parts // sum(lengths)
            groups.setdefault(f"{room}_{part}", []).append(file)
            before += length
    folder = pathlib.Path("build") / "groups"
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    for name, group in groups.items():
        text = "".join(f'#include "{p.relative_to("csrc")}"\n' for p in group)
        write_changed(ROOT / folder / f"{name}.cpp", text)
    return [str(folder / f"{name}.cpp") for name in groups]


def write_changed(path: pathlib.Path, text: str) -> None:
    """Write a file unless it holds this text."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def make_extension(
    macros: list[str], objects: list[str], link_flags: list[str]
) -> Extension:
    extension = CppExtension(
        "pipetransformer._C",
        grouped_sources(),
        define_macros=[(macro, "1") for macro in macros],
        extra_link_args=["-Wl,-s", *link_flags],
        extra_objects=objects,
    )
    # Torch's headers are system headers: our warnings are errors, theirs are not.
    system = [f"-isystem{path}" for path in extension.include_dirs]
    extension.include_dirs = [str(ROOT / "csrc")]
    extension.extra_compile_args = [
        *system,
        "-std=c++20",
        "-O2",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-g0",  # last: Python's own flags hold -g
    ]
    return extension


class Build(BuildExtension):
    """Builds, then records the torch that the extension was built for."""

    def build_extensions(self) -> None:
        """Compile and link; the record is written only when that worked."""
        super().build_extensions()
        self.facts = build_facts(self.extensions[0], self.compiler.compiler_so[1:])
        write_build_info(pathlib.Path(self.build_lib) / "pipetransformer", self.facts)

    def copy_extensions_to_source(self) -> None:
        """Copy the extension into the checkout, and the record of this very build."""
        super().copy_extensions_to_source()
        write_build_info(ROOT / "pipetransformer", self.facts)


def build_facts(extension: Extension, first_flags: list[str]) -> dict[str, object]:
    """What the extension was built for and how; paths of the machine are left out."""
    compiler = shlex.split(get_cxx_compiler())
    shown = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, text=True
    )
    flags = [*first_flags, *extension.extra_compile_args]
    return {
        "TORCH_VERSION": str(torch.__version__),
        "WITH_CUDA_KERNELS": bool(extension.extra_objects),
        "COMPILER": shown.stdout.splitlines()[0],
        "FLAGS": " ".join(flag for flag in flags if "/" not in flag),
    }


def write_build_info(folder: pathlib.Path, facts: dict[str, object]) -> None:
    lines = [f"{name} = {value!r}\n" for name, value in facts.items()]
    text = '"""Written by setup.py: what the extension was built for, and how."""\n\n'
    text += "".join(lines)
    folder.mkdir(parents=True, exist_ok=True)
    write_changed(folder / "_build_info.py", text)


use_ccache()
nvcc = find_nvcc()
release = cuda_release(nvcc) if nvcc else ""
link_flags = cuda_link_flags(nvcc, release) if nvcc else None
kernels = []
if nvcc and link_flags is not None:
    # Objects are kept: another compiler or list of architectures makes its own.
    architectures = cuda_architectures(release)
    kept = "-".join((release, *architectures))
    kernels = compile_kernels(nvcc, architectures, ROOT / "build" / "kernels" / kept)
uring = uring_link_flags()
macros = ["PIPETRANSFORMER_WITH_KERNELS"] if kernels else []
macros += ["PIPETRANSFORMER_WITHOUT_LIBURING"] if uring is None else []
flags = (link_flags or []) if kernels else []
setup(
    ext_modules=[make_extension(macros, kernels, [*flags, *(uring or [])])],
    cmdclass={"build_ext": Build},
)
