// The loop of dequantize over rows and blocks, shared by the instruction sets. Included by their
// translation units only, inside an anonymous namespace: code for one processor must not be linked
// into the code for another.
//
// A Decoder<DType> turns blocks into weights:
//   Bits                          the type of an output element
//   SetScale(levels, scale)       scales and rounds the 16 levels, once a block
//   Decode(packed, count, out)    looks `count` weights up, from an even position of the row

template <typename Decoder>
void DequantizeRowsWith(const RecordSpec& spec, int64_t num_rows,
                        const uint8_t* __restrict__ record, uint8_t* __restrict__ out,
                        bool stream) {
  const float* levels = Levels(spec.quant_type);
  const int64_t out_pitch = spec.in_features * static_cast<int64_t>(sizeof(typename Decoder::Bits));
  Decoder decoder(stream && out_pitch % 32 == 0 && reinterpret_cast<uintptr_t>(out) % 32 == 0);
  for (int64_t i = 0; i < num_rows; ++i, record += spec.pitch(), out += out_pitch) {
    ScaleReader scales(spec, record);
    for (int64_t begin = 0; begin < spec.in_features; begin += spec.block_size) {
      decoder.SetScale(levels, scales.Next());
      const int64_t left = spec.in_features - begin;
      decoder.Decode(record + begin / 2, left < spec.block_size ? left : spec.block_size,
                     out + begin * static_cast<int64_t>(sizeof(typename Decoder::Bits)));
    }
  }
}
