// The kernels for AVX2, FMA and F16C. Compiled with those flags and entered only where the
// processor has all three.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/formats.h"
#include "cpu/kernels.h"

namespace nf4tensor::cpu {
namespace {

#include "cpu/avx2_decode.h"
#include "cpu/dequantize_rows.h"
#include "cpu/dots.h"
#include "cpu/quantize_rows.h"
#include "cpu/tiles.h"

// Eight weights.
inline __m256 LoadWeights(Float32, const uint8_t* weight) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(weight));
}

inline __m256 LoadWeights(BFloat16, const uint8_t* weight) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m256 LoadWeights(Float16, const uint8_t* weight) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight)));
}

// One step of a binary search: doubles the count of thresholds below and adds the comparison.
inline __m256i Step(__m256i count, __m256 values, __m256 threshold) {
  const __m256i is_above = _mm256_castps_si256(_mm256_cmp_ps(values, threshold, _CMP_GT_OQ));
  return _mm256_sub_epi32(_mm256_add_epi32(count, count), is_above);
}

// Thresholds first, first + stride, ... by the count so far, of which the lowest three bits count.
template <int kSize>
inline __m256 ThresholdsAt(const Table<float, kSize>& all, int first, int stride, __m256i count) {
  alignas(32) float some[8] = {};
  for (int i = 0; i < 8 && first + i * stride < kSize; ++i) some[i] = all[first + i * stride];
  return _mm256_permutevar8x32_ps(_mm256_load_ps(some), count);
}

// Codes of eight weights that were divided by their block's absmax.
template <QuantType kQuantType>
inline __m256i Encode8(__m256 normalized) {
  __m256i count = _mm256_setzero_si256();
  if constexpr (kQuantType == QuantType::kNf4) {
    count = Step(count, normalized, _mm256_set1_ps(kNf4Thresholds[7]));
    count = Step(count, normalized, ThresholdsAt(kNf4Thresholds, 3, 8, count));
    count = Step(count, normalized, ThresholdsAt(kNf4Thresholds, 1, 4, count));
    return Step(count, normalized, ThresholdsAt(kNf4Thresholds, 0, 2, count));
  } else {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 magnitude = _mm256_andnot_ps(sign, normalized);
    count = Step(count, magnitude, _mm256_set1_ps(kFp4Thresholds[3]));
    count = Step(count, magnitude, ThresholdsAt(kFp4Thresholds, 1, 4, count));
    count = Step(count, magnitude, ThresholdsAt(kFp4Thresholds, 0, 2, count));
    alignas(32) int32_t codes_by_count[8];
    for (int i = 0; i < 8; ++i) codes_by_count[i] = kFp4Codes[i];
    const __m256i codes = _mm256_permutevar8x32_epi32(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(codes_by_count)), count);
    const __m256i negative = _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(sign, normalized)),
                                               28);  // the sign bit of a code
    const __m256i is_zero = _mm256_cmpeq_epi32(count, _mm256_setzero_si256());
    return _mm256_or_si256(codes, _mm256_andnot_si256(is_zero, negative));
  }
}

template <typename Format, QuantType kQuantType>
struct Avx2Encoder {
  using Scalar = ScalarEncoder<Format, kQuantType>;
  static constexpr int64_t kBytes = sizeof(typename Format::Bits);

  static float AbsMax(const uint8_t* weight, int64_t count) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i largest = _mm256_setzero_si256();  // magnitudes order like their bits
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m256i bits = _mm256_castps_si256(LoadWeights(Format{}, weight + i * kBytes));
      largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude));
    }
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    uint32_t all = BitsFromFloat(Scalar::AbsMax(weight + i * kBytes, count - i));
    for (const uint32_t lane : lanes) all = lane > all ? lane : all;
    return FloatFromBits(all < kInfinityBits ? all : kNanBits);
  }

  static void Codes(const uint8_t* weight, int64_t count, float absmax, uint8_t* packed) {
    const __m256 divisor = _mm256_set1_ps(absmax);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      __m256i codes[4];
      for (int part = 0; part < 4; ++part) {
        const __m256 values = LoadWeights(Format{}, weight + (i + 8 * part) * kBytes);
        codes[part] = Encode8<kQuantType>(_mm256_div_ps(values, divisor));
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + i / 2), Pack(codes));
    }
    Scalar::Codes(weight + i * kBytes, count - i, absmax, packed + i / 2);
  }

 private:
  // 32 codes to 16 bytes, the first of each two in the high nibble.
  static __m128i Pack(const __m256i (&codes)[4]) {
    const __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]),
                                              _mm256_packus_epi32(codes[2], codes[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, order);
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0110));
    return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  }
};

template <typename Format>
void WidenAll(int64_t count, const uint8_t* from, float* to) {
  constexpr int64_t kBytes = sizeof(typename Format::Bits);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, LoadWeights(Format{}, from + i * kBytes));
  WidenEach<Format>(count - i, from + i * kBytes, to + i);
}

inline void StoreWeights(Float32, __m256 values, uint8_t* to) {
  _mm256_storeu_ps(reinterpret_cast<float*>(to), values);
}

inline void StoreWeights(BFloat16, __m256 values, uint8_t* to) {
  // A NaN with a full mantissa would round to zero.
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  const __m256i rounded =
      RoundToBFloat16(_mm256_blendv_ps(values, _mm256_set1_ps(FloatFromBits(kNanBits)), is_nan));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

inline void StoreWeights(Float16, __m256 values, uint8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

template <typename Format>
void NarrowAll(int64_t count, const float* from, uint8_t* to) {
  constexpr int64_t kBytes = sizeof(typename Format::Bits);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) StoreWeights(Format{}, _mm256_loadu_ps(from + i), to + i * kBytes);
  NarrowEach<Format>(count - i, from + i, to + i * kBytes);
}

struct Avx2Vector {
  using Register = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kDotRows = 3;
  static constexpr int kOuterRows = 6;
  static constexpr int kSums = 12;

  static Register Zero() { return _mm256_setzero_ps(); }
  static Register Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Register values) { _mm256_storeu_ps(to, values); }
  static Register Broadcast(float value) { return _mm256_set1_ps(value); }
  static Register MultiplyAdd(Register a, Register b, Register c) {
    return _mm256_fmadd_ps(a, b, c);
  }
  static float Sum(Register values) {
    const __m128 half =
        _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static void AddSums(Register a, Register b, Register c, Register d, float* to) {
    const Register pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sums));
  }
};

}  // namespace

const Kernels kAvx2Kernels = {
    "avx2",
    {DequantizeRowsWith<FloatDecoder<Float32>>, DequantizeRowsWith<TwoByteDecoder<BFloat16>>,
     DequantizeRowsWith<TwoByteDecoder<Float16>>},
    {QuantizeRowsWith<Avx2Encoder, Float32>, QuantizeRowsWith<Avx2Encoder, BFloat16>,
     QuantizeRowsWith<Avx2Encoder, Float16>},
    {DecodeTileWith<FloatDecoder<Float32>>, DecodeTileWith<FloatDecoder<BFloat16>>,
     DecodeTileWith<FloatDecoder<Float16>>},
    {WidenAll<Float32>, WidenAll<BFloat16>, WidenAll<Float16>},
    {NarrowAll<Float32>, NarrowAll<BFloat16>, NarrowAll<Float16>},
    MultiplyTransposedWith<Avx2Vector>,
    MultiplyWith<Avx2Vector>,
    /*max_dot_inputs=*/1,
    {ArrangeWith<Avx2Vector, FloatDecoder<Float32>>,
     ArrangeWith<Avx2Vector, FloatDecoder<BFloat16>>,
     ArrangeWith<Avx2Vector, FloatDecoder<Float16>>},
    {DotRowsWith<Avx2Vector, FloatDecoder<Float32>>,
     DotRowsWith<Avx2Vector, FloatDecoder<BFloat16>>,
     DotRowsWith<Avx2Vector, FloatDecoder<Float16>>},
};

}  // namespace nf4tensor::cpu
