// The loop of dequantize over rows and blocks, shared by the instruction sets. Included by their
// translation units only, inside an anonymous namespace: code for one processor must not be linked
// into the code for another.
//
// A Decoder<DType> turns blocks into weights:
//   Bits                          the type of an output element
//   SetScale(levels, scale)       scales and rounds the 16 levels, once a block
//   Decode(packed, count, out)    looks `count` weights up, from an even position of the row
#pragma once

// Decodes the scales of count blocks from `first` on. A loop over many is vectorized; one scale at
// a time took longer than the weights of its block.
void ReadScales(const RecordSpec& spec, const uint8_t* row, int64_t first, int64_t count,
                float* __restrict__ scales) {
  const uint8_t* from = row + spec.scales_offset();
  if (!spec.has_segments()) {
    memcpy(scales, from + 4 * first, 4 * count);
    return;
  }
  const int64_t phase = LoadPhase(spec, row);
  const int64_t end = first + count;
  int64_t segment = SegmentOfBlock(spec, phase, first);
  for (int64_t begin = first; begin < end; ++segment) {
    const int64_t segment_end = FirstBlock(spec, phase, segment + 1);
    const int64_t stop = segment_end < end ? segment_end : end;
    const SegmentPair pair = Load<SegmentPair>(row + spec.pair_offset(segment));
    if (spec.scale_kind == ScaleKind::kSquare8) {
      for (int64_t block = begin; block < stop; ++block) {
        scales[block - first] = DecodeScale(SquareLevel(from[block]), pair);
      }
    } else {
      for (int64_t block = begin; block < stop; ++block) {
        scales[block - first] = DecodeScale(FloatFromBits(kDynamicMapBits[from[block]]), pair);
      }
    }
    begin = stop;
  }
}

// Calls decode(column, count) for each piece of a block in columns [begin, end) of a row, after
// SetScale with the block's scale.
template <typename Decoder, typename Decode>
inline void ForEachBlock(const RecordSpec& spec, const uint8_t* row, int64_t begin, int64_t end,
                         Decoder& decoder, Decode decode) {
  constexpr int64_t kChunk = 64;
  float scales[kChunk];
  const float* levels = Levels(spec.quant_type);
  const int shift = __builtin_ctzll(spec.block_size);  // a power of two
  int64_t column = begin;
  for (int64_t block = begin >> shift; column < end; block += kChunk) {
    const int64_t left = ((end - 1) >> shift) + 1 - block;
    const int64_t count = left < kChunk ? left : kChunk;
    ReadScales(spec, row, block, count, scales);
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
void DequantizeRowsWith(const RecordSpec& spec, int64_t num_rows,
                        const uint8_t* __restrict__ record, uint8_t* __restrict__ out,
                        bool stream) {
  constexpr int64_t kBytes = sizeof(typename Decoder::Bits);
  const int64_t out_pitch = spec.in_features * kBytes;
  Decoder decoder(stream && out_pitch % 32 == 0 && reinterpret_cast<uintptr_t>(out) % 32 == 0);
  for (int64_t i = 0; i < num_rows; ++i, record += spec.pitch(), out += out_pitch) {
    ForEachBlock(spec, record, 0, spec.in_features, decoder, [&](int64_t column, int64_t count) {
      decoder.Decode(record + column / 2, count, out + column * kBytes);
    });
  }
}
