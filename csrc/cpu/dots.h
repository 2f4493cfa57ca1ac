// Dots of few inputs with rows of a weight, shared by the instruction sets: weights are multiplied
// in the registers that they are decoded to, in the order in which they come out. Included by their
// translation units only, inside an anonymous namespace. Needs dequantize_rows.h and tiles.h.
//
// Beside what tiles.h asks for:
//   Vector::Sum(register)                 the sum of its lanes
//   a table's Decode64(packed, body)      calls body(Place<v>(), weights) for each register of 64
//                                         weights
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

// Sums of some inputs, a number of them each. Not an array: compilers would keep it in memory.
template <typename Vector, int kInputs, int kChains>
class Sums {
 public:
  // Adds the products of a register of weights to one sum of each input.
  template <int kChain>
  void Add(const float* values, int64_t pitch, typename Vector::Register weights) {
    own_.template Add<kChain>(Vector::Load(values), weights);
    others_.template Add<kChain>(values + pitch, pitch, weights);
  }
  void AddTo(float* output, int64_t pitch) const {
    *output += own_.Total();
    others_.AddTo(output + pitch, pitch);
  }

 private:
  Sums<Vector, 1, kChains> own_;
  Sums<Vector, kInputs - 1, kChains> others_;
};

template <typename Vector, int kChains>
class Sums<Vector, 1, kChains> {
 public:
  template <int kChain>
  void Add(const float* values, int64_t, typename Vector::Register weights) {
    Add<kChain>(Vector::Load(values), weights);
  }
  template <int kChain>
  void Add(typename Vector::Register values, typename Vector::Register weights) {
    if constexpr (kChain == kChains - 1) {
      last_ = Vector::MultiplyAdd(values, weights, last_);
    } else {
      before_.template Add<kChain>(values, weights);
    }
  }
  void AddTo(float* output, int64_t) const { *output += Total(); }
  float Total() const { return before_.Total() + Vector::Sum(last_); }

 private:
  Sums<Vector, 1, kChains - 1> before_;
  typename Vector::Register last_ = Vector::Zero();
};

template <typename Vector>
class Sums<Vector, 1, 0> {
 public:
  float Total() const { return 0.0f; }
};

// output[m * output_pitch] += input[m] . row, over columns [begin, end). Sums of few inputs are
// taken apart, or each would wait for the one before.
template <typename Vector, typename Decoder, int kInputs>
void DotRow(const RecordSpec& spec, ScaleReader& reader, const uint8_t* __restrict__ row,
            int64_t begin, int64_t end, const float* __restrict__ input, int64_t input_pitch,
            float* __restrict__ output, int64_t output_pitch) {
  constexpr int kChains = kInputs == 1 ? 4 : 4 * kInputs < Vector::kSums ? 2 : 1;
  Sums<Vector, kInputs, kChains> sums;
  Decoder decoder(/*stream=*/false);
  ForEachBlock(spec, reader, row, begin, end, decoder,
               [&](const auto& table, int64_t column, int64_t count) {
                 for (int64_t i = column; i < column + count; i += kDotStep) {
                   const float* values = input + (i - begin);
                   table.Decode64(row + i / 2, [&](auto place, typename Vector::Register weights) {
                     constexpr int v = decltype(place)::kValue;
                     sums.template Add<v % kChains>(values + v * Vector::kLanes, input_pitch,
                                                    weights);
                   });
                 }
               });
  sums.AddTo(output, output_pitch);
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
    PrefetchRow(spec, record + 4 * pitch, begin, end);
    for (int64_t m = 0; m < num_inputs; m += kMost) {
      const int64_t count = num_inputs - m < kMost ? num_inputs - m : kMost;
      kDots[count - 1](spec, reader, record, begin, end, input + m * input_pitch, input_pitch,
                       output + m * output_pitch + n, output_pitch);
    }
  }
}
