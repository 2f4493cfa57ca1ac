// The arguments that all programs cuda_grid_<op>.cpp take.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace nf4tensor {

// Calls run(stride, seed) and returns its exit status; 2 where the arguments are none.
template <typename Run>
int RunWithArguments(const char* op, int num_arguments, char** arguments, Run run) {
  const long stride = num_arguments > 1 ? std::strtol(arguments[1], nullptr, 10) : 1;
  const long seed = num_arguments > 2 ? std::strtol(arguments[2], nullptr, 10) : 0;
  if (num_arguments > 3 || stride < 1 || seed < 0) {
    std::fprintf(stderr, "usage: cuda_grid_%s [STRIDE [SEED]]\n", op);
    return 2;
  }
  return run(int64_t{stride}, static_cast<uint32_t>(seed));
}

}  // namespace nf4tensor
