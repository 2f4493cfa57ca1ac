// Dots of few inputs with rows of a weight, shared by the instruction sets: weights are multiplied
// in the registers that they are decoded to, in the order in which they come out. Included by their
// translation units only, inside an anonymous namespace. Needs dequantize_rows.h and tiles.h.
//
// Beside what tiles.h asks for:
//   Vector::Sum(register)                 the sum of its lanes
//   FloatDecoder::Decode64(packed, body)  calls body(v, weights) for each register of 64 weights
//   FloatDecoder::Position(v, lane)       which of the 64 that weight is

template <typename Vector, typename Decoder>
void ArrangeWith(int64_t count, const float* __restrict__ from, float* __restrict__ to) {
  int position[kDotStep];
  for (int i = 0; i < kDotStep; ++i) {
    position[i] = Decoder::Position(i / Vector::kLanes, i % Vector::kLanes);
  }
  for (int64_t block = 0; block < count; block += kDotStep) {
    for (int i = 0; i < kDotStep; ++i) to[block + i] = from[block + position[i]];
  }
}

// output[m * output_pitch] += input[m] . row, over columns [begin, end). Sums of few inputs are
// taken apart, or each would wait for the one before.
template <typename Vector, typename Decoder, int kInputs>
void DotRow(const RecordSpec& spec, ScaleReader& reader, const uint8_t* __restrict__ row,
            int64_t begin, int64_t end, const float* __restrict__ input, int64_t input_pitch,
            float* __restrict__ output, int64_t output_pitch) {
  constexpr int kChains = kInputs == 1 ? 4 : 2;
  typename Vector::Register sums[kInputs][kChains];
  for (auto& chains : sums) {
    for (auto& sum : chains) sum = Vector::Zero();
  }
  Decoder decoder(/*stream=*/false);
  ForEachBlock(spec, reader, row, begin, end, decoder, [&](int64_t column, int64_t count) {
    for (int64_t i = column; i < column + count; i += kDotStep) {
      const float* values = input + (i - begin);
      decoder.Decode64(row + i / 2, [&](int v, typename Vector::Register weights) {
#pragma GCC unroll 4
        for (int m = 0; m < kInputs; ++m) {
          sums[m][v % kChains] =
              Vector::MultiplyAdd(Vector::Load(values + m * input_pitch + v * Vector::kLanes),
                                  weights, sums[m][v % kChains]);
        }
      });
    }
  });
  for (int m = 0; m < kInputs; ++m) {
    float sum = 0.0f;
    for (int chain = 0; chain < kChains; ++chain) sum += Vector::Sum(sums[m][chain]);
    output[m * output_pitch] += sum;
  }
}

template <typename Vector, typename Decoder>
void DotRowsWith(const RecordSpec& shared_spec, int64_t num_rows, int64_t begin, int64_t end,
                 const uint8_t* record, int64_t num_inputs, const float* input, int64_t input_pitch,
                 float* output, int64_t output_pitch) {
  const RecordSpec spec = shared_spec;
  const int64_t pitch = spec.pitch();
  ScaleReader reader(spec);
  constexpr int64_t kMost = 4;
  constexpr decltype(&DotRow<Vector, Decoder, 1>) kDots[kMost] = {
      DotRow<Vector, Decoder, 1>, DotRow<Vector, Decoder, 2>, DotRow<Vector, Decoder, 3>,
      DotRow<Vector, Decoder, 4>};
  for (int64_t n = 0; n < num_rows; ++n, record += pitch) {
    for (int64_t m = 0; m < num_inputs; m += kMost) {
      const int64_t count = num_inputs - m < kMost ? num_inputs - m : kMost;
      kDots[count - 1](spec, reader, record, begin, end, input + m * input_pitch, input_pitch,
                       output + m * output_pitch + n, output_pitch);
    }
  }
}
