// The loop of quantize over rows and blocks, shared by the instruction sets. Included by their
// translation units only, inside an anonymous namespace (see dequantize_rows.h).
//
// An Encoder<Format, QuantType> turns a block of weights into codes:
//   AbsMax(weight, count)                  the largest magnitude; NaN if a value is not finite
//   Codes(weight, count, absmax, packed)   divides and packs

constexpr float kMaxSquare = 255.0f * 255.0f;

// For any processor, and for what the others leave over.
template <typename Format, QuantType kQuantType>
struct ScalarEncoder {
  using Bits = typename Format::Bits;

  static float Value(const uint8_t* weight, int64_t i) {
    return Format::Widen(Load<Bits>(weight + i * static_cast<int64_t>(sizeof(Bits))));
  }

  // The largest magnitude; NaN if any value is not finite.
  static float AbsMax(const uint8_t* weight, int64_t count) {
    uint32_t largest = 0;  // magnitudes order like their bits
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, BitsFromFloat(Value(weight, i)) & 0x7FFFFFFFu);
    }
    return FloatFromBits(largest < kInfinityBits ? largest : kNanBits);
  }

  // Divides and packs; an odd count leaves the zero code in the last nibble. Two loops over one
  // array each, which compilers vectorize; one loop over pairs took twice the time.
  static void Codes(const uint8_t* weight, int64_t count, float absmax, uint8_t* packed) {
    uint8_t codes[kMaxBlockSize + 1];
    for (int64_t i = 0; i < count; ++i) codes[i] = Encode<kQuantType>(Value(weight, i) / absmax);
    codes[count] = ZeroCode(kQuantType);
    for (int64_t i = 0; i < count; i += 2) {
      packed[i / 2] = static_cast<uint8_t>(codes[i] << 4 | codes[i + 1]);
    }
  }
};

// Thresholds in the order of a binary search: from place i it goes on to place 2 * i where the
// weight is not above threshold i, else to 2 * i + 1. It starts at place 1 and ends past the last
// place, which is a power of two minus one, by the number of thresholds below the weight.
template <int kSize>
constexpr Table<float, kNumCodes> MakeSearchTree(const Table<float, kSize>& thresholds) {
  Table<float, kNumCodes> tree{};
  for (int width = (kSize + 1) / 2, place = 1; width > 0; width /= 2) {
    for (int i = width - 1; i < kSize; i += 2 * width) tree.values[place++] = thresholds[i];
  }
  return tree;
}

// FP4 codes by the number of thresholds below the magnitude, plus 8 for negative weights.
template <typename T>
constexpr Table<T, kNumCodes> MakeFp4CodesBySign() {
  Table<T, kNumCodes> codes{};
  for (int i = 0; i < kNumFp4Magnitudes; ++i) {
    codes.values[i] = kFp4Codes[i];
    codes.values[kNumFp4Magnitudes + i] = i == 0 ? kFp4Codes[0] : kFp4Codes[i] | kFp4SignBit;
  }
  return codes;
}

// Encodes one block and returns its absmax.
template <template <typename, QuantType> class Encoder, typename Format, QuantType kQuantType>
float QuantizeBlock(const uint8_t* weight, int64_t count, uint8_t* packed) {
  using ThisEncoder = Encoder<Format, kQuantType>;
  const float absmax = ThisEncoder::AbsMax(weight, count);
  if (absmax > 0.0f) {
    ThisEncoder::Codes(weight, count, absmax, packed);
  } else {  // zero or NaN
    memset(packed, ZeroCode(kQuantType) * 0x11, (count + 1) / 2);
  }
  return absmax;
}

// The square8 pair of a segment's absmax values; zero blocks have no say.
SegmentPair FitPair(const float* absmax, int64_t count) {
  float lowest = std::numeric_limits<float>::infinity();
  float highest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(absmax[i])) return {FloatFromBits(kNanBits), FloatFromBits(kNanBits)};
    if (absmax[i] == 0.0f) continue;
    lowest = std::min(lowest, absmax[i]);
    highest = std::max(highest, absmax[i]);
  }
  if (highest == 0.0f) return {0.0f, 0.0f};
  SegmentPair pair{(highest - lowest) / kMaxSquare, lowest};
  if (std::isinf(DecodeScale(kMaxSquare, pair))) pair.step = std::nextafter(pair.step, 0.0f);
  return pair;
}

uint8_t EncodeScale(float absmax, SegmentPair pair) {
  if (!(absmax > 0.0f && pair.step > 0.0f)) return 0;
  const float root = std::sqrt((absmax - pair.base) / pair.step);
  return static_cast<uint8_t>(std::lrint(std::min(root, 255.0f)));
}

// Writes the scales of a row and, where it has them, its pairs.
void WriteScales(const RecordSpec& spec, const float* absmax, int64_t phase, uint8_t* row) {
  uint8_t* scales = row + spec.scales_offset();
  if (!spec.has_segments()) {
    std::memcpy(scales, absmax, spec.num_blocks() * sizeof(float));
    return;
  }
  for (int64_t segment = 0; segment < spec.num_segments; ++segment) {
    const int64_t begin = FirstBlock(spec, phase, segment);
    const int64_t end = FirstBlock(spec, phase, segment + 1);
    const SegmentPair pair = FitPair(absmax + begin, end - begin);
    Store(row + spec.pair_offset(segment), pair);
    for (int64_t block = begin; block < end; ++block) {
      scales[block] = EncodeScale(absmax[block], pair);
    }
  }
}

// Writes every byte of a row. absmax: scratch for num_blocks.
template <template <typename, QuantType> class Encoder, typename Format, QuantType kQuantType>
void QuantizeRow(const RecordSpec& spec, const uint8_t* weight, int64_t phase, float* absmax,
                 uint8_t* row) {
  const int64_t gaps_begin = spec.codes_bytes();
  std::memset(row + gaps_begin, 0, spec.pitch() - gaps_begin);
  for (int64_t block = 0; block < spec.num_blocks(); ++block) {
    const int64_t begin = block * spec.block_size;
    const int64_t count = std::min(spec.block_size, spec.in_features - begin);
    absmax[block] = QuantizeBlock<Encoder, Format, kQuantType>(
        weight + begin * sizeof(typename Format::Bits), count, row + begin / 2);
  }
  WriteScales(spec, absmax, phase, row);
  if (spec.has_segments()) Store(row + spec.segments_offset(), static_cast<uint32_t>(phase));
}

template <template <typename, QuantType> class Encoder, typename Format>
void QuantizeRowsWith(const RecordSpec& spec, int64_t num_rows, const uint8_t* __restrict__ weight,
                      bool keep_phase, float* __restrict__ absmax, uint8_t* __restrict__ record) {
  const auto quantize = spec.quant_type == QuantType::kNf4
                            ? QuantizeRow<Encoder, Format, QuantType::kNf4>
                            : QuantizeRow<Encoder, Format, QuantType::kFp4>;
  const int64_t weight_pitch =
      spec.in_features * static_cast<int64_t>(sizeof(typename Format::Bits));
  for (int64_t i = 0; i < num_rows; ++i, weight += weight_pitch, record += spec.pitch()) {
    quantize(spec, weight, keep_phase ? LoadPhase(spec, record) : 0, absmax, record);
  }
}
