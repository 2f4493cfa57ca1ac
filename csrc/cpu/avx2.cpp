// The kernels for AVX2 and F16C. Compiled with those flags and entered only where the processor
// has both.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/formats.h"
#include "cpu/kernels.h"

namespace nf4tensor::cpu {
namespace {

#include "cpu/dequantize_rows.h"
#include "cpu/quantize_rows.h"

inline bool IsFinite(float value) {
  return (BitsFromFloat(value) & kInfinityBits) != kInfinityBits;
}

// Eight floats as the low halves of 32-bit integers, rounded to bfloat16.
inline __m256i RoundToBFloat16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
}

// The 16 scaled levels rounded to two bytes each, in order.
inline __m256i RoundTable(BFloat16, __m256 low, __m256 high) {
  const __m256i packed = _mm256_packus_epi32(RoundToBFloat16(low), RoundToBFloat16(high));
  return _mm256_permute4x64_epi64(packed, 0xD8);
}

inline __m256i RoundTable(Float16, __m256 low, __m256 high) {
  const __m128i first = _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT);
  return _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), first);
}

inline void Put(uint8_t* out, __m256i values, bool stream) {
  if (stream) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out), values);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), values);
  }
}

// 16-bit weights: the low and the high bytes of the table are looked up apart, 16 at a time.
template <typename Format>
class TwoByteDecoder {
 public:
  using Bits = uint16_t;

  explicit TwoByteDecoder(bool stream) : stream_(stream) {}
  ~TwoByteDecoder() {
    if (stream_) _mm_sfence();
  }

  void SetScale(const float* levels, float scale) {
    __m256i table;
    if (IsFinite(scale)) {
      const __m256 factor = _mm256_set1_ps(scale);
      table = RoundTable(Format{}, _mm256_mul_ps(_mm256_loadu_ps(levels), factor),
                         _mm256_mul_ps(_mm256_loadu_ps(levels + 8), factor));
    } else {  // NaN has one form only, which the instructions do not know
      alignas(32) Bits rounded[kNumCodes];
      RoundLevels<Format>(levels, scale, rounded);
      table = _mm256_load_si256(reinterpret_cast<const __m256i*>(rounded));
    }
    const __m256i split = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0,
                                           2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    // Low bytes of all 16, then high bytes of all 16.
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(table, split), 0xD8);
    low_ = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    high_ = _mm256_permute2x128_si256(bytes, bytes, 0x11);
  }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) Decode64(packed + i / 2, out + 2 * i);
    for (; i + 16 <= count; i += 16) Decode16(packed + i / 2, out + 2 * i);
    if (i == count) return;
    // The rest of a row that ends inside 16 weights.
    uint8_t rest_packed[8] = {};
    uint8_t rest[32];
    memcpy(rest_packed, packed + i / 2, (count - i + 1) / 2);
    Decode16(rest_packed, rest);
    memcpy(out + 2 * i, rest, 2 * (count - i));
  }

 private:
  void Decode64(const uint8_t* packed, uint8_t* out) const {
    const __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)), 0xD8);
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    const __m256i odd = _mm256_and_si256(bytes, nibble);
    Put32(_mm256_unpacklo_epi8(even, odd), out);
    Put32(_mm256_unpackhi_epi8(even, odd), out + 64);
  }

  // codes: weights 0 to 15 in the low lane, 16 to 31 in the high one.
  void Put32(__m256i codes, uint8_t* out) const {
    const __m256i low = _mm256_shuffle_epi8(low_, codes);
    const __m256i high = _mm256_shuffle_epi8(high_, codes);
    const __m256i first = _mm256_unpacklo_epi8(low, high);   // weights 0 to 7 and 16 to 23
    const __m256i second = _mm256_unpackhi_epi8(low, high);  // weights 8 to 15 and 24 to 31
    const bool stream = stream_;
    Put(out, _mm256_permute2x128_si256(first, second, 0x20), stream);
    Put(out + 32, _mm256_permute2x128_si256(first, second, 0x31), stream);
  }

  void Decode16(const uint8_t* packed, uint8_t* out) const {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), nibble),
                                            _mm_and_si128(bytes, nibble));
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(low_), codes);
    const __m128i high = _mm_shuffle_epi8(_mm256_castsi256_si128(high_), codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm_unpackhi_epi8(low, high));
  }

  bool stream_;
  __m256i low_;
  __m256i high_;
};

// 32-bit weights: two tables of eight, chosen between by the highest bit of the code.
class FourByteDecoder {
 public:
  using Bits = uint32_t;

  explicit FourByteDecoder(bool stream) : stream_(stream) {}
  ~FourByteDecoder() {
    if (stream_) _mm_sfence();
  }

  void SetScale(const float* levels, float scale) {
    if (!IsFinite(scale)) {
      alignas(32) Bits rounded[kNumCodes];
      RoundLevels<Float32>(levels, scale, rounded);
      low_ = _mm256_load_ps(reinterpret_cast<const float*>(rounded));
      high_ = _mm256_load_ps(reinterpret_cast<const float*>(rounded + 8));
      return;
    }
    const __m256 factor = _mm256_set1_ps(scale);
    low_ = _mm256_mul_ps(_mm256_loadu_ps(levels), factor);
    high_ = _mm256_mul_ps(_mm256_loadu_ps(levels + 8), factor);
  }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) Decode16(packed + i / 2, out + 4 * i, stream_);
    if (i == count) return;
    uint8_t rest_packed[8] = {};
    uint8_t rest[64];
    memcpy(rest_packed, packed + i / 2, (count - i + 1) / 2);
    Decode16(rest_packed, rest, false);
    memcpy(out + 4 * i, rest, 4 * (count - i));
  }

 private:
  void Decode16(const uint8_t* packed, uint8_t* out, bool stream) const {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), nibble),
                                            _mm_and_si128(bytes, nibble));
    Put(out, LookUp(_mm256_cvtepu8_epi32(codes)), stream);
    Put(out + 32, LookUp(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8))), stream);
  }

  __m256i LookUp(__m256i codes) const {
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_permutevar8x32_ps(low_, codes),
                                                _mm256_permutevar8x32_ps(high_, codes), is_high));
  }

  bool stream_;
  __m256 low_;
  __m256 high_;
};

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

}  // namespace

const Kernels kAvx2Kernels = {
    "avx2",
    {DequantizeRowsWith<FourByteDecoder>, DequantizeRowsWith<TwoByteDecoder<BFloat16>>,
     DequantizeRowsWith<TwoByteDecoder<Float16>>},
    {QuantizeRowsWith<Avx2Encoder, Float32>, QuantizeRowsWith<Avx2Encoder, BFloat16>,
     QuantizeRowsWith<Avx2Encoder, Float16>},
};

}  // namespace nf4tensor::cpu
