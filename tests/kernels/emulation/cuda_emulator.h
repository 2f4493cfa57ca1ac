// CUDA on the host: blocks one after the other, a fiber for each thread of a block, in an order
// that depends on a seed and changes from step to step, so that a missing barrier shows. For
// csrc/cuda/device.h with NF4TENSOR_EMULATE; with an address sanitizer it sees what a GPU hides.
//
// Whatever a GPU would not do ends the program: a misaligned access, a barrier that some threads of
// a block or a warp never reach.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "common/dtype.h"
#include "cpu/formats.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(save, bottom, size) static_cast<void>(0)
#define __sanitizer_finish_switch_fiber(save, bottom, size) static_cast<void>(0)
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // one block runs at a time
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
using std::max;
using std::min;
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace nf4tensor::emulator {

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "cuda_emulator: %s\n", what);
  std::abort();
}

inline constexpr size_t kStackBytes = 32 << 10;  // an address sanitizer clears them at every switch
inline constexpr unsigned kWarp = 32;

struct Fiber;

// All threads of [first, last) that have not ended have arrived at something as often as this one.
struct Arrivals {
  unsigned first = 0;
  unsigned last = 0;
  int Fiber::* arrivals = nullptr;
  int count = 0;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  void* fake_stack = nullptr;  // of the address sanitizer
  bool is_done = false;
  Arrivals awaited;
  int warp_arrivals = 0;
  int block_arrivals = 0;
  int exchanges = 0;
};

// What a thread gives to the others of its warp.
struct Slot {
  uint32_t words[12];
};

// A launch as the driver gets it.
struct Recorded {
  const void* kernel;
  unsigned blocks;
  unsigned threads;
  std::vector<std::vector<uint8_t>> arguments;
};

struct State {
  uint32_t seed = 0;  // of the order of threads
  int compute_capability = 90;
  int num_processors = 132;
  std::function<void(const Recorded&)> recorder;  // called instead of the kernel
  unsigned first_block = 0;  // blocks before it do not run: others are far away in memory
  unsigned block = 0;
  unsigned num_blocks = 0;
  unsigned num_threads = 0;
  unsigned thread = 0;
  std::vector<Fiber> fibers;
  std::vector<Slot> slots[2];  // used in turn: nobody is two exchanges ahead of another
  std::function<void()> body;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_bytes = 0;
};
inline State state;

inline void Enter() {
  __sanitizer_finish_switch_fiber(nullptr, &state.scheduler_stack, &state.scheduler_bytes);
  state.body();
  Fiber& fiber = state.fibers[state.thread];
  fiber.is_done = true;
  __sanitizer_start_switch_fiber(nullptr, state.scheduler_stack, state.scheduler_bytes);
  swapcontext(&fiber.context, &state.scheduler);
}

inline void Yield() {
  Fiber& fiber = state.fibers[state.thread];
  __sanitizer_start_switch_fiber(&fiber.fake_stack, state.scheduler_stack, state.scheduler_bytes);
  swapcontext(&fiber.context, &state.scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
}

inline void Resume(Fiber& fiber) {
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.data(), fiber.stack.size());
  swapcontext(&state.scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

inline bool HaveCome(const Arrivals& awaited) {
  for (unsigned i = awaited.first; i < awaited.last; ++i) {
    const Fiber& fiber = state.fibers[i];
    if (!fiber.is_done && fiber.*awaited.arrivals < awaited.count) return false;
  }
  return true;
}

inline void Wait(unsigned first, unsigned last, int Fiber::* arrivals) {
  Fiber& fiber = state.fibers[state.thread];
  fiber.awaited = {first, std::min(last, state.num_threads), arrivals, ++(fiber.*arrivals)};
  if (!HaveCome(fiber.awaited)) Yield();
}

inline unsigned FirstOfWarp() { return state.thread / kWarp * kWarp; }
inline void WaitForWarp() { Wait(FirstOfWarp(), FirstOfWarp() + kWarp, &Fiber::warp_arrivals); }

inline void RunBlock() {
  std::vector<unsigned> order(state.num_threads);
  std::iota(order.begin(), order.end(), 0u);
  for (Fiber& fiber : state.fibers) {
    fiber.is_done = false;
    fiber.awaited = {};
    fiber.warp_arrivals = fiber.block_arrivals = fiber.exchanges = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, Enter, 0);
  }
  for (bool is_alive = true; is_alive;) {
    for (size_t i = order.size(); i > 1; --i) {
      state.seed = state.seed * 1664525u + 1013904223u;
      std::swap(order[i - 1], order[(state.seed >> 8) % i]);
    }
    is_alive = false;
    bool has_moved = false;
    for (const unsigned thread : order) {
      Fiber& fiber = state.fibers[thread];
      if (fiber.is_done) continue;
      is_alive = true;
      if (!HaveCome(fiber.awaited)) continue;
      has_moved = true;
      state.thread = thread;
      Resume(fiber);
    }
    if (is_alive && !has_moved) Fail("some threads never reach a barrier");
  }
}

inline void RunGrid(unsigned num_blocks, unsigned num_threads, std::function<void()> body) {
  state.num_blocks = num_blocks;
  state.num_threads = num_threads;
  state.body = std::move(body);
  state.fibers.resize(num_threads);
  for (std::vector<Slot>& slots : state.slots) slots.resize(num_threads);
  for (state.block = state.first_block; state.block < num_blocks; ++state.block) RunBlock();
}

template <typename T>
std::vector<uint8_t> BytesOf(const T& value) {
  std::vector<uint8_t> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <typename... Parameters>
void Run(unsigned num_blocks, unsigned num_threads, void (*kernel)(Parameters...),
         Parameters... arguments) {
  if (num_threads == 0 || num_threads > 1024) Fail("no GPU has blocks of that many threads");
  if (num_blocks == 0) Fail("a launch of no blocks");
  if (state.recorder) {
    state.recorder(
        {reinterpret_cast<const void*>(kernel), num_blocks, num_threads, {BytesOf(arguments)...}});
  } else {
    RunGrid(num_blocks, num_threads, [=] { kernel(arguments...); });
  }
}

template <typename T>
T Load(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) Fail("a misaligned load");
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline void LoadSector(const void* from, uint32_t (&words)[8]) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(words) != 0) Fail("a misaligned load");
  std::memcpy(words, from, sizeof(words));
}

template <int kBytes>
void Store(void* to, const void* value) {
  if (reinterpret_cast<uintptr_t>(to) % kBytes != 0) Fail("a misaligned store");
  std::memcpy(to, value, kBytes);
}

// Gives a value to the warp and calls read(slots of the warp).
template <typename T, typename Read>
auto Exchange(const T& value, Read read) {
  static_assert(sizeof(T) <= sizeof(Slot));
  std::vector<Slot>& slots = state.slots[state.fibers[state.thread].exchanges++ % 2];
  std::memcpy(&slots[state.thread], &value, sizeof(T));
  WaitForWarp();
  return read(&slots[FirstOfWarp()]);
}

template <typename T>
T Shuffle(const T& value, unsigned lane) {
  return Exchange(value, [&](const Slot* slots) {
    T other;
    std::memcpy(&other, &slots[lane % kWarp], sizeof(T));
    return other;
  });
}

inline uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> 4 * i & 15;
    const uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 255;
    const uint32_t sign = (byte & 128) != 0 ? 255 : 0;
    result |= ((pick & 8) != 0 ? sign : byte) << 8 * i;
  }
  return result;
}

// Rounds as the processors do: to nearest even, with a NaN of their own.
template <DType kDType>
uint32_t RoundTo(float value) {
  if (std::isnan(value)) return 0x7FFF;
  return kDType == kBFloat16 ? cpu::BFloat16::Round(value) : cpu::Float16::Round(value);
}

template <DType kDType>
float Half(const uint32_t* words, unsigned index) {
  const uint16_t bits = static_cast<uint16_t>(words[index / 2] >> 16 * (index % 2));
  return kDType == kBFloat16 ? cpu::BFloat16::Widen(bits) : cpu::Float16::Widen(bits);
}

// Magnitudes order like their bits; a NaN becomes the processors' own.
template <DType kDType>
uint32_t MaxOrNan(uint32_t a, uint32_t b) {
  if (kDType == kFloat32) return std::max(a, b) <= 0x7F800000u ? std::max(a, b) : 0x7FFFFFFFu;
  const uint32_t infinity = kDType == kBFloat16 ? 0x7F80 : 0x7C00;
  const uint32_t low = std::max(a & 0xFFFF, b & 0xFFFF);
  const uint32_t high = std::max(a >> 16, b >> 16);
  return (low <= infinity ? low : 0x7FFF) | (high <= infinity ? high : 0x7FFF) << 16;
}

// As far off as it may be, in a direction that depends on the value.
inline float ApproximateReciprocal(float value) {
  return FloatFromBits(BitsFromFloat(1.0f / value) + BitsFromFloat(value) % 3 - 1);
}

// mma.sync.m16n8k16: lane l = 4 * group + place has rows `group` and `group + 8` of A, column
// `group` of B, and of each the elements 2 * place + {0, 1, 8, 9} along k.
template <DType kDType>
void MultiplyTile(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Fragments {
    float a[8];
    float b[4];
  } mine;
  for (unsigned i = 0; i < 8; ++i) mine.a[i] = Half<kDType>(a, i);
  for (unsigned i = 0; i < 4; ++i) mine.b[i] = Half<kDType>(b, i);
  const unsigned lane = state.thread % kWarp;
  Exchange(mine, [&](const Slot* slots) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned column = lane % 4 * 2 + i % 2;
      for (unsigned place = 0; place < 4; ++place) {
        Fragments row, other;
        std::memcpy(&row, &slots[lane / 4 * 4 + place], sizeof(row));
        std::memcpy(&other, &slots[column * 4 + place], sizeof(other));
        // Words 0 and 2 of A are of a lane's first row, 1 and 3 of its second.
        for (unsigned k = 0; k < 2; ++k) {
          sums[i] += row.a[i / 2 * 2 + k] * other.b[k];
          sums[i] += row.a[i / 2 * 2 + 4 + k] * other.b[2 + k];
        }
      }
    }
    return 0;
  });
}

struct ThreadIndex {
  operator uint32_t() const { return state.thread; }
};
struct BlockIndex {
  operator uint32_t() const { return state.block; }
};
struct BlockSize {
  operator uint32_t() const { return state.num_threads; }
};
struct GridSize {
  operator uint32_t() const { return state.num_blocks; }
};
template <typename Index>
struct Axes {
  Index x;
};

}  // namespace nf4tensor::emulator

inline constexpr nf4tensor::emulator::Axes<nf4tensor::emulator::ThreadIndex> threadIdx{};
inline constexpr nf4tensor::emulator::Axes<nf4tensor::emulator::BlockIndex> blockIdx{};
inline constexpr nf4tensor::emulator::Axes<nf4tensor::emulator::BlockSize> blockDim{};
inline constexpr nf4tensor::emulator::Axes<nf4tensor::emulator::GridSize> gridDim{};

inline void __syncthreads() {
  using namespace nf4tensor::emulator;
  Wait(0, state.num_threads, &Fiber::block_arrivals);
}
inline void __syncwarp(unsigned = ~0u) { nf4tensor::emulator::WaitForWarp(); }

template <typename T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  return nf4tensor::emulator::Shuffle(value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return nf4tensor::emulator::Shuffle(value, nf4tensor::emulator::state.thread % 32 ^ mask);
}

template <typename T>
T __ldg(const T* from) {
  return nf4tensor::emulator::Load<T>(from);
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline int __float2int_rn(float a) { return static_cast<int>(std::lrint(a)); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  return nf4tensor::emulator::PermuteBytes(a, b, selector & 0x7777u);
}
