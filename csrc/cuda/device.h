// What the kernels use beyond C++: the words of CUDA, some instructions of its processors, and the
// launch. Compiled by nvcc, or with NF4TENSOR_EMULATE by a host compiler, which runs blocks, warps
// and barriers one thread at a time (tests/kernels/emulation/cuda_emulator.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef NF4TENSOR_EMULATE
#include "cuda_emulator.h"
#else
#include <cuda_runtime.h>
#endif

#include "cuda/kernels.h"

namespace nf4tensor::cuda {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct Launch {
  uint32_t blocks;
  uint32_t threads;
  Stream stream;
};

#ifdef NF4TENSOR_EMULATE

inline int ComputeCapability() { return emulator::state.compute_capability; }
inline int NumProcessors() { return emulator::state.num_processors; }

template <typename... Parameters, typename... Arguments>
void Run(void (*kernel)(Parameters...), const Launch& launch, const Arguments&... arguments) {
  emulator::Run(launch.blocks, launch.threads, kernel, static_cast<Parameters>(arguments)...);
}

inline uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  return emulator::PermuteBytes(a, b, selector);
}

// Two values to one word, the first in the low half.
template <DType kDType>
uint32_t RoundPair(float low, float high) {
  return emulator::RoundTo<kDType>(low) | emulator::RoundTo<kDType>(high) << 16;
}

// The two values of a word, the low half first.
template <DType kDType>
void WidenPair(uint32_t word, float& low, float& high) {
  low = emulator::Half<kDType>(&word, 0);
  high = emulator::Half<kDType>(&word, 1);
}

// The larger of the values in two words, two by two where they are 16 bits; NaN where one is. None
// is negative.
template <DType kDType>
uint32_t MaxOrNan(uint32_t a, uint32_t b) {
  return emulator::MaxOrNan<kDType>(a, b);
}

inline float ApproximateReciprocal(float value) { return emulator::ApproximateReciprocal(value); }

inline uint4 LoadOnce(const uint8_t* from) { return emulator::Load<uint4>(from); }

inline void LoadSector(const uint8_t* from, uint32_t (&words)[8]) {
  emulator::LoadSector(from, words);
}

template <int kBytes>
void StoreOnce(uint8_t* to, const uint32_t* words) {
  emulator::Store<kBytes>(to, words);
}

template <DType kDType>
void MultiplyTile(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::MultiplyTile<kDType>(sums, a, b);
}

#else

inline void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::string text =
      std::string("nf4tensor: CUDA failed to ") + what + ": " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion ||
      error == cudaErrorInsufficientDriver) {
    text +=
        ": this library was built for other devices or a newer driver: set "
        "NF4TENSOR_BACKEND=triton or reference, or rebuild nf4tensor";
  }
  throw std::runtime_error(text);
}

inline int DeviceAttribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  CheckCuda(cudaDeviceGetAttribute(&value, attribute, device), "describe a device");
  return value;
}

// What kAsk answers for the current device, which is asked once. No answer is zero.
template <int (*kAsk)(int device)>
int AnswerOfDevice() {
  static std::atomic<int> answers[128];  // torch numbers devices with 8 bits, one of them a sign
  int device = 0;
  CheckCuda(cudaGetDevice(&device), "tell the current device");
  int answer = answers[device].load(std::memory_order_relaxed);
  if (answer == 0) {  // threads may ask at once: they get the same answer
    answer = kAsk(device);
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer;
}

inline int AskComputeCapability(int device) {
  return 10 * DeviceAttribute(cudaDevAttrComputeCapabilityMajor, device) +
         DeviceAttribute(cudaDevAttrComputeCapabilityMinor, device);
}

inline int AskNumProcessors(int device) {
  return DeviceAttribute(cudaDevAttrMultiProcessorCount, device);
}

// Of the current device: 90 for 9.0.
inline int ComputeCapability() { return AnswerOfDevice<AskComputeCapability>(); }

inline int NumProcessors() { return AnswerOfDevice<AskNumProcessors>(); }

template <typename... Parameters, typename... Arguments>
void Run(void (*kernel)(Parameters...), const Launch& launch, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = launch.blocks;
  config.blockDim = launch.threads;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  CheckCuda(cudaLaunchKernelEx(&config, kernel, arguments...), "launch a kernel");
}

// PRMT: nibble i of the selector picks byte i of the result from the eight of b:a, or, with its
// bit 3 set, eight copies of that byte's sign. (__byte_perm clears those bits, one by one.)
__device__ __forceinline__ uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// Two values to one word, the first in the low half. To nearest even; subnormals stay.
template <DType kDType>
__device__ __forceinline__ uint32_t RoundPair(float low, float high) {
  uint32_t word;
  if constexpr (kDType == kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// The two values of a word, the low half first.
template <DType kDType>
__device__ __forceinline__ void WidenPair(uint32_t word, float& low, float& high) {
  if constexpr (kDType == kBFloat16) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
  } else {
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(low), "=f"(high)
        : "r"(word));
  }
}

// The larger of the values in two words, two by two where they are 16 bits; NaN where one is. None
// is negative.
template <DType kDType>
__device__ __forceinline__ uint32_t MaxOrNan(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (kDType == kFloat32) {
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else if constexpr (kDType == kBFloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

// Within one unit in the last place, where neither it nor the value is subnormal.
__device__ __forceinline__ float ApproximateReciprocal(float value) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
  return reciprocal;
}

// 16 bytes that nobody will read again, at a multiple of 16.
__device__ __forceinline__ uint4 LoadOnce(const uint8_t* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// 32 bytes at a multiple of 32. Two loads before sm_100, which share their sector in the
// first-level cache.
__device__ __forceinline__ void LoadSector(const uint8_t* from, uint32_t (&words)[8]) {
#if __CUDA_ARCH__ >= 1000
  asm volatile("ld.global.nc.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]), "=r"(words[4]),
                 "=r"(words[5]), "=r"(words[6]), "=r"(words[7])
               : "l"(from));
#else
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const uint4 half = __ldg(reinterpret_cast<const uint4*>(from + 4 * i));
    words[i] = half.x;
    words[i + 1] = half.y;
    words[i + 2] = half.z;
    words[i + 3] = half.w;
  }
#endif
}

// 2 to 32 bytes that nobody will read soon, at a multiple of their number. 32 are two stores before
// sm_100.
template <int kBytes>
__device__ __forceinline__ void StoreOnce(uint8_t* to, const uint32_t* words) {
  static_assert(kBytes == 32 || kBytes == 16 || kBytes == 8 || kBytes == 4 || kBytes == 2);
  if constexpr (kBytes == 32) {
#if __CUDA_ARCH__ >= 1000
    asm volatile("st.global.cs.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(to),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(words[4]),
                 "r"(words[5]), "r"(words[6]), "r"(words[7])
                 : "memory");
#else
    StoreOnce<16>(to, words);
    StoreOnce<16>(to + 16, words + 4);
#endif
  } else if constexpr (kBytes == 16) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(words[0]) : "memory");
  } else {
    asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(to), "h"(static_cast<uint16_t>(words[0]))
                 : "memory");
  }
}

// sums += A @ B by a warp: mma.sync.m16n8k16 of 16-bit floats, summed in float32. The fragments
// are those of the PTX manual.
template <DType kDType>
__device__ __forceinline__ void MultiplyTile(float (&sums)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  if constexpr (kDType == kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

#endif

}  // namespace nf4tensor::cuda
