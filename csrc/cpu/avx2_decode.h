// The decoders for AVX2 and F16C (see dequantize_rows.h and tiles.h). Included by avx2.cpp only,
// inside an anonymous namespace.

// Of the bits in memory: a scale in a float register would have to leave it.
inline bool IsFinite(const float* value) {
  return (Load<uint32_t>(value) & kInfinityBits) != kInfinityBits;
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

// Tables of 16 bytes each, for every scale that is decoded at once. Making all of them first keeps
// the units busy: where a table is made just before it is used, each block waits for its own.
template <int kNumBytes>
class ByteTables {
 public:
  // Each lane has eight entries of two tables, one after the other: they become tables `byte` and
  // `byte + 1` of a scale.
  void Put(int64_t scale, int byte, __m256i halves) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes_[scale][byte]),
                       _mm256_permute4x64_epi64(halves, 0xD8));
  }

  // A table in both lanes.
  __m256i Get(int64_t scale, int byte) const {
    return _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(bytes_[scale][byte])));
  }

 private:
  alignas(32) uint8_t bytes_[kScalesAtOnce][kNumBytes][kNumCodes];
};

// Two halves of scaled levels, rounded to two bytes each: 16 entries in order.
inline __m256i RoundTable(BFloat16, __m256 first, __m256 second) {
  return _mm256_packus_epi32(RoundToBFloat16(first), RoundToBFloat16(second));
}

inline __m256i RoundTable(Float16, __m256 first, __m256 second) {
  const __m256i halves = _mm256_set_m128i(_mm256_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT),
                                          _mm256_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT));
  const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
  return _mm256_permutevar8x32_epi32(halves, order);
}

inline void Put(uint8_t* out, __m256i values, bool stream) {
  if (stream) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out), values);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), values);
  }
}

// 16-bit weights: the low and the high bytes of the table are looked up apart, 16 at a time.
class TwoByteTable {
 public:
  TwoByteTable(__m256i low_bytes, __m256i high_bytes, bool stream)
      : low_bytes_(low_bytes), high_bytes_(high_bytes), stream_(stream) {}

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
    const __m256i low = _mm256_shuffle_epi8(low_bytes_, codes);
    const __m256i high = _mm256_shuffle_epi8(high_bytes_, codes);
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
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(low_bytes_), codes);
    const __m128i high = _mm_shuffle_epi8(_mm256_castsi256_si128(high_bytes_), codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm_unpackhi_epi8(low, high));
  }

  __m256i low_bytes_;
  __m256i high_bytes_;
  bool stream_;
};

template <typename Format>
class TwoByteDecoder {
 public:
  using Bits = uint16_t;

  explicit TwoByteDecoder(bool stream) : stream_(stream) {}
  ~TwoByteDecoder() {
    if (stream_) _mm_sfence();
  }

  void MakeTables(const float* levels, const float* scales, int64_t count) {
    const __m256 first = LoadQuarters(levels);
    const __m256 second = LoadQuarters(levels + 4);
    const __m256i by_byte = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                                             0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int64_t i = 0; i < count; ++i) {
      __m256i table;
      if (IsFinite(scales + i)) {
        const __m256 factor = _mm256_broadcast_ss(scales + i);
        table = RoundTable(Format{}, _mm256_mul_ps(first, factor), _mm256_mul_ps(second, factor));
      } else {  // NaN has one form only, which the instructions do not know
        alignas(32) Bits rounded[kNumCodes];
        RoundLevels<Format>(levels, scales[i], rounded);
        table = _mm256_load_si256(reinterpret_cast<const __m256i*>(rounded));
      }
      tables_.Put(i, 0, _mm256_shuffle_epi8(table, by_byte));
    }
  }

  TwoByteTable TableOf(int64_t i) const { return {tables_.Get(i, 0), tables_.Get(i, 1), stream_}; }

 private:
  bool stream_;
  ByteTables<2> tables_;
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
// permutations of eight levels and a blend took twice the instructions. The half that bfloat16
// rounds away needs no look-up.
template <bool kHasLowHalf>
class FloatTable {
 public:
  static constexpr int kNumBytes = kHasLowHalf ? 4 : 2;

  FloatTable(const ByteTables<kNumBytes>& tables, int64_t i, bool stream) : stream_(stream) {
    for (int byte = 0; byte < kNumBytes; ++byte) bytes_[byte] = tables.Get(i, byte);
  }

  void Decode(const uint8_t* packed, int64_t count, uint8_t* out) const {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32, out += 128) {
      __m256i weights[4];
      Decode32(Spread(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2))), weights);
      Put(out, weights[0], stream_);
      Put(out + 32, weights[1], stream_);
      Put(out + 64, weights[2], stream_);
      Put(out + 96, weights[3], stream_);
    }
    for (; i < count; i += 16, out += 64) {
      alignas(32) float rest[16];
      const int64_t left = count - i < 16 ? count - i : 16;
      Decode16(packed + i / 2, left, rest);
      memcpy(out, rest, 4 * left);
    }
  }

  void DecodePanels(const uint8_t* packed, int64_t count, int64_t panel_pitch, float* to) const {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32, to += 2 * panel_pitch) {
      __m256i weights[4];
      Decode32(Spread(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2))), weights);
      StorePanel(weights, to);
      StorePanel(weights + 2, to + panel_pitch);
    }
    for (; i < count; i += 16, to += panel_pitch) {
      const int64_t left = count - i < 16 ? count - i : 16;
      Decode16(packed + i / 2, left, to);
      for (int64_t rest = left; rest < 16; ++rest) to[rest] = 0.0f;
    }
  }

  // Calls body(Place<v>(), weights) for the eight registers of 64 weights, in the order in which
  // they come out of the interleaving (see dots.h).
  template <typename Body>
  void Decode64(const uint8_t* packed, Body body) const {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i weights[4];
    Decode32InHalves(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble), weights);
    body(Place<0>(), _mm256_castsi256_ps(weights[0]));
    body(Place<1>(), _mm256_castsi256_ps(weights[1]));
    body(Place<2>(), _mm256_castsi256_ps(weights[2]));
    body(Place<3>(), _mm256_castsi256_ps(weights[3]));
    Decode32InHalves(_mm256_and_si256(bytes, nibble), weights);
    body(Place<4>(), _mm256_castsi256_ps(weights[0]));
    body(Place<5>(), _mm256_castsi256_ps(weights[1]));
    body(Place<6>(), _mm256_castsi256_ps(weights[2]));
    body(Place<7>(), _mm256_castsi256_ps(weights[3]));
  }

 private:
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

  // weights[i] becomes weights 8 * i to 8 * i + 7.
  void Decode32(__m256i codes, __m256i* weights) const {
    const __m256i third = _mm256_shuffle_epi8(bytes_[kNumBytes - 2], codes);
    const __m256i fourth = _mm256_shuffle_epi8(bytes_[kNumBytes - 1], codes);
    const __m256i high[2] = {_mm256_unpacklo_epi8(third, fourth),
                             _mm256_unpackhi_epi8(third, fourth)};
    __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if constexpr (kHasLowHalf) {
      const __m256i first = _mm256_shuffle_epi8(bytes_[0], codes);
      const __m256i second = _mm256_shuffle_epi8(bytes_[1], codes);
      low[0] = _mm256_unpacklo_epi8(first, second);
      low[1] = _mm256_unpackhi_epi8(first, second);
    }
    weights[0] = _mm256_unpacklo_epi16(low[0], high[0]);
    weights[1] = _mm256_unpackhi_epi16(low[0], high[0]);
    weights[2] = _mm256_unpacklo_epi16(low[1], high[1]);
    weights[3] = _mm256_unpackhi_epi16(low[1], high[1]);
  }

  // As Decode32, but where nothing is in the lower half, masks and shifts do without interleaving:
  // fewer units of a processor shuffle than do anything else.
  void Decode32InHalves(__m256i codes, __m256i* weights) const {
    if constexpr (kHasLowHalf) {
      Decode32(codes, weights);
    } else {
      const __m256i third = _mm256_shuffle_epi8(bytes_[0], codes);
      const __m256i fourth = _mm256_shuffle_epi8(bytes_[1], codes);
      const __m256i first_half = _mm256_unpacklo_epi8(third, fourth);
      const __m256i second_half = _mm256_unpackhi_epi8(third, fourth);
      const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
      weights[0] = _mm256_slli_epi32(first_half, 16);
      weights[1] = _mm256_and_si256(first_half, upper);
      weights[2] = _mm256_slli_epi32(second_half, 16);
      weights[3] = _mm256_and_si256(second_half, upper);
    }
  }

  // 16 weights, of which count are in the record.
  void Decode16(const uint8_t* packed, int64_t count, float* to) const {
    uint64_t bytes = 0;
    memcpy(&bytes, packed, (count + 1) / 2);
    __m256i weights[4];
    Decode32(Spread(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))), weights);
    StorePanel(weights, to);
  }

  static void StorePanel(const __m256i* weights, float* to) {
    _mm256_storeu_ps(to, _mm256_castsi256_ps(weights[0]));
    _mm256_storeu_ps(to + 8, _mm256_castsi256_ps(weights[1]));
  }

  __m256i bytes_[kNumBytes];
  bool stream_;
};

template <typename Format>
class FloatDecoder {
  static constexpr bool kHasLowHalf = HasLowHalf(Format{});
  using Table = FloatTable<kHasLowHalf>;

 public:
  using Bits = uint32_t;

  explicit FloatDecoder(bool stream) : stream_(stream) {}
  ~FloatDecoder() {
    if (stream_) _mm_sfence();
  }

  void MakeTables(const float* levels, const float* scales, int64_t count) {
    const __m256 first = LoadQuarters(levels);
    const __m256 second = LoadQuarters(levels + 4);
    for (int64_t i = 0; i < count; ++i) {
      if (IsFinite(scales + i)) {
        const __m256 factor = _mm256_broadcast_ss(scales + i);
        PutTable(i, RoundThrough(Format{}, _mm256_mul_ps(first, factor)),
                 RoundThrough(Format{}, _mm256_mul_ps(second, factor)));
      } else {  // NaN has one form only, which the instructions do not know
        float rounded[kNumCodes];
        for (int code = 0; code < kNumCodes; ++code) {
          rounded[code] = Format::Widen(Format::Round(levels[code] * scales[i]));
        }
        PutTable(i, _mm256_castps_si256(LoadQuarters(rounded)),
                 _mm256_castps_si256(LoadQuarters(rounded + 4)));
      }
    }
  }

  Table TableOf(int64_t i) const { return {tables_, i, stream_}; }

  static int Position(int v, int lane) {
    const int is_odd = v / 4;
    const int half = v / 2 % 2;
    const int part = v % 2;
    const int place = kHasLowHalf ? 4 * part + lane % 4 : 2 * (lane % 4) + part;
    return 2 * (16 * (lane / 4) + 8 * half + place) + is_odd;
  }

 private:
  // first has entries 0 to 3 and 8 to 11, second has the others.
  void PutTable(int64_t i, __m256i first, __m256i second) {
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    first = _mm256_shuffle_epi8(first, by_byte);
    second = _mm256_shuffle_epi8(second, by_byte);
    tables_.Put(i, Table::kNumBytes - 2, _mm256_unpackhi_epi32(first, second));
    if constexpr (kHasLowHalf) tables_.Put(i, 0, _mm256_unpacklo_epi32(first, second));
  }

  bool stream_;
  ByteTables<Table::kNumBytes> tables_;
};
