// The loop of dequantize over rows and blocks, shared by the instruction sets. Included by their
// translation units only, inside an anonymous namespace: code for one processor must not be linked
// into the code for another.
//
// A Decoder turns blocks into weights:
//   Bits                               the type of an output element
//   MakeTables(levels, scales, count)  scales and rounds the 16 levels for each of some scales
//   TableOf(i)                         what it made of scale i, which does
//     Decode(packed, count, out)       looks `count` weights up, from an even position of the row
#pragma once

// A Decoder that is a table itself, and makes it by SetScale(levels, scale) when it is used.
template <typename Table>
class OneTable : public Table {
 public:
  using Table::Table;

  void MakeTables(const float* levels, const float* scales, int64_t) {
    levels_ = levels;
    scales_ = scales;
  }
  const Table& TableOf(int64_t i) {
    Table::SetScale(levels_, scales_[i]);
    return *this;
  }

 private:
  const float* levels_ = nullptr;
  const float* scales_ = nullptr;
};

// Calls decode(table, column, count) for each piece of a block in columns [begin, end) of a row,
// with the table of the block's scale.
template <typename Decoder, typename Decode>
inline void ForEachBlock(const RecordSpec& spec, ScaleReader& reader, const uint8_t* row,
                         int64_t begin, int64_t end, Decoder& decoder, Decode decode) {
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
    decoder.MakeTables(levels, scales, count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block_end = (block + i + 1) << shift;
      const int64_t next = block_end < end ? block_end : end;
      decode(decoder.TableOf(i), column, next - column);
      column = next;
    }
  }
}

// Asks for columns [begin, end) of a row that comes later: no processor sees where the next piece
// is, and none waits for memory that is past the end of a record. Always inlined: a function that
// only prefetches has no effect for GCC, which drops its calls.
__attribute__((always_inline)) inline void PrefetchRow(const RecordSpec& spec, const uint8_t* row,
                                                       int64_t begin, int64_t end) {
  for (int64_t i = begin / 2; i < end / 2; i += 64) __builtin_prefetch(row + i);
  __builtin_prefetch(row + spec.scales_offset() + begin / spec.block_size);
  __builtin_prefetch(row + spec.segments_offset());
}

template <typename Decoder>
void DequantizeRowsWith(const RecordSpec& shared_spec, int64_t num_rows, Columns columns,
                        const uint8_t* __restrict__ record, uint8_t* __restrict__ out,
                        bool stream) {
  constexpr int64_t kBytes = sizeof(typename Decoder::Bits);
  const RecordSpec spec = shared_spec;  // a copy, which compilers know that no store changes
  const int64_t pitch = spec.pitch();
  const uint64_t places =
      reinterpret_cast<uintptr_t>(out) | static_cast<uint64_t>(columns.out_pitch);
  Decoder decoder(stream && places % 32 == 0);
  ScaleReader reader(spec);
  for (int64_t i = 0; i < num_rows; ++i, record += pitch, out += columns.out_pitch) {
    PrefetchRow(spec, record + 2 * pitch, columns.begin, columns.end);
    ForEachBlock(spec, reader, record, columns.begin, columns.end, decoder,
                 [&](const auto& table, int64_t column, int64_t count) {
                   table.Decode(record + column / 2, count,
                                out + (column - columns.begin) * kBytes);
                 });
  }
}
