// The choice of an instruction set at run time. No torch: a test links it without.
#include "cpu/kernels.h"

#include <atomic>
#include <cstring>

namespace nf4tensor::cpu {
namespace {

struct Candidate {
  const Kernels& kernels;
  bool (*is_supported)();  // by this processor; here, since no other code may ask it
};

#if defined(NF4TENSOR_AVX512) || defined(NF4TENSOR_AVX512VBMI)
bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0;
}
#endif

// Best first.
const Candidate kCandidates[] = {
#ifdef NF4TENSOR_AVX512VBMI
    {kAvx512VbmiKernels, [] { return HasAvx512() && __builtin_cpu_supports("avx512vbmi") != 0; }},
#endif
#ifdef NF4TENSOR_AVX512
    {kAvx512Kernels, HasAvx512},
#endif
#ifdef NF4TENSOR_AVX2
    {kAvx2Kernels,
     [] {
       return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
              __builtin_cpu_supports("f16c") != 0;
     }},
#endif
#ifdef NF4TENSOR_NEON
    {kNeonKernels, [] { return true; }},  // every AArch64 processor has it
#endif
    {kScalarKernels, [] { return true; }},
};

const Kernels* Find(const char* isa) {
  for (const Candidate& candidate : kCandidates) {
    const bool is_wanted = isa == nullptr || std::strcmp(isa, candidate.kernels.isa) == 0;
    if (is_wanted && candidate.is_supported()) return &candidate.kernels;
  }
  return nullptr;
}

std::atomic<const Kernels*>& Current() {
  static std::atomic<const Kernels*> current{Find(nullptr)};
  return current;
}

}  // namespace

const Kernels& CurrentKernels() { return *Current().load(std::memory_order_relaxed); }

}  // namespace nf4tensor::cpu

// Returns the name of the instruction set in use.
extern "C" __attribute__((visibility("default"))) const char* nf4tensor_isa() {
  return nf4tensor::cpu::CurrentKernels().isa;
}

// Switches to an instruction set for all later calls. Returns 0, or 1 where the build or the
// processor does not have it.
extern "C" __attribute__((visibility("default"))) int nf4tensor_use_isa(const char* isa) {
  const nf4tensor::cpu::Kernels* kernels = nf4tensor::cpu::Find(isa);
  if (kernels == nullptr) return 1;
  nf4tensor::cpu::Current().store(kernels, std::memory_order_relaxed);
  return 0;
}
