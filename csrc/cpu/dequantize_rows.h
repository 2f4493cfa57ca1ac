// The loop of dequantize over rows and blocks, shared by the instruction sets. Included by their
// translation units only, inside an anonymous namespace: code for one processor must not be linked
// into the code for another.
//
// A Decoder<DType> turns blocks into weights:
//   Bits                          the type of an output element
//   SetScale(levels, scale)       scales and rounds the 16 levels, once a block
//   Decode(packed, count, out)    looks `count` weights up, from an even position of the row

// The 16 levels of a block, scaled and rounded one by one.
template <typename Format>
void RoundLevels(const float* levels, float scale, typename Format::Bits (&table)[kNumCodes]) {
  for (int code = 0; code < kNumCodes; ++code) table[code] = Format::Round(levels[code] * scale);
}

// How many scales are decoded in one go, past the end of a segment too.
constexpr int64_t kScalesAtOnce = 64;

template <typename Decoder>
void DequantizeRowsWith(const RecordSpec& shared_spec, int64_t num_rows,
                        const uint8_t* __restrict__ record, uint8_t* __restrict__ out,
                        bool stream) {
  constexpr int64_t kBytes = sizeof(typename Decoder::Bits);
  const RecordSpec spec = shared_spec;  // a copy, which compilers know that no store changes
  const float* levels = Levels(spec.quant_type);
  const int64_t num_blocks = spec.num_blocks();
  const int64_t pitch = spec.pitch();
  const int64_t out_pitch = spec.in_features * kBytes;
  const int64_t block_codes_bytes = spec.block_size / 2;
  const int64_t block_bytes = spec.block_size * kBytes;
  Decoder decoder(stream && out_pitch % 32 == 0 && reinterpret_cast<uintptr_t>(out) % 32 == 0);
  ScaleReader reader(spec);
  float scales[kScalesAtOnce];
  for (int64_t i = 0; i < num_rows; ++i, record += pitch, out += out_pitch) {
    const uint8_t* packed = record;
    uint8_t* to = out;
    int64_t left = spec.in_features;
    reader.StartRow(record);
    for (int64_t block = 0; block < num_blocks; block += kScalesAtOnce) {
      const int64_t num_scales = std::min(num_blocks - block, kScalesAtOnce);
      reader.Read(scales, num_scales);
      for (int64_t j = 0; j < num_scales; ++j) {
        const int64_t count = left < spec.block_size ? left : spec.block_size;
        decoder.SetScale(levels, scales[j]);
        decoder.Decode(packed, count, to);
        packed += block_codes_bytes;
        to += block_bytes;
        left -= spec.block_size;
      }
    }
  }
}
