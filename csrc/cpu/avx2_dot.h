// Dots of few inputs with rows of a weight for AVX2: weights are multiplied in the registers that
// they are decoded to, in the order in which they come out. Included by avx2.cpp only, inside an
// anonymous namespace, after avx2_decode.h and dequantize_rows.h.

// Puts 64 inputs where DotRow meets them: vector v, lane l.
template <typename Format>
int PositionInBlock(int v, int l) {
  const int parity = v / 4;
  const int half = v / 2 % 2;
  const int part = v % 2;
  const int pair = HasLowHalf(Format{}) ? 4 * part + l % 4 : 2 * (l % 4) + part;
  return 2 * (16 * (l / 4) + 8 * half + pair) + parity;
}

template <typename Format>
void ArrangeWith(int64_t count, const float* __restrict__ from, float* __restrict__ to) {
  int position[64];
  for (int i = 0; i < 64; ++i) position[i] = PositionInBlock<Format>(i / 8, i % 8);
  for (int64_t block = 0; block < count; block += 64) {
    for (int i = 0; i < 64; ++i) to[block + i] = from[block + position[i]];
  }
}

// output[m * output_pitch] += input[m] . row, over columns [begin, end). Sums of few inputs are
// taken apart, or each would wait for the one before.
template <typename Format, int kInputs>
void DotRow(const RecordSpec& spec, const uint8_t* __restrict__ row, int64_t begin, int64_t end,
            const float* __restrict__ input, int64_t input_pitch, float* __restrict__ output,
            int64_t output_pitch) {
  constexpr int kChains = kInputs == 1 ? 4 : 2;
  __m256 sums[kInputs][kChains];
  for (auto& chains : sums) {
    for (auto& sum : chains) sum = _mm256_setzero_ps();
  }
  FloatDecoder<Format> decoder(/*stream=*/false);
  ForEachBlock(spec, row, begin, end, decoder, [&](int64_t column, int64_t count) {
    for (int64_t i = column; i < column + count; i += 64) {
      const float* values = input + (i - begin);
      decoder.Decode64(row + i / 2, [&](int v, __m256i weights) {
#pragma GCC unroll 4
        for (int m = 0; m < kInputs; ++m) {
          sums[m][v % kChains] =
              _mm256_fmadd_ps(_mm256_loadu_ps(values + m * input_pitch + 8 * v),
                              _mm256_castsi256_ps(weights), sums[m][v % kChains]);
        }
      });
    }
  });
  for (int m = 0; m < kInputs; ++m) {
    __m256 sum = _mm256_add_ps(sums[m][0], sums[m][1]);
    if constexpr (kChains == 4) {
      sum = _mm256_add_ps(sum, _mm256_add_ps(sums[m][2], sums[m][3]));
    }
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    output[m * output_pitch] += _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
}

template <typename Format>
void DotRowsWith(const RecordSpec& spec, int64_t num_rows, int64_t begin, int64_t end,
                 const uint8_t* record, int64_t num_inputs, const float* input, int64_t input_pitch,
                 float* output, int64_t output_pitch) {
  constexpr int64_t kMost = 4;
  constexpr decltype(&DotRow<Format, 1>) kDots[kMost] = {DotRow<Format, 1>, DotRow<Format, 2>,
                                                         DotRow<Format, 3>, DotRow<Format, 4>};
  for (int64_t n = 0; n < num_rows; ++n, record += spec.pitch()) {
    for (int64_t m = 0; m < num_inputs; m += kMost) {
      const int64_t count = num_inputs - m < kMost ? num_inputs - m : kMost;
      kDots[count - 1](spec, record, begin, end, input + m * input_pitch, input_pitch,
                       output + m * output_pitch + n, output_pitch);
    }
  }
}
