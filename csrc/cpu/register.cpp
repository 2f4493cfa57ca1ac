#include "boxed.h"
#include "cpu/backend.h"

// Registers the ops of the CPU, at the first call only. Returns 0, or libtorch's error after it
// printed the cause.
extern "C" __attribute__((visibility("default"))) int nf4tensor_register_cpu() {
  static const int error = nf4tensor::Register<nf4tensor::cpu::Backend>("CPU");
  return error;
}
