// What tiles.h and dots.h ask for, on AVX-512 (F, BW, VL and DQ). Included by the translation units
// for processors with and without VBMI only, inside an anonymous namespace, after avx512_blocks.h.

// The 16 scaled levels, rounded to a format and widened again.
inline __m512 RoundThrough(Float32, __m512 scaled) { return scaled; }

inline __m512 RoundThrough(BFloat16, __m512 scaled) {
  const __m512i words = RoundTable(BFloat16{}, scaled);
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)), 16));
}

inline __m512 RoundThrough(Float16, __m512 scaled) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
}

template <typename Format, typename Unpacker>
class Avx512FloatDecoder {
 public:
  explicit Avx512FloatDecoder(bool) {}

  void SetScale(const float* levels, float scale) {
    table_ = RoundThrough(Format{}, ScaleLevels(levels, scale));
  }

  void DecodePanels(const uint8_t* packed, int64_t count, int64_t panel_pitch, float* to) const {
    for (; count >= kDotStep; count -= kDotStep, packed += 32, to += 4 * panel_pitch) {
      __m512i index[4];
      Unpacker::Dwords(packed, index);
      for (int v = 0; v < 4; ++v) _mm512_storeu_ps(to + v * panel_pitch, LookUp(index[v]));
    }
    for (; count > 0; count -= kPanelWidth, packed += 8, to += panel_pitch) {
      const int64_t num = count < kPanelWidth ? count : kPanelWidth;
      const __mmask16 lanes = static_cast<__mmask16>((1u << num) - 1);
      const __m512i index = DwordIndices(ShuffleDwords(LoadPackedPart(packed, num)), 0);
      _mm512_storeu_ps(to, _mm512_mask_mov_ps(_mm512_setzero_ps(), lanes, LookUp(index)));
    }
  }

  template <typename Body>
  void Decode64(const uint8_t* packed, Body body) const {
    __m512i index[4];
    Unpacker::Dwords(packed, index);
    body(Place<0>(), LookUp(index[0]));
    body(Place<1>(), LookUp(index[1]));
    body(Place<2>(), LookUp(index[2]));
    body(Place<3>(), LookUp(index[3]));
  }

  static int Position(int v, int lane) { return 16 * v + lane; }

 private:
  __m512 LookUp(__m512i index) const { return _mm512_permutexvar_ps(index, table_); }

  __m512 table_;
};

struct Avx512Vector {
  using Register = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kDotRows = 6;
  static constexpr int kOuterRows = 6;
  static constexpr int kSums = 24;

  static Register Zero() { return _mm512_setzero_ps(); }
  static Register Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Register values) { _mm512_storeu_ps(to, values); }
  static Register Broadcast(float value) { return _mm512_set1_ps(value); }
  static Register MultiplyAdd(Register a, Register b, Register c) {
    return _mm512_fmadd_ps(a, b, c);
  }
  static float Sum(Register values) {
    const __m256 eight = Halve(values);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static void AddSums(Register a, Register b, Register c, Register d, float* to) {
    const __m256 pairs =
        _mm256_hadd_ps(_mm256_hadd_ps(Halve(a), Halve(b)), _mm256_hadd_ps(Halve(c), Halve(d)));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sums));
  }

 private:
  static __m256 Halve(Register values) {
    const __m256i upper = _mm512_extracti64x4_epi64(_mm512_castps_si512(values), 1);
    return _mm256_add_ps(_mm512_castps512_ps256(values), _mm256_castsi256_ps(upper));
  }
};

template <typename Format>
void Avx512Widen(int64_t count, const uint8_t* from, float* to) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes =
        static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xFFFFu);
    const int64_t offset = i * int64_t{sizeof(typename Format::Bits)};
    _mm512_mask_storeu_ps(to + i, lanes, LoadWeights(Format{}, from + offset, lanes));
  }
}

inline void StoreWeights(Float32, __m512 values, __mmask16 lanes, uint8_t* to) {
  _mm512_mask_storeu_ps(to, lanes, values);
}

inline void StoreWeights(BFloat16, __m512 values, __mmask16 lanes, uint8_t* to) {
  // A NaN with a full mantissa would round to zero.
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kNanBits)));
  const __m512i words = RoundTable(BFloat16{}, _mm512_mask_mov_ps(values, is_nan, nan));
  _mm256_mask_storeu_epi16(to, lanes, _mm512_castsi512_si256(words));
}

inline void StoreWeights(Float16, __m512 values, __mmask16 lanes, uint8_t* to) {
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

template <typename Format>
void Avx512Narrow(int64_t count, const float* from, uint8_t* to) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes =
        static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xFFFFu);
    StoreWeights(Format{}, _mm512_maskz_loadu_ps(lanes, from + i), lanes,
                 to + i * int64_t{sizeof(typename Format::Bits)});
  }
}

// The kernels with an Unpacker.
template <typename Unpacker>
struct Avx512 {
  template <Path kPath>
  using ToFloat32 = Avx512FourByteDecoder<Unpacker, kPath>;
  template <Path kPath>
  using ToBFloat16 = Avx512TwoByteDecoder<BFloat16, Unpacker, kPath>;
  template <Path kPath>
  using ToFloat16 = Avx512TwoByteDecoder<Float16, Unpacker, kPath>;
  template <typename Format>
  using ToFloats = OneTable<Avx512FloatDecoder<Format, Unpacker>>;

  static constexpr Kernels Table(const char* isa) {
    return {
        isa,
        {DequantizeRowsOnPath<ToFloat32>, DequantizeRowsOnPath<ToBFloat16>,
         DequantizeRowsOnPath<ToFloat16>},
        {QuantizeRowsWith<Avx512Encoder, Float32>, QuantizeRowsWith<Avx512Encoder, BFloat16>,
         QuantizeRowsWith<Avx512Encoder, Float16>},
        {DecodeTileWith<ToFloats<Float32>>, DecodeTileWith<ToFloats<BFloat16>>,
         DecodeTileWith<ToFloats<Float16>>},
        {Avx512Widen<Float32>, Avx512Widen<BFloat16>, Avx512Widen<Float16>},
        {Avx512Narrow<Float32>, Avx512Narrow<BFloat16>, Avx512Narrow<Float16>},
        MultiplyTransposedWith<Avx512Vector>,
        MultiplyWith<Avx512Vector>,
        /*max_dot_inputs=*/4,
        {ArrangeWith<Avx512Vector, ToFloats<Float32>>,
         ArrangeWith<Avx512Vector, ToFloats<BFloat16>>,
         ArrangeWith<Avx512Vector, ToFloats<Float16>>},
        {DotRowsWith<Avx512Vector, ToFloats<Float32>>,
         DotRowsWith<Avx512Vector, ToFloats<BFloat16>>,
         DotRowsWith<Avx512Vector, ToFloats<Float16>>},
    };
  }
};
