// The decoders for AVX2 and F16C (see dequantize_rows.h and tiles.h). Included by avx2.cpp only,
// inside an anonymous namespace.

inline bool IsFinite(float value) {
  return (BitsFromFloat(value) & kInfinityBits) != kInfinityBits;
}

// Eight floats rounded to bfloat16: the upper halves of 32-bit integers, with anything below.
inline __m256i RoundUpperHalf(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
}

// The same as the low halves, with zeros above.
inline __m256i RoundToBFloat16(__m256 values) {
  return _mm256_srli_epi32(RoundUpperHalf(values), 16);
}

// Levels 0 to 3 and 8 to 11 of 16 from the first on: two such halves end in order, lane by lane,
// when they are packed or interleaved.
inline __m256 LoadQuarters(const float* levels) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(levels)),
                              _mm_loadu_ps(levels + 8), 1);
}

// Each lane has eight entries of two bytes' tables, one table after the other: both lanes of
// bytes[i] become table i.
inline void SplitTables(__m256i tables, __m256i* bytes) {
  const __m256i low = _mm256_permute2x128_si256(tables, tables, 0x00);
  const __m256i high = _mm256_permute2x128_si256(tables, tables, 0x11);
  bytes[0] = _mm256_unpacklo_epi64(low, high);
  bytes[1] = _mm256_unpackhi_epi64(low, high);
}

// 16 levels times a factor, rounded to two bytes each, in order.
inline __m256i RoundTable(BFloat16, const float* levels, __m256 factor) {
  return _mm256_packus_epi32(RoundToBFloat16(_mm256_mul_ps(LoadQuarters(levels), factor)),
                             RoundToBFloat16(_mm256_mul_ps(LoadQuarters(levels + 4), factor)));
}

inline __m256i RoundTable(Float16, const float* levels, __m256 factor) {
  const __m256 low = _mm256_mul_ps(_mm256_loadu_ps(levels), factor);
  const __m256 high = _mm256_mul_ps(_mm256_loadu_ps(levels + 8), factor);
  return _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
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
      table = RoundTable(Format{}, levels, _mm256_set1_ps(scale));
    } else {  // NaN has one form only, which the instructions do not know
      alignas(32) Bits rounded[kNumCodes];
      RoundLevels<Format>(levels, scale, rounded);
      table = _mm256_load_si256(reinterpret_cast<const __m256i*>(rounded));
    }
    const __m256i by_byte = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                                             0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    SplitTables(_mm256_shuffle_epi8(table, by_byte), bytes_);
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
    const __m256i low = _mm256_shuffle_epi8(bytes_[0], codes);
    const __m256i high = _mm256_shuffle_epi8(bytes_[1], codes);
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
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(bytes_[0]), codes);
    const __m128i high = _mm_shuffle_epi8(_mm256_castsi256_si128(bytes_[1]), codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm_unpackhi_epi8(low, high));
  }

  bool stream_;
  __m256i bytes_[2];  // the lower and the upper byte of every entry
};

// Eight scaled levels, rounded to a format and widened again, where the format has bytes for them.
inline __m256i RoundThrough(Float32, __m256 values) { return _mm256_castps_si256(values); }

inline __m256i RoundThrough(BFloat16, __m256 values) { return RoundUpperHalf(values); }

inline __m256i RoundThrough(Float16, __m256 values) {
  const __m128i rounded = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
  return _mm256_castps_si256(_mm256_cvtph_ps(rounded));
}

// Whether the lower half of a rounded float32 holds anything.
constexpr bool HasLowHalf(BFloat16) { return false; }
constexpr bool HasLowHalf(Float32) { return true; }
constexpr bool HasLowHalf(Float16) { return true; }

// Weights as float32: each byte of the table is looked up apart, 32 weights at a time. Two
// permutations of eight levels and a blend took twice the instructions.
template <typename Format>
class FloatDecoder {
 public:
  using Bits = uint32_t;

  explicit FloatDecoder(bool stream) : stream_(stream) {}
  ~FloatDecoder() {
    if (stream_) _mm_sfence();
  }

  void SetScale(const float* levels, float scale) {
    __m256i first, second;
    if (IsFinite(scale)) {
      const __m256 factor = _mm256_set1_ps(scale);
      first = RoundThrough(Format{}, _mm256_mul_ps(LoadQuarters(levels), factor));
      second = RoundThrough(Format{}, _mm256_mul_ps(LoadQuarters(levels + 4), factor));
    } else {  // NaN has one form only, which the instructions do not know
      float rounded[kNumCodes];
      for (int code = 0; code < kNumCodes; ++code) {
        rounded[code] = Format::Widen(Format::Round(levels[code] * scale));
      }
      first = _mm256_castps_si256(LoadQuarters(rounded));
      second = _mm256_castps_si256(LoadQuarters(rounded + 4));
    }
    SplitBytes(first, second);
  }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      uint8_t* to = out + 4 * i;
      Decode32(Spread(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2))),
               [&](int part, __m256i weights) { Put(to + 32 * part, weights, stream_); });
    }
    for (; i < count; i += 16) {
      alignas(32) float rest[16];
      const int64_t left = count - i < 16 ? count - i : 16;
      Decode16(packed + i / 2, left, rest);
      memcpy(out + 4 * i, rest, 4 * left);
    }
  }

  void DecodePanels(const uint8_t* packed, int64_t count, int64_t panel_pitch, float* to) const {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32, to += 2 * panel_pitch) {
      float* next = to + panel_pitch;
      Decode32(Spread(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2))),
               [&](int part, __m256i weights) {
                 _mm256_storeu_ps((part < 2 ? to : next) + 8 * (part % 2),
                                  _mm256_castsi256_ps(weights));
               });
    }
    for (; i < count; i += 16, to += panel_pitch) {
      const int64_t left = count - i < 16 ? count - i : 16;
      Decode16(packed + i / 2, left, to);
      for (int64_t rest = left; rest < 16; ++rest) to[rest] = 0.0f;
    }
  }

  // Calls body(v, weights) for the eight registers of 64 weights, in the order in which they come
  // out of the interleaving (see dots.h).
  template <typename Body>
  void Decode64(const uint8_t* packed, Body body) const {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
    const __m256i nibble = _mm256_set1_epi8(15);
    Decode32InHalves(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble),
                     [&](int v, __m256i weights) { body(v, _mm256_castsi256_ps(weights)); });
    Decode32InHalves(_mm256_and_si256(bytes, nibble),
                     [&](int v, __m256i weights) { body(4 + v, _mm256_castsi256_ps(weights)); });
  }

  static int Position(int v, int lane) {
    const int is_odd = v / 4;
    const int half = v / 2 % 2;
    const int part = v % 2;
    const int place = kHasLowHalf ? 4 * part + lane % 4 : 2 * (lane % 4) + part;
    return 2 * (16 * (lane / 4) + 8 * half + place) + is_odd;
  }

 private:
  // The half that bfloat16 rounds away needs no look-up.
  static constexpr bool kHasLowHalf = HasLowHalf(Format{});

  // Byte b of all 16 entries, in both lanes, becomes bytes_[b]. first has entries 0 to 3 and 8 to
  // 11, second has the others.
  void SplitBytes(__m256i first, __m256i second) {
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    first = _mm256_shuffle_epi8(first, by_byte);
    second = _mm256_shuffle_epi8(second, by_byte);
    SplitTables(_mm256_unpackhi_epi32(first, second), bytes_ + 2);
    if constexpr (kHasLowHalf) SplitTables(_mm256_unpacklo_epi32(first, second), bytes_);
  }

  // 32 codes in 16 bytes: one code a byte, in an order that puts neighbours in place when bytes and
  // halves have been interleaved inside the lanes.
  static __m256i Spread(__m128i packed) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0, 2, 3,
                                           6, 7, 10, 11, 14, 15, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(packed), order);
    const __m256i nibble = _mm256_set1_epi8(15);
    return _mm256_unpacklo_epi8(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble),
                                _mm256_and_si256(bytes, nibble));
  }

  // Calls put(part, weights) for weights 8 * part to 8 * part + 7.
  template <typename Put>
  void Decode32(__m256i codes, Put put) const {
    const __m256i third = _mm256_shuffle_epi8(bytes_[2], codes);
    const __m256i fourth = _mm256_shuffle_epi8(bytes_[3], codes);
    const __m256i high[2] = {_mm256_unpacklo_epi8(third, fourth),
                             _mm256_unpackhi_epi8(third, fourth)};
    __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if constexpr (kHasLowHalf) {
      const __m256i first = _mm256_shuffle_epi8(bytes_[0], codes);
      const __m256i second = _mm256_shuffle_epi8(bytes_[1], codes);
      low[0] = _mm256_unpacklo_epi8(first, second);
      low[1] = _mm256_unpackhi_epi8(first, second);
    }
    put(0, _mm256_unpacklo_epi16(low[0], high[0]));
    put(1, _mm256_unpackhi_epi16(low[0], high[0]));
    put(2, _mm256_unpacklo_epi16(low[1], high[1]));
    put(3, _mm256_unpackhi_epi16(low[1], high[1]));
  }

  // As Decode32, but where nothing is in the lower half, masks and shifts do without interleaving:
  // fewer units of a processor shuffle than do anything else.
  template <typename Put>
  void Decode32InHalves(__m256i codes, Put put) const {
    if constexpr (kHasLowHalf) {
      Decode32(codes, put);
    } else {
      const __m256i third = _mm256_shuffle_epi8(bytes_[2], codes);
      const __m256i fourth = _mm256_shuffle_epi8(bytes_[3], codes);
      const __m256i first_half = _mm256_unpacklo_epi8(third, fourth);
      const __m256i second_half = _mm256_unpackhi_epi8(third, fourth);
      const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
      put(0, _mm256_slli_epi32(first_half, 16));
      put(1, _mm256_and_si256(first_half, upper));
      put(2, _mm256_slli_epi32(second_half, 16));
      put(3, _mm256_and_si256(second_half, upper));
    }
  }

  // 16 weights, of which count are in the record.
  void Decode16(const uint8_t* packed, int64_t count, float* to) const {
    uint64_t bytes = 0;
    memcpy(&bytes, packed, (count + 1) / 2);
    Decode32(Spread(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))),
             [&](int part, __m256i weights) {
               if (part < 2) _mm256_storeu_ps(to + 8 * part, _mm256_castsi256_ps(weights));
             });
  }

  bool stream_;
  __m256i bytes_[4];
};
