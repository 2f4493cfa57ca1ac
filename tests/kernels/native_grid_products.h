// The kernels that products are made of, for native_grid.cpp: tiles, conversions and sums.
//
// Sums are of small integers, which no order and no fused multiplication rounds, and so bit for bit
// what integers give. Those of decoded weights are compared with float64.
#pragma once

#include <cmath>

#include "native_grid_compare.h"
#include "native_grid_values.h"

namespace nf4tensor {
namespace {

constexpr DType kDTypes[] = {kFloat32, kBFloat16, kFloat16};

class ProductTests {
 public:
  ProductTests(const cpu::Kernels& kernels, Comparer& comparer)
      : kernels_(kernels), comparer_(comparer) {}

  // Whatever decodes a record.
  void TestSpec(const RecordSpec& spec, Random& random) {
    spec_ = spec;
    const Bytes records = MakeRecords(spec_, kRows, random);
    Bytes finite = records;
    MakeScalesFinite(finite, random);
    for (const DType dtype : kDTypes) {
      const int64_t begin = random.Below(CeilDiv(spec_.in_features, cpu::kPanelWidth)) * 16;
      const int64_t end = begin + 1 + random.Below(spec_.in_features - begin);
      for (const int64_t shift : {int64_t{0}, int64_t{3}, kAtEnd}) {
        TestDecodeTile(records, dtype, 0, spec_.in_features, shift, random);
        TestDecodeTile(records, dtype, begin, end, shift, random);
      }
    }
    // Last, since not every instruction set has them and takes of the random numbers.
    for (const DType dtype : kDTypes) TestDots(finite, dtype, random);
  }

  // Whatever knows no records.
  void TestFloats() {
    spec_ = RecordSpec{};
    Random random(1);
    for (const DType dtype : kDTypes) {
      for (int64_t count = 0; count <= 70; ++count) {
        TestWiden(RandomBits(count * ElementBytes(dtype), random), dtype, count);
        TestNarrow(dtype, count, random);
      }
      TestEveryWord(dtype);
    }
    for (int64_t num_inputs = 0; num_inputs <= 20; ++num_inputs) {
      for (const int64_t num_rows : {8, 16, 24, 64}) {
        for (const int64_t length : {16, 32, 48, 112, 512}) {
          TestMultiplyTransposed(num_inputs, num_rows, length, random);
        }
      }
      for (const int64_t num_rows : {0, 1, 2, 7, 64}) {
        for (int64_t num_panels = 1; num_panels <= 9; ++num_panels) {
          TestMultiply(num_inputs, num_rows, num_panels, random);
        }
      }
    }
  }

 private:
  static constexpr int64_t kRows = 3;

  static Bytes RandomBits(int64_t num_bytes, Random& random) {
    Bytes bytes(num_bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Next());
    return bytes;
  }

  static std::vector<float> SmallIntegers(int64_t count, Random& random) {
    std::vector<float> floats(count);
    for (float& value : floats) value = static_cast<float>(random.Below(15) - 7);
    return floats;
  }

  static float* Floats(uint8_t* bytes) { return reinterpret_cast<float*>(bytes); }

  static const float* PlaceFloats(Buffer& buffer, const std::vector<float>& floats) {
    return Floats(buffer.Place(floats.data(), 4 * floats.size(), kAtEnd));
  }

  static Bytes BytesOf(const std::vector<float>& floats) {
    Bytes bytes(4 * floats.size());
    if (!floats.empty()) std::memcpy(bytes.data(), floats.data(), bytes.size());
    return bytes;
  }

  void Compare(const char* op, DType dtype, int64_t shift, const uint8_t* actual,
               const Bytes& expected) {
    comparer_.Compare(op, spec_, dtype, {shift, 0, false}, {&in_, &tile_, &out_}, actual, expected);
    comparer_.AddToChecksum(expected);
  }

  void MakeScalesFinite(Bytes& records, Random& random) const {
    for (int64_t i = 0; i < kRows; ++i) {
      uint8_t* const row = records.data() + i * spec_.pitch();
      for (int64_t j = 0; j < spec_.num_segments; ++j) {
        Store(row + spec_.pair_offset(j),
              SegmentPair{random.Normal(-20, -10), random.Normal(-12, 2)});
      }
      for (int64_t j = 0; j < spec_.num_blocks() && !spec_.has_segments(); ++j) {
        Store(row + spec_.scales_offset() + 4 * j, random.Normal(-12, 2));
      }
    }
  }

  // The weights that a dtype holds, as float32 [kRows, in_features].
  std::vector<float> Decode(const Bytes& records, DType dtype) const {
    Bytes weights(kRows * spec_.in_features * ElementBytes(dtype));
    std::vector<float> floats(kRows * spec_.in_features);
    const cpu::Columns all{0, spec_.in_features, spec_.in_features * ElementBytes(dtype)};
    cpu::kScalarKernels.dequantize[dtype](spec_, kRows, all, records.data(), weights.data(), false);
    cpu::kScalarKernels.widen[dtype](kRows * spec_.in_features, weights.data(), floats.data());
    return floats;
  }

  // Both layouts, with gaps between rows and panels that must stay as they are.
  void TestDecodeTile(const Bytes& records, DType dtype, int64_t begin, int64_t end, int64_t shift,
                      Random& random) {
    const std::vector<float> weights = Decode(records, dtype);
    const int64_t num_panels = CeilDiv(end - begin, cpu::kPanelWidth);
    const int64_t gap = cpu::kPanelWidth * random.Below(2);
    const cpu::TileLayout layouts[] = {
        {num_panels * cpu::kPanelWidth + gap, cpu::kPanelWidth},
        {cpu::kPanelWidth, kRows * cpu::kPanelWidth + gap},
    };
    for (const cpu::TileLayout& layout : layouts) {
      const int64_t last = (kRows - 1) * layout.row_pitch + (num_panels - 1) * layout.panel_pitch;
      Bytes expected(4 * (last + cpu::kPanelWidth), kFill);
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t i = 0; i < num_panels * cpu::kPanelWidth; ++i) {
          const int64_t at = row * layout.row_pitch + i / cpu::kPanelWidth * layout.panel_pitch +
                             i % cpu::kPanelWidth;
          const int64_t column = begin + i;
          Store(expected.data() + 4 * at,
                column < end ? weights[row * spec_.in_features + column] : 0.0f);
        }
      }
      const uint8_t* const record = in_.Place(records.data(), records.size(), shift);
      uint8_t* const tile = tile_.Place(expected.size(), 0);
      kernels_.decode_tile[dtype](spec_, 0, begin, end, record, layout, Floats(tile));
      kernels_.decode_tile[dtype](spec_, kRows, begin, end, record, layout, Floats(tile));
      Compare("decode_tile", dtype, shift, tile, expected);
    }
  }

  // Products of few inputs, of any columns that are whole steps, added to what is there.
  void TestDots(const Bytes& records, DType dtype, Random& random) {
    const int64_t num_steps = spec_.in_features / cpu::kDotStep;
    if (kernels_.max_dot_inputs == 0 || num_steps == 0) return;
    if (spec_.block_size % cpu::kDotStep != 0) return;
    const int64_t begin = random.Below(num_steps) * cpu::kDotStep;
    const int64_t end = begin + (1 + random.Below(num_steps - begin / 64)) * cpu::kDotStep;
    const int64_t num_inputs = 1 + random.Below(kernels_.max_dot_inputs + 6);
    const int64_t pitch = end - begin + cpu::kDotStep * random.Below(2);
    const int64_t output_pitch = kRows + random.Below(6);
    std::vector<float> input((num_inputs - 1) * pitch + end - begin);
    for (float& value : input) value = random.Normal(-3, 3);
    std::vector<float> before = SmallIntegers((num_inputs - 1) * output_pitch + kRows, random);

    const float* const natural = PlaceFloats(in_, input);
    float* const arranged = Floats(tile_.Place(4 * input.size(), 0));
    for (int64_t m = 0; m < num_inputs; ++m) {
      kernels_.arrange_for_dot[dtype](end - begin, natural + m * pitch, arranged + m * pitch);
    }
    const uint8_t* const record = record_.Place(records.data(), records.size(), kAtEnd);
    float* const output = Floats(out_.Place(before.data(), 4 * before.size(), kAtEnd));
    kernels_.dot_rows[dtype](spec_, 0, begin, end, record, num_inputs, arranged, pitch, output,
                             output_pitch);
    kernels_.dot_rows[dtype](spec_, kRows, begin, end, record, num_inputs, arranged, pitch, output,
                             output_pitch);
    const std::vector<float> weights = Decode(records, dtype);
    for (int64_t m = 0; m < num_inputs; ++m) {
      for (int64_t n = 0; n < output_pitch && m * output_pitch + n < Count(before); ++n) {
        double exact = before[m * output_pitch + n], magnitudes = std::fabs(exact);
        for (int64_t k = begin; k < end && n < kRows; ++k) {
          const double product =
              double{weights[n * spec_.in_features + k]} * double{input[m * pitch + k - begin]};
          exact += product;
          magnitudes += std::fabs(product);
        }
        // A sum of `length` terms and of the one that was there (see matmul_bound in bounds.py).
        const double length = n < kRows ? static_cast<double>(end - begin) + 1 : 0;
        const double gamma = length * 0x1p-24 / (1 - length * 0x1p-24);
        comparer_.CheckWithin("dot_rows", spec_, dtype, {kAtEnd, kAtEnd, false}, out_,
                              output[m * output_pitch + n], exact, gamma * magnitudes);
      }
    }
  }

  static int64_t Count(const std::vector<float>& floats) {
    return static_cast<int64_t>(floats.size());
  }

  void TestWiden(const Bytes& values, DType dtype, int64_t count) {
    std::vector<float> floats(count);
    cpu::kScalarKernels.widen[dtype](count, values.data(), floats.data());
    Bytes expected = BytesOf(floats);
    MakeNansAlike(kFloat32, count, expected.data());
    for (const int64_t shift : {int64_t{0}, int64_t{2}, kAtEnd}) {
      const uint8_t* const from = in_.Place(values.data(), values.size(), shift);
      uint8_t* const to = out_.Place(4 * count, kAtEnd);
      kernels_.widen[dtype](count, from, Floats(to));
      MakeNansAlike(kFloat32, count, to);
      Compare("widen", dtype, shift, to, expected);
    }
  }

  void TestNarrow(DType dtype, int64_t count, Random& random) {
    std::vector<float> floats(count);
    for (float& value : floats) {
      value = random.Below(2) == 0 ? AnyScale(random)
                                   : FloatFromBits(static_cast<uint32_t>(random.Next()));
    }
    Bytes expected(count * ElementBytes(dtype));
    cpu::kScalarKernels.narrow[dtype](count, floats.data(), expected.data());
    for (const int64_t shift : {int64_t{0}, int64_t{2}, kAtEnd}) {
      const float* const from = PlaceFloats(in_, floats);
      uint8_t* const to = out_.Place(expected.size(), shift);
      kernels_.narrow[dtype](count, from, to);
      MakeNansAlike(dtype, count, to);
      Compare("narrow", dtype, shift, to, expected);
    }
  }

  // Clause 6.3 leaves the bits of a NaN open; the scalar kernels round to one only.
  static void MakeNansAlike(DType dtype, int64_t count, uint8_t* values) {
    std::vector<float> floats(count);
    cpu::kScalarKernels.widen[dtype](count, values, floats.data());
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t nan = RoundTo(dtype, FloatFromBits(kNanBits));
      if (floats[i] != floats[i]) {
        std::memcpy(values + i * ElementBytes(dtype), &nan, ElementBytes(dtype));
      }
    }
  }

  // Each value of 16 bits, and the float32 with the same upper bits and a tie.
  void TestEveryWord(DType dtype) {
    constexpr int64_t kCount = 512;
    for (uint32_t word = 0; word < 0x10000; word += kCount) {
      Bytes values(kCount * ElementBytes(dtype));
      std::vector<float> ties(kCount);
      for (uint32_t i = 0; i < kCount; ++i) {
        const uint32_t bits = dtype == kFloat32 ? (word + i) << 16 : word + i;
        std::memcpy(values.data() + i * ElementBytes(dtype), &bits, ElementBytes(dtype));
        ties[i] = FloatFromBits((word + i) << 16 | (dtype == kFloat16 ? 0x1000u : 0x8000u));
      }
      TestWiden(values, dtype, kCount);
      Bytes expected(values.size());
      cpu::kScalarKernels.narrow[dtype](kCount, ties.data(), expected.data());
      const float* const from = PlaceFloats(in_, ties);
      uint8_t* const to = out_.Place(expected.size(), 0);
      kernels_.narrow[dtype](kCount, from, to);
      MakeNansAlike(dtype, kCount, to);
      Compare("narrow", dtype, 0, to, expected);
    }
  }

  void TestMultiplyTransposed(int64_t num_inputs, int64_t num_rows, int64_t length,
                              Random& random) {
    const int64_t pitch = length + cpu::kPanelWidth * random.Below(2);
    const int64_t output_pitch = num_rows + random.Below(9);
    // Nothing lies behind the last row.
    const int64_t input_size = num_inputs == 0 ? 0 : (num_inputs - 1) * pitch + length;
    const int64_t output_size = num_inputs == 0 ? 0 : (num_inputs - 1) * output_pitch + num_rows;
    const std::vector<float> input = SmallIntegers(input_size, random);
    const std::vector<float> tile = SmallIntegers((num_rows - 1) * pitch + length, random);
    std::vector<float> output = SmallIntegers(output_size, random);
    uint8_t* const actual = out_.Place(output.data(), 4 * output.size(), kAtEnd);
    kernels_.multiply_transposed(num_inputs, num_rows, length, pitch, PlaceFloats(in_, input),
                                 PlaceFloats(tile_, tile), Floats(actual), output_pitch);
    for (int64_t m = 0; m < num_inputs; ++m) {
      for (int64_t n = 0; n < num_rows; ++n) {
        for (int64_t k = 0; k < length; ++k) {
          output[m * output_pitch + n] += input[m * pitch + k] * tile[n * pitch + k];
        }
      }
    }
    Compare("multiply_transposed", kFloat32, num_inputs, actual, BytesOf(output));
  }

  void TestMultiply(int64_t num_inputs, int64_t num_rows, int64_t num_panels, Random& random) {
    constexpr int64_t kWidth = cpu::kPanelWidth;
    const int64_t input_pitch = num_rows + random.Below(9);
    const int64_t panel_pitch = kWidth * (num_rows + random.Below(2));
    const int64_t output_pitch = kWidth * (num_inputs + random.Below(2));
    const int64_t input_size = num_inputs == 0 ? 0 : (num_inputs - 1) * input_pitch + num_rows;
    const std::vector<float> input = SmallIntegers(input_size, random);
    const std::vector<float> tile =
        SmallIntegers((num_panels - 1) * panel_pitch + num_rows * kWidth, random);
    std::vector<float> output =
        SmallIntegers((num_panels - 1) * output_pitch + num_inputs * kWidth, random);
    uint8_t* const actual = out_.Place(output.data(), 4 * output.size(), kAtEnd);
    kernels_.multiply(num_inputs, num_rows, num_panels, PlaceFloats(in_, input), input_pitch,
                      PlaceFloats(tile_, tile), panel_pitch, Floats(actual), output_pitch);
    for (int64_t p = 0; p < num_panels; ++p) {
      for (int64_t m = 0; m < num_inputs; ++m) {
        for (int64_t i = 0; i < num_rows * kWidth; ++i) {
          output[p * output_pitch + m * kWidth + i % kWidth] +=
              input[m * input_pitch + i / kWidth] * tile[p * panel_pitch + i];
        }
      }
    }
    Compare("multiply", kFloat32, num_inputs, actual, BytesOf(output));
  }

  static constexpr int64_t kCapacity = 1 << 18;
  const cpu::Kernels& kernels_;
  Comparer& comparer_;
  RecordSpec spec_{};
  Buffer in_{kCapacity};
  Buffer tile_{kCapacity};
  Buffer out_{kCapacity};
  Buffer record_{kCapacity};
};

}  // namespace
}  // namespace nf4tensor
