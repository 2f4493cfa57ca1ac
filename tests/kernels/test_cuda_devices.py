"""What the launchers ask CUDA, and what they say when it refuses, with a runtime that is made up.

The program is cuda_devices.cu; the runtime, cuda_devices_runtime.cpp.
"""

import subprocess

from tests.kernels.machine_code import FLAGS, find_nvcc
from tests.kernels.native_grid import HERE
from tests.kernels.ptx.launches import needs_nvcc

pytestmark = needs_nvcc


def test_properties_of_each_device_are_asked_for_once(tmp_path):
    program = tmp_path / "cuda_devices"
    sources = [HERE / "cuda_devices.cu", HERE / "cuda_devices_runtime.cpp"]
    subprocess.run([find_nvcc(), *FLAGS, "-cudart=none", *sources, "-o", program], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == (
        "nf4tensor: CUDA failed to launch a kernel: CUDA's own words: this library was built for "
        "other devices or a newer driver: set NF4TENSOR_BACKEND=triton or reference, or rebuild "
        "nf4tensor"
    )
