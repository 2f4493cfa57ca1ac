"""What a user gets from `pip install`: one wheel for every Python, with or without a compiler.

Each test builds from a copy of the sources, in pip's own isolated environment.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]
NO_COMPILER = {"CC": shutil.which("false"), "CXX": shutil.which("false")}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that it shares no build folder with the working tree."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("csrc", "nf4tensor"):
        shutil.copytree(SOURCE / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(SOURCE / name, copy)
    return copy


def source_archive(sources: Path, out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "build", "--sdist", "-o", out, sources], check=True)
    (archive,) = out.glob("*.tar.gz")
    return archive


def pip_wheel(sources: Path, out: Path, **environment: str) -> subprocess.CompletedProcess:
    shutil.rmtree(sources / "build", ignore_errors=True)  # CMake remembers a compiler
    clean = {k: v for k, v in os.environ.items() if k != "NF4TENSOR_REQUIRE_COMPILED"}
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", out, sources],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def only_wheel(result: subprocess.CompletedProcess, out: Path) -> tuple[str, list[str]]:
    """Return the name of the wheel that pip made, and of the files in it."""
    assert result.returncode == 0, result.stdout
    (wheel,) = out.glob("*.whl")
    return wheel.name, zipfile.ZipFile(wheel).namelist()


def run_installed(wheel: Path, folder: Path, code: str) -> str:
    """Run code in a fresh environment that has the wheel, and this one's torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    # A path in a .pth file is not searched for .pth files, so no editable nf4tensor comes along.
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NF4TENSOR")}
    return subprocess.run(
        [folder / "bin" / "python", "-c", code],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


REPORT = """
import torch, nf4tensor
from nf4tensor.kernels import native, select
weight = torch.randn(4, 100)
decoded = nf4tensor.to_nf4(weight).dequantize()
print(nf4tensor.__file__, select.table()[0].backend, native.unavailable_because())
print((decoded - weight).norm() < 0.2 * weight.norm())
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_wheel_with_compiler(sources, tmp_path):
    """By way of the source archive, which has to hold all that a build reads."""
    name, files = only_wheel(pip_wheel(source_archive(sources, tmp_path), tmp_path), tmp_path)
    assert "-py3-none-linux_" in name
    assert "nf4tensor/_C.so" in files
    assert "nf4tensor/format/README.md" in files
    assert not [file for file in files if file.startswith(("tests", "csrc"))]
    report = run_installed(tmp_path / name, tmp_path / "venv", REPORT)
    assert f"{tmp_path}/venv" in report
    assert " cpu None\ntensor(True)" in report


def test_wheel_without_compiler(sources, tmp_path):
    result = pip_wheel(sources, tmp_path, **NO_COMPILER)
    name, files = only_wheel(result, tmp_path)
    assert "nf4tensor is built without its compiled kernels" in result.stdout
    assert name.endswith("-py3-none-any.whl")
    assert not [file for file in files if file.endswith(".so")]
    report = run_installed(tmp_path / name, tmp_path / "venv", REPORT)
    assert f"{tmp_path}/venv" in report
    assert " reference not built: no working C++ compiler" in report
    assert "tensor(True)" in report


def test_required_library_fails_the_build(sources, tmp_path):
    result = pip_wheel(sources, tmp_path, NF4TENSOR_REQUIRE_COMPILED="1", **NO_COMPILER)
    assert result.returncode != 0
    assert "CMake configuration failed" in result.stdout
    assert not list(tmp_path.glob("*.whl"))


def test_build_needs_no_torch():
    """An open torch range in the build requirements would download gigabytes into the build."""
    build_system = (SOURCE / "pyproject.toml").read_text().split("[project]")[0]
    assert 'requires = ["scikit-build-core>=0.10"]' in build_system


def configure(sources: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    command = ["cmake", "-S", sources, "-B", folder]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )


needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None, reason="no cmake (pip brings its own)"
)


@needs_cmake
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("maybe", "NF4TENSOR_CUDA is maybe, expected OFF, ON or AUTO"),
        ("ON", "NF4TENSOR_CUDA is ON, but no nvcc was found that works"),
    ],
)
def test_cuda_that_cannot_be_had_fails_the_build(sources, tmp_path, value, words):
    result = configure(sources, tmp_path, NF4TENSOR_CUDA=value, CUDACXX=NO_COMPILER["CXX"])
    assert result.returncode != 0
    assert words in " ".join(result.stderr.split())


@needs_cmake
@pytest.mark.parametrize("value", ["OFF", "AUTO"])
def test_a_build_needs_no_nvcc(sources, tmp_path, value):
    result = configure(sources, tmp_path, NF4TENSOR_CUDA=value, CUDACXX=NO_COMPILER["CXX"])
    assert result.returncode == 0, result.stderr
    assert "CUDA kernels for" not in result.stdout
