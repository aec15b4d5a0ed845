"""Build the null GPU: libraries that take the place of CUDA's runtime, driver, NVML, NVRTC, cuBLAS and NCCL.

    python tests/null_gpu/build.py     # with the Python of an environment that has torch for CUDA; needs gcc and nm

They are written to null_gpu/ in that environment. `environment` returns the variables that make a process use them.
The C files define the functions whose results torch, Triton and vLLM need. All other functions that they look for in
CUDA's libraries return 0.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["platlib"])
OUT = Path(sys.prefix) / "null_gpu"


def list_symbols(kind: str, *files: Path) -> set[str]:
    """Return the names that shared libraries or object files need from others (kind "U") or define ("T")."""
    names = set()
    for file in files:
        scope = [] if file.suffix == ".o" else ["-D"]
        text = subprocess.run(["nm", *scope, file], capture_output=True, text=True).stdout
        names |= set(re.findall(rf" {kind} (\w+)", text))
    return names


def find_names(prefix: str, *files: Path) -> set[str]:
    """Return the functions with a prefix whose names are text in the files: those that are looked up by name."""
    pattern = rf"\b{prefix}[A-Z]\w{{3,60}}\b".encode()
    return {name.decode() for file in files for name in re.findall(pattern, file.read_bytes())}


def build_library(name: str, source: str, wanted: set[str], *linked: str) -> None:
    """Compile a library `name` from a C file. For each wanted name that it lacks, add a function that returns 0."""
    flags = ["-w", "-fPIC", f"-I{SITE / 'triton/backends/nvidia/include'}"]
    compiled, missing, versions = OUT / "written.o", OUT / "missing.c", OUT / "versions"
    subprocess.run(["gcc", *flags, "-c", HERE / source, "-o", compiled], check=True)
    names = sorted(wanted - list_symbols("T", compiled))
    missing.write_text("".join(f"int {function}() {{ return 0; }}\n" for function in names))
    version = name.replace("-", "_")  # programs link to NVIDIA's library with a version, which is its name
    versions.write_text(f"{version} {{ global: *; }};\n")
    options = ["-shared", f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}", f"-L{OUT}", *linked]
    command = ["gcc", *flags, compiled, missing, "-o", OUT / "new", *options, "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    (OUT / "new").replace(OUT / name)  # running processes keep the old one


def build() -> None:
    """Build all libraries. Raise CalledProcessError if gcc fails."""
    OUT.mkdir(exist_ok=True)
    patterns = ("torch/lib/*.so*", "vllm/**/*.so", "triton/_C/*.so", "nvidia/**/libcusolver*.so*")
    users = [file for pattern in patterns for file in SITE.glob(pattern)]
    names, major = list_symbols("U", *users), torch.version.cuda.split(".")[0]
    torch_cuda = [SITE / "torch/lib" / name for name in ("libtorch_cuda.so", "libc10_cuda.so")]
    driver = names | find_names("cu", SITE / "triton/backends/nvidia/driver.c", *torch_cuda)
    driver = {name for name in driver if re.match("cu(?!File)[A-Z]", name)}
    names |= find_names("cuda", *SITE.glob("vllm/distributed/device_communicators/cuda_wrapper.py"))
    libraries = {
        f"libcudart.so.{major}": ("runtime.c", ("cuda", "__cuda")),
        f"libcublas.so.{major}": ("blas.c", ("cublas",)),
        f"libcublasLt.so.{major}": ("blas.c", ("cublasLt",)),
        f"libnvrtc.so.{major}": ("nvrtc.c", ("nvrtc",)),
        "libnccl.so.2": ("nccl.c", ("nccl",)),
    }
    for name, (source, prefixes) in libraries.items():
        build_library(name, source, {function for function in names if function.startswith(prefixes)})
    build_library("libcuda.so.1", "driver.c", driver, f"-l:libcudart.so.{major}")
    nvml = find_names("nvml", *torch_cuda, *SITE.glob("vllm/third_party/pynvml.py"))
    build_library("libnvidia-ml.so.1", "nvml.c", nvml, f"-l:libcudart.so.{major}")
    print(f"built the null GPU for torch {torch.__version__} in {OUT}")


def environment() -> dict[str, str]:
    """Return the environment variables of a process on the null GPU."""
    libraries = [str(file) for file in sorted(OUT.glob("lib*.so.*"))]
    return {
        "LD_PRELOAD": " ".join(libraries),
        "LD_LIBRARY_PATH": str(OUT),
        "TRITON_LIBCUDA_PATH": str(OUT),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_CACHE_DIR": str(OUT / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(OUT / "inductor"),
    }


if __name__ == "__main__":
    build()
