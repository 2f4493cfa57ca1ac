// The loop of dequantize over rows and blocks, shared by the instruction sets. Included by their
// translation units only, inside an anonymous namespace: code for one processor must not be linked
// into the code for another.
//
// A Decoder<DType> turns blocks into weights:
//   Bits                          the type of an output element
//   SetScale(levels, scale)       scales and rounds the 16 levels, once a block
//   Decode(packed, count, out)    looks `count` weights up, from an even position of the row
#pragma once

// Calls decode(column, count) for each piece of a block in columns [begin, end) of a row, after
// SetScale with the block's scale.
template <typename Decoder, typename Decode>
inline void ForEachBlock(const RecordSpec& spec, ScaleReader& reader, const uint8_t* row,
                         int64_t begin, int64_t end, Decoder& decoder, Decode decode) {
  constexpr int64_t kScalesAtOnce = 64;  // in a loop that is vectorized
  float scales[kScalesAtOnce];
  const float* levels = Levels(spec.quant_type);
  const int shift = __builtin_ctzll(spec.block_size);  // a power of two
  const int64_t end_block = ((end - 1) >> shift) + 1;
  int64_t column = begin;
  reader.StartRow(row, begin >> shift);
  for (int64_t block = begin >> shift; block < end_block; block += kScalesAtOnce) {
    const int64_t left = end_block - block;
    const int64_t count = left < kScalesAtOnce ? left : kScalesAtOnce;
    reader.Read(scales, count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block_end = (block + i + 1) << shift;
      const int64_t next = block_end < end ? block_end : end;
      decoder.SetScale(levels, scales[i]);
      decode(column, next - column);
      column = next;
    }
  }
}

template <typename Decoder>
void DequantizeRowsWith(const RecordSpec& shared_spec, int64_t num_rows,
                        const uint8_t* __restrict__ record, uint8_t* __restrict__ out,
                        bool stream) {
  constexpr int64_t kBytes = sizeof(typename Decoder::Bits);
  const RecordSpec spec = shared_spec;  // a copy, which compilers know that no store changes
  const int64_t pitch = spec.pitch();
  const int64_t out_pitch = spec.in_features * kBytes;
  Decoder decoder(stream && out_pitch % 32 == 0 && reinterpret_cast<uintptr_t>(out) % 32 == 0);
  ScaleReader reader(spec);
  for (int64_t i = 0; i < num_rows; ++i, record += pitch, out += out_pitch) {
    ForEachBlock(spec, reader, record, 0, spec.in_features, decoder,
                 [&](int64_t column, int64_t count) {
                   decoder.Decode(record + column / 2, count, out + column * kBytes);
                 });
  }
}
