// Small kernels for test_samples.py: what nvcc makes of loops, tables, barriers and warps.
#include <cstdint>

struct Options {
  uint32_t factors[4];
  uint8_t shift;
  uint64_t offset;
};

__constant__ uint32_t kPrimes[8] = {2, 3, 5, 7, 11, 13, 17, 19};
__device__ const float kHalves[4] = {0.5f, 1.5f, 2.5f, 3.5f};

// Steps to 1, or -1 after 200: every thread goes its own way.
extern "C" __global__ void Collatz(const uint32_t* __restrict__ from, int* __restrict__ steps,
                                   int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    uint64_t n = from[i];
    int step = 0;
    while (n != 1) {
      if (step == 200) {
        step = -1;
        break;
      }
      n = n % 2 == 0 ? n / 2 : 3 * n + 1;
      ++step;
    }
    steps[i] = step;
  }
}

// Tables and a parameter by an index that is known only to the thread.
extern "C" __global__ void LookUp(const uint8_t* __restrict__ index, float* __restrict__ out,
                                  const Options options) {
  const uint32_t i = index[threadIdx.x];
  const uint32_t word = kPrimes[i % 8] * options.factors[i % 4] >> options.shift;
  out[threadIdx.x + options.offset] = __fadd_rn(static_cast<float>(word), kHalves[i % 4]);
}

// A local array that no register can be.
extern "C" __global__ void Histogram(const uint8_t* __restrict__ values, int length,
                                     uint16_t* __restrict__ counts) {
  uint16_t mine[16] = {};
  for (int i = 0; i < length; ++i) ++mine[values[threadIdx.x * length + i] % 16];
  for (int i = 0; i < 16; ++i) counts[threadIdx.x * 16 + i] = mine[i];
}

// The sum of a block by halves, in shared memory.
extern "C" __global__ void SumOfBlock(const float* __restrict__ values, float* __restrict__ sums) {
  __shared__ float shared[128];
  shared[threadIdx.x] = values[blockIdx.x * 128 + threadIdx.x];
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
#ifndef NO_BARRIER
    __syncthreads();
#endif
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}

// Ten words a thread from what the lanes of a warp tell each other.
extern "C" __global__ void Exchange(const uint32_t* __restrict__ values,
                                    uint32_t* __restrict__ out) {
  const uint32_t all = 0xFFFFFFFFu;
  const uint32_t value = values[threadIdx.x];
  uint32_t* const to = out + threadIdx.x * 10;
  to[0] = __shfl_sync(all, value, value % 32);
  to[1] = __shfl_up_sync(all, value, 3);
  to[2] = __shfl_down_sync(all, value, 5);
  to[3] = __shfl_xor_sync(all, value, 9);
  to[4] = __shfl_down_sync(all, value, 1, 8);
  to[5] = __ballot_sync(all, value % 3 == 0);
  to[6] = __any_sync(all, value % 16 == 7) + 2 * __all_sync(all, value != 7);
  to[7] = __match_any_sync(all, value % 4);
  to[8] = __reduce_max_sync(all, value);
  to[9] = 0;
  if (value % 2 == 0) to[9] = __activemask();
}

extern "C" __global__ void Count(const uint32_t* __restrict__ keys, uint32_t* __restrict__ counts,
                                 uint32_t* __restrict__ places) {
  places[threadIdx.x] = atomicAdd(counts + keys[threadIdx.x] % 8, 2);
  if (threadIdx.x % 2 == 0) atomicAdd(counts + 8, keys[threadIdx.x]);
}

// C [16, 8] = A [16, 16] @ B [16, 8], all row-major, through shared memory and ldmatrix.
template <bool kIsBfloat16>
__device__ void Product(const uint4* a, const uint4* b, float* c) {
  __shared__ uint4 tiles[48];
  const uint32_t lane = threadIdx.x;
  tiles[lane] = a[lane];
  if (lane < 16) tiles[32 + lane] = b[lane];
  __syncwarp();
  // Row lane % 16 of A, its half lane / 16; row lane % 16 of B.
  const uint32_t row =
      static_cast<uint32_t>(__cvta_generic_to_shared(tiles + lane % 16 * 2 + lane / 16));
  const uint32_t other = static_cast<uint32_t>(__cvta_generic_to_shared(tiles + 32 + lane % 16));
  uint32_t x[4], y[2];
  float z[4] = {1, 1, 1, 1};
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(y[0]), "=r"(y[1])
               : "r"(other));
#define MULTIPLY(TYPE)                                                                \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3])                       \
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]))
  if (kIsBfloat16) {
    MULTIPLY("bf16");
  } else {
    MULTIPLY("f16");
  }
  float2* const out = reinterpret_cast<float2*>(c + lane / 4 * 8 + lane % 4 * 2);
  out[0] = make_float2(z[0], z[1]);
  out[32] = make_float2(z[2], z[3]);
}

extern "C" __global__ void ProductBf16(const uint4* a, const uint4* b, float* c) {
  Product<true>(a, b, c);
}
extern "C" __global__ void ProductF16(const uint4* a, const uint4* b, float* c) {
  Product<false>(a, b, c);
}

// Every width of loads and stores, and signs.
extern "C" __global__ void Widths(const int8_t* __restrict__ bytes,
                                  const short2* __restrict__ pairs,
                                  const float4* __restrict__ quads, int* __restrict__ out,
                                  float4* __restrict__ turned, uint8_t* __restrict__ low) {
  const uint32_t i = threadIdx.x;
  out[i] = bytes[i] + pairs[i].x * pairs[i].y;
  const float4 q = quads[i];
  turned[i] = make_float4(q.w, q.z, q.y, q.x);
  low[i] = static_cast<uint8_t>(out[i]);
}
