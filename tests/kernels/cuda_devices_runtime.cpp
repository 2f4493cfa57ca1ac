// As much of a CUDA runtime as cuda_devices.cu needs: two devices, and a count of what was asked.
#include <cuda_runtime_api.h>

#include <atomic>

thread_local int current_device = 0;
std::atomic<int> num_questions{0};

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++num_questions;
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 8 + device
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
                                                            : 100 + device;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "CUDA's own words"; }

// Called at start and end, for a program's kernels: it has none.
extern "C" void** __cudaRegisterFatBinary(void*) { return nullptr; }
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
