// Blocks of weights on AVX-512 (F, BW, VL and DQ), shared by the translation units for processors
// with and without VBMI. Included by them only, inside an anonymous namespace (see
// dequantize_rows.h).
//
// An Unpacker turns 64 codes into indices of table entries; the lowest four bits of each count:
//   Words(packed, index)     into 64 16-bit ones, in two registers
//   Dwords(packed, index)    into 64 32-bit ones, in four registers

// What Words shuffles: the 16-bit index w is in byte w / 2 or, for the second register, in byte
// 16 + w / 2. A shuffle of 16 bytes reads the lowest four bits only, and so the first of the two.
constexpr Table<uint8_t, 64> MakeWordOrder() {
  Table<uint8_t, 64> order{};
  for (int i = 0; i < 64; ++i) order.values[i] = static_cast<uint8_t>(i / 4 + 16 * (i % 2));
  return order;
}

// What Dwords shuffles: the 32-bit index d of register r is in byte 8 * r + d / 2.
constexpr Table<uint8_t, 64> MakeDwordOrder() {
  Table<uint8_t, 64> order{};
  for (int i = 0; i < 64; ++i) order.values[i] = static_cast<uint8_t>(i / 8 + 8 * (i % 4));
  return order;
}

// The upper halves of 16 integers, twice.
constexpr Table<uint16_t, 32> MakeUpperHalves() {
  Table<uint16_t, 32> order{};
  for (int i = 0; i < 32; ++i) order.values[i] = static_cast<uint16_t>(2 * (i % 16) + 1);
  return order;
}

alignas(64) constexpr auto kWordOrder = MakeWordOrder();
alignas(64) constexpr auto kDwordOrder = MakeDwordOrder();
alignas(64) constexpr auto kUpperHalves = MakeUpperHalves();

template <typename T, int kSize>
inline __m512i LoadTable(const Table<T, kSize>& table) {
  static_assert(sizeof(table) == 64);
  return _mm512_load_si512(table.values);
}

inline __m128i LoadPacked16(const uint8_t* packed) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
}

// By how much the indices of a register are shifted: the first of each two is the high nibble.
inline __m512i WordShift(int part) { return _mm512_set1_epi32(0x80008 * part + 4); }
inline __m512i DwordShift(int part) { return _mm512_set1_epi64(0x800000008 * part + 4); }

// 32 codes of 16 bytes to 16-bit indices.
inline __m512i WordIndices(__m128i packed) {
  const __m512i bytes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(packed), LoadTable(kWordOrder));
  return _mm512_srlv_epi16(bytes, WordShift(0));
}

// Codes 16 * part to 16 * part + 15 of what Dwords shuffled, or of 16 bytes.
inline __m512i ShuffleDwords(__m128i packed) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(packed), LoadTable(kDwordOrder));
}
inline __m512i DwordIndices(__m512i shuffled, int part) {
  return _mm512_srlv_epi32(shuffled, DwordShift(part));
}

// The 16 scaled levels. NaN has one form only, which the instructions do not know.
inline __m512 ScaleLevels(const float* levels, float scale) {
  const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(levels), _mm512_set1_ps(scale));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(scaled, scaled, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(scaled, is_nan,
                            _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kNanBits))));
}

// The 16 scaled levels rounded to two bytes each, twice. In integers: vcvtneps2bf16 takes
// subnormals for zeros.
inline __m512i RoundTable(BFloat16, __m512 scaled) {
  const __m512i bits = _mm512_castps_si512(scaled);
  const __m512i odd = _mm512_srli_epi32(_mm512_slli_epi32(bits, 15), 31);
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  return _mm512_permutexvar_epi16(LoadTable(kUpperHalves), _mm512_add_epi32(bits, bias));
}

inline __m512i RoundTable(Float16, __m512 scaled) {
  return _mm512_broadcast_i64x4(_mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
}

// Where weights go: through the caches, or past them in whole lines or in aligned halves of lines.
enum class Path { kCached, kLines, kHalfLines };

template <Path kPath>
inline void Put(uint8_t* out, __m512i values) {
  auto* const halves = reinterpret_cast<__m256i*>(out);
  if constexpr (kPath == Path::kCached) {
    _mm512_storeu_si512(out, values);
  } else if constexpr (kPath == Path::kLines) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), values);
  } else {
    _mm256_stream_si256(halves, _mm512_castsi512_si256(values));
    _mm256_stream_si256(halves + 1, _mm512_extracti64x4_epi64(values, 1));
  }
}

template <Path kPath>
inline void Put(uint8_t* out, __m256i values) {
  auto* const to = reinterpret_cast<__m256i*>(out);
  kPath == Path::kCached ? _mm256_storeu_si256(to, values) : _mm256_stream_si256(to, values);
}

// Dequantizes on the best path that all blocks may take.
template <template <Path> class Decoder>
void DequantizeRowsOnPath(const RecordSpec& spec, int64_t num_rows, Columns columns,
                          const uint8_t* record, uint8_t* out, bool stream) {
  constexpr int64_t kBytes = sizeof(typename Decoder<Path::kCached>::Bits);
  const uint64_t places = reinterpret_cast<uintptr_t>(out) | columns.out_pitch |
                          (columns.begin * kBytes) | (spec.block_size * kBytes);
  if (!stream || places % 32 != 0) {
    DequantizeRowsWith<OneTable<Decoder<Path::kCached>>>(spec, num_rows, columns, record, out,
                                                         false);
  } else if (places % 64 != 0) {
    DequantizeRowsWith<OneTable<Decoder<Path::kHalfLines>>>(spec, num_rows, columns, record, out,
                                                            true);
  } else {
    DequantizeRowsWith<OneTable<Decoder<Path::kLines>>>(spec, num_rows, columns, record, out, true);
  }
}

inline __m128i LoadPackedPart(const uint8_t* packed, int64_t count) {
  return _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << ((count + 1) / 2)) - 1), packed);
}

// 16-bit weights: 32 lookups an instruction.
template <typename Format, typename Unpacker, Path kPath>
class Avx512TwoByteDecoder {
 public:
  using Bits = uint16_t;

  explicit Avx512TwoByteDecoder(bool) {}
  ~Avx512TwoByteDecoder() {
    if (kPath != Path::kCached) _mm_sfence();
  }

  void SetScale(const float* levels, float scale) {
    table_ = RoundTable(Format{}, ScaleLevels(levels, scale));
  }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    for (; count >= 64; count -= 64, packed += 32, out += 128) {
      __m512i index[2];
      Unpacker::Words(packed, index);
      Put<kPath>(out, _mm512_permutexvar_epi16(index[0], table_));
      Put<kPath>(out + 64, _mm512_permutexvar_epi16(index[1], table_));
    }
    if (count == 0) return;
    if (count >= 32) {
      const __m512i index = WordIndices(LoadPacked16(packed));
      Put<kPath>(out, _mm512_permutexvar_epi16(index, table_));
      count -= 32, packed += 16, out += 64;
    }
    if (count >= 16) {
      Put<kPath>(out, LookUp16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed))));
      count -= 16, packed += 8, out += 32;
    }
    if (count == 0) return;
    _mm256_mask_storeu_epi16(out, static_cast<__mmask16>((1u << count) - 1),
                             LookUp16(LoadPackedPart(packed, count)));
  }

 private:
  __m256i LookUp16(__m128i packed) const {
    return _mm256_permutexvar_epi16(_mm512_castsi512_si256(WordIndices(packed)),
                                    _mm512_castsi512_si256(table_));
  }

  __m512i table_;
};

// 32-bit weights: 16 lookups an instruction.
template <typename Unpacker, Path kPath>
class Avx512FourByteDecoder {
 public:
  using Bits = uint32_t;

  explicit Avx512FourByteDecoder(bool) {}
  ~Avx512FourByteDecoder() {
    if (kPath != Path::kCached) _mm_sfence();
  }

  void SetScale(const float* levels, float scale) { table_ = ScaleLevels(levels, scale); }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    for (; count >= 64; count -= 64, packed += 32, out += 256) {
      __m512i index[4];
      Unpacker::Dwords(packed, index);
      for (int part = 0; part < 4; ++part) Put<kPath>(out + 64 * part, LookUp(index[part]));
    }
    for (; count >= 16; count -= 16, packed += 8, out += 64) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
      Put<kPath>(out, LookUp(DwordIndices(ShuffleDwords(bytes), 0)));
    }
    if (count == 0) return;
    const __m512i index = DwordIndices(ShuffleDwords(LoadPackedPart(packed, count)), 0);
    _mm512_mask_storeu_epi32(out, static_cast<__mmask16>((1u << count) - 1), LookUp(index));
  }

 private:
  __m512i LookUp(__m512i index) const {
    return _mm512_castps_si512(_mm512_permutexvar_ps(index, table_));
  }

  __m512 table_;
};

// 16 weights, or fewer and zeros.
inline __m512 LoadWeights(Float32, const uint8_t* weight, __mmask16 lanes) {
  return _mm512_maskz_loadu_ps(lanes, weight);
}

inline __m512 LoadWeights(BFloat16, const uint8_t* weight, __mmask16 lanes) {
  const __m256i bits = _mm256_maskz_loadu_epi16(lanes, weight);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 LoadWeights(Float16, const uint8_t* weight, __mmask16 lanes) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, weight));
}

// The largest bits of any weight without its sign: magnitudes order like their bits.
inline uint32_t LargestMagnitude(const uint8_t* weight, int64_t count, uint32_t) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t left = count - i;
    const __mmask16 lanes = static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xFFFFu);
    const __m512i bits = _mm512_maskz_loadu_epi32(lanes, weight + 4 * i);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, magnitude));
  }
  const __m256i of8 =
      _mm256_max_epu32(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
  __m128i of4 = _mm_max_epu32(_mm256_castsi256_si128(of8), _mm256_extracti128_si256(of8, 1));
  of4 = _mm_max_epu32(of4, _mm_shuffle_epi32(of4, 0x4E));
  of4 = _mm_max_epu32(of4, _mm_shuffle_epi32(of4, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(of4));
}

inline uint16_t LargestMagnitude(const uint8_t* weight, int64_t count, uint16_t) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 32) {
    const int64_t left = count - i;
    const __mmask32 lanes = left < 32 ? (1u << left) - 1 : 0xFFFFFFFFu;
    const __m512i bits = _mm512_maskz_loadu_epi16(lanes, weight + 2 * i);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, magnitude));
  }
  const __m256i of16 =
      _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
  const __m128i of8 =
      _mm_max_epu16(_mm256_castsi256_si128(of16), _mm256_extracti128_si256(of16, 1));
  const __m128i ones = _mm_set1_epi16(-1);
  const __m128i lowest = _mm_minpos_epu16(_mm_xor_si128(of8, ones));  // there is no maxpos
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(lowest));
}

alignas(64) constexpr auto kNf4Tree = MakeSearchTree(kNf4Thresholds);
alignas(64) constexpr auto kFp4Tree = MakeSearchTree(kFp4Thresholds);
alignas(64) constexpr auto kFp4CodesBySign = MakeFp4CodesBySign<uint32_t>();

template <int kDepth>
inline __m512i Search(__m512 values, const Table<float, kNumCodes>& tree) {
  __m512i place = _mm512_set1_epi32(1);
  for (int step = 0; step < kDepth; ++step) {
    const __m512 threshold = _mm512_permutexvar_ps(place, _mm512_load_ps(tree.values));
    const __mmask16 is_above = _mm512_cmp_ps_mask(values, threshold, _CMP_GT_OQ);
    place = _mm512_add_epi32(place, place);
    place = _mm512_mask_add_epi32(place, is_above, place, _mm512_set1_epi32(1));
  }
  return place;
}

// Codes of 16 weights that were divided by their block's absmax; the lowest four bits count.
template <QuantType kQuantType>
inline __m512i Encode16(__m512 normalized) {
  if constexpr (kQuantType == QuantType::kNf4) return Search<4>(normalized, kNf4Tree);
  const __m512i bits = _mm512_castps_si512(normalized);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i place = Search<3>(_mm512_castsi512_ps(magnitude), kFp4Tree);
  // Bit 3 of the place is set: it stays where the weight is negative.
  const __m512i sign = _mm512_or_si512(_mm512_srli_epi32(bits, 28), _mm512_set1_epi32(7));
  return _mm512_permutexvar_epi32(_mm512_and_si512(place, sign), LoadTable(kFp4CodesBySign));
}

template <typename Format, QuantType kQuantType>
struct Avx512Encoder {
  using Bits = typename Format::Bits;

  static float AbsMax(const uint8_t* weight, int64_t count) {
    const float largest = Format::Widen(LargestMagnitude(weight, count, Bits{}));
    return BitsFromFloat(largest) < kInfinityBits ? largest : FloatFromBits(kNanBits);
  }

  // Lanes past the end are zero weights: an odd count leaves the zero code in the last nibble.
  static void Codes(const uint8_t* weight, int64_t count, float absmax, uint8_t* packed) {
    const __m512 divisor = _mm512_set1_ps(absmax);
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t num = count - i < 16 ? count - i : 16;
      const __mmask16 lanes = static_cast<__mmask16>((1u << num) - 1);
      const __m512 values = LoadWeights(Format{}, weight + i * int64_t{sizeof(Bits)}, lanes);
      const __m512i codes = Encode16<kQuantType>(_mm512_div_ps(values, divisor));
      const __m512i high = _mm512_slli_epi64(codes, 4);
      const __m512i low = _mm512_and_si512(_mm512_srli_epi64(codes, 32), _mm512_set1_epi64(15));
      _mm_mask_storeu_epi8(packed + i / 2, static_cast<__mmask16>((1u << ((num + 1) / 2)) - 1),
                           _mm512_cvtepi64_epi8(_mm512_or_si512(high, low)));
    }
  }
};
