// What this machine can do at best, for `roofs.py` to measure beside the kernels: reading, copying,
// multiplying and adding, and the twin of dequantize, which moves the same bytes and decodes
// nothing. Plain C functions; compiled for the processor at hand with OpenMP, whose threads are
// those of torch, since the process has one such library.
#include <unistd.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// The widest integer vector, and 16 bytes repeated over it.
#if defined(__AVX512F__)
using Vector = __m512i;
inline Vector Repeat(const uint8_t* from) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Vector Load(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline void Store(uint8_t* to, Vector value) { _mm512_storeu_si512(to, value); }
inline void Stream(uint8_t* to, Vector value) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
}
inline void Fence() { _mm_sfence(); }
#elif defined(__AVX2__)
using Vector = __m256i;
inline Vector Repeat(const uint8_t* from) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Vector Load(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline void Store(uint8_t* to, Vector value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}
inline void Stream(uint8_t* to, Vector value) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
}
inline void Fence() { _mm_sfence(); }
#else  // no stores past the caches
typedef uint64_t Vector __attribute__((vector_size(16)));
inline Vector Load(const uint8_t* from) {
  Vector value;
  memcpy(&value, from, sizeof(value));
  return value;
}
inline Vector Repeat(const uint8_t* from) { return Load(from); }
inline void Store(uint8_t* to, Vector value) { memcpy(to, &value, sizeof(value)); }
inline void Stream(uint8_t* to, Vector value) { Store(to, value); }
inline void Fence() {}
#endif

constexpr int64_t kBytes = sizeof(Vector);
constexpr int64_t kPrefetch =
    4096;  // bytes; less or none was slower, and none best where all is read

// As dequantize decides it.
bool IsLargerThanCaches(int64_t num_bytes) {
  const long reported = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return num_bytes > (reported > 0 ? int64_t{reported} : int64_t{32} << 20);
}

uint64_t SumOfWords(const uint8_t* from, int64_t num_bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i + 8 <= num_bytes; i += 8) {
    uint64_t word;
    memcpy(&word, from + i, 8);
    sum += word;
  }
  return sum;
}

// 16 bytes in, `out_step` bytes out, from one end of the codes to the other; then the scales.
template <bool kStream>
uint64_t TwinRow(const uint8_t* record, int64_t pitch, int64_t out_step, uint8_t* out,
                 int64_t out_pitch) {
  for (; out_pitch >= out_step; out_pitch -= out_step, record += 16, pitch -= 16) {
    __builtin_prefetch(record + kPrefetch);
    const Vector value = Repeat(record);
    for (int64_t i = 0; i < out_step; i += kBytes, out += kBytes) {
      kStream ? Stream(out, value) : Store(out, value);
    }
  }
  return SumOfWords(record, pitch);
}

// [begin, end) of part `index` of `parts` of a range, cut at multiples of `step`.
inline void Part(int64_t length, int64_t step, int index, int parts, int64_t* begin, int64_t* end) {
  const int64_t steps = length / step;
  *begin = steps * index / parts * step;
  *end = steps * (index + 1) / parts * step;
}

}  // namespace

extern "C" {

// Reads `rows` records of `pitch` bytes and writes as many rows of `out_pitch` bytes, a multiple of
// `out_step`, which is a multiple of 64 and what 16 bytes of codes make. `out` is aligned to 64.
// Outputs that no cache holds are stored past them.
uint64_t nf4_twin(const uint8_t* record, int64_t pitch, int64_t rows, uint8_t* out,
                  int64_t out_pitch, int64_t out_step, int threads) {
  const bool stream = IsLargerThanCaches(rows * out_pitch);
  uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : sum)
  for (int index = 0; index < threads; ++index) {
    int64_t begin, end;
    Part(rows, 1, index, threads, &begin, &end);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* from = record + i * pitch;
      uint8_t* to = out + i * out_pitch;
      sum += stream ? TwinRow<true>(from, pitch, out_step, to, out_pitch)
                    : TwinRow<false>(from, pitch, out_step, to, out_pitch);
    }
    if (stream) Fence();
  }
  return sum;
}

// Reads all bytes, a multiple of 512, and returns a sum of them so that none is left out.
uint64_t nf4_read(const uint8_t* from, int64_t num_bytes, int threads) {
  uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : sum)
  for (int index = 0; index < threads; ++index) {
    int64_t begin, end;
    Part(num_bytes, 8 * kBytes, index, threads, &begin, &end);
    Vector sums[8] = {};
    for (int64_t i = begin; i < end; i += 8 * kBytes) {
      for (int j = 0; j < 8; ++j) sums[j] = sums[j] ^ Load(from + i + j * kBytes);
    }
    for (int j = 1; j < 8; ++j) sums[0] = sums[0] ^ sums[j];
    sum += SumOfWords(reinterpret_cast<const uint8_t*>(sums), kBytes);
  }
  return sum;
}

// Copies bytes, a multiple of 512, past the caches; `to` is aligned to 64.
void nf4_copy(uint8_t* to, const uint8_t* from, int64_t num_bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int index = 0; index < threads; ++index) {
    int64_t begin, end;
    Part(num_bytes, 8 * kBytes, index, threads, &begin, &end);
    for (int64_t i = begin; i < end; i += kBytes) Stream(to + i, Load(from + i));
    Fence();
  }
}

// Multiplies and adds floats in registers and returns what they come to: `rounds` times on each
// thread 12 vectors of 16, two operations a float.
float nf4_multiply_add(int64_t rounds, int threads) {
  typedef float Floats __attribute__((vector_size(sizeof(Vector))));
  constexpr int64_t kFloats = sizeof(Vector) / sizeof(float);
  float sum = 0.0f;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : sum)
  for (int index = 0; index < threads; ++index) {
    const Floats term = Floats{} + 1.0f;
    const Floats factor = term * 0.5f;
    Floats sums[12];
    for (int j = 0; j < 12; ++j)
      sums[j] = term * static_cast<float>(j + 3);  // alike, one would do; 2 stays 2
    for (int64_t round = 0; round < rounds * 16 / kFloats; ++round) {
      for (int j = 0; j < 12; ++j) sums[j] = sums[j] * factor + term;
    }
    for (int j = 0; j < 12; ++j) sum += sums[j][0];
  }
  return sum;
}

}  // extern "C"
