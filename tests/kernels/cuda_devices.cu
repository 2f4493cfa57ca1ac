// How csrc/cuda/device.h asks for a device's properties, with the CUDA runtime of
// cuda_devices_runtime.cpp in place of the real one. For test_cuda_devices.py.
//
// Prints what a launch says that finds no code for its device. Exit status: 0, or 1 after an answer
// that is wrong, or is asked for again.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cuda/device.h"

extern thread_local int current_device;
extern std::atomic<int> num_questions;

namespace {

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "cuda_devices: %s\n", what);
  std::exit(1);
}

}  // namespace

int main() {
  using nf4tensor::cuda::ComputeCapability;
  using nf4tensor::cuda::NumProcessors;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([i] {
      for (int j = 0; j < 1000; ++j) {
        current_device = (i + j) % 2;
        Expect(ComputeCapability() == 80 + 10 * current_device, "another capability");
        Expect(NumProcessors() == 100 + current_device, "another number of processors");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const int so_far = num_questions;
  ComputeCapability();
  NumProcessors();
  Expect(num_questions == so_far, "what is known is asked again");
  Expect(so_far <= 8 * 6, "a thread asks twice");
  try {
    nf4tensor::cuda::CheckCuda(cudaErrorNoKernelImageForDevice, "launch a kernel");
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
}
