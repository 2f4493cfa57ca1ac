// How native_grid.cpp compares a kernel with what is expected of it, and adds it all up.
#pragma once

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "native_grid_memory.h"

namespace nf4tensor {
namespace {

using Bytes = std::vector<uint8_t>;

// Where a kernel's arguments lie (see Buffer::Place).
struct Placement {
  int64_t in_shift;
  int64_t out_shift;
  bool stream;
};

// Compares bytes, and ends the program at the first difference, which it describes.
class Comparer {
 public:
  explicit Comparer(const char* isa) : isa_(isa) {}

  void Compare(const char* op, const RecordSpec& spec, int dtype, const Placement& placement,
               const std::vector<const Buffer*>& buffers, const uint8_t* actual,
               const Bytes& expected) {
    ++num_comparisons_;
    bool guards_hold = true;
    for (const Buffer* buffer : buffers) guards_hold = guards_hold && buffer->GuardsHold();
    if (guards_hold && expected.empty()) return;
    if (guards_hold && std::memcmp(actual, expected.data(), expected.size()) == 0) return;
    Describe(op, spec, dtype, placement);
    if (!guards_hold) {
      std::fprintf(stderr, "wrote outside of its output\n");
      std::exit(1);
    }
    size_t i = 0;
    while (actual[i] == expected[i]) ++i;
    std::fprintf(stderr, "byte %zu of %zu is 0x%02x, expected 0x%02x\n", i, expected.size(),
                 actual[i], expected[i]);
    std::exit(1);
  }

  // For sums in an order that is the instruction set's own: neither counted nor in the checksum.
  void CheckWithin(const char* op, const RecordSpec& spec, int dtype, const Placement& placement,
                   const Buffer& buffer, float actual, double expected, double bound) {
    const double difference = actual - expected;
    if (buffer.GuardsHold() && difference <= bound && difference >= -bound) return;
    Describe(op, spec, dtype, placement);
    std::fprintf(stderr, "found %g, expected %g, no farther than %g, guards hold: %d\n", actual,
                 expected, bound, buffer.GuardsHold());
    std::exit(1);
  }

  void AddToChecksum(const Bytes& bytes) {
    for (size_t i = 0; i < bytes.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i, bytes.size() - i < 8 ? bytes.size() - i : 8);
      checksum_ = (checksum_ ^ word) * 0x9E3779B97F4A7C15u;
      checksum_ ^= checksum_ >> 32;
    }
  }

  int64_t num_comparisons() const { return num_comparisons_; }
  uint64_t checksum() const { return checksum_; }

 private:
  void Describe(const char* op, const RecordSpec& spec, int dtype, const Placement& placement) {
    std::fprintf(stderr,
                 "native_grid: %s %s: in_features %" PRId64 ", block_size %" PRId64
                 ", scale_kind %d, segment_length %" PRId64 ", num_segments %" PRId64
                 ", quant_type %d, dtype %d, in at %" PRId64 ", out at %" PRId64 ", stream %d: ",
                 isa_, op, spec.in_features, spec.block_size, static_cast<int>(spec.scale_kind),
                 spec.segment_length, spec.num_segments, static_cast<int>(spec.quant_type), dtype,
                 placement.in_shift, placement.out_shift, placement.stream);
  }

  const char* isa_;
  int64_t num_comparisons_ = 0;
  uint64_t checksum_ = 0;
};

}  // namespace
}  // namespace nf4tensor
