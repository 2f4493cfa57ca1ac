// Runs csrc/cuda/dequantize.cu on the emulator over a grid of geometries, values, addresses and
// mappings, and compares it with the CPU's scalar kernels bit for bit.
//
//   cuda_grid_dequantize [STRIDE [SEED]]     STRIDE: only every so many widths; 1 for all. SEED: of
//                                            the order of threads, and of what is tried together
//
// Prints the number of comparisons. Exit status: 0; 1 at the first difference, which it describes;
// 2 where it cannot run.
#include <sys/mman.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/device.h"
#include "cuda_grid_arguments.h"
#include "native_grid_compare.h"
#include "native_grid_memory.h"
#include "native_grid_values.h"

namespace nf4tensor {
namespace {

using cuda::Mapping;

constexpr int64_t kWidths[] = {31, 33, 64, 65, 100, 128, 576, 1000};  // whatever the stride
constexpr int64_t kBlockSizes[] = {16, 32, 64, 256};
constexpr int64_t kManyRows = 300;  // of narrow weights, for more groups than a block has threads
constexpr int64_t kWideFeatures = 8192 + 64;  // likewise, in three rows
constexpr int64_t kMaxBytes = 3 * 4 * (kWideFeatures + 64) + (1 << 16);
constexpr ScaleKind kScaleKinds[] = {ScaleKind::kFloat32, ScaleKind::kSquare8,
                                     ScaleKind::kDynamic8};
constexpr QuantType kQuantTypes[] = {QuantType::kNf4, QuantType::kFp4};
constexpr DType kDTypes[] = {kFloat32, kBFloat16, kFloat16};
constexpr Mapping kMappings[] = {Mapping::kDefault, Mapping::kDirect, Mapping::kPair,
                                 Mapping::kStaged};
constexpr const char* kMappingNames[] = {"default", "direct", "pair", "staged"};
// In bytes above a multiple of 64; records are aligned, outputs to their elements only.
constexpr int64_t kRecordShifts[] = {0, 16, 32, kAtEnd};
constexpr int64_t kOutShifts[] = {0, 0, 32, 16, 4, kAtEnd};

// Which NaN a kernel gives is open: all become the one that the scalar kernels give.
void UnifyNans(DType dtype, Bytes& weights) {
  const int64_t num_bytes = static_cast<int64_t>(weights.size());
  for (int64_t i = 0; i < num_bytes; i += ElementBytes(dtype)) {
    uint8_t* const at = weights.data() + i;
    if (dtype == kFloat32) {
      Store(at, cpu::Float32::Round(Load<float>(at)));
    } else {
      const uint16_t bits = Load<uint16_t>(at);
      const float value =
          dtype == kBFloat16 ? cpu::BFloat16::Widen(bits) : cpu::Float16::Widen(bits);
      if (value != value) Store(at, static_cast<uint16_t>(RoundTo(dtype, value)));
    }
  }
}

Bytes Expected(const RecordSpec& spec, DType dtype, int64_t num_rows, const Bytes& records) {
  const int64_t row_bytes = spec.in_features * ElementBytes(dtype);
  Bytes expected(num_rows * row_bytes);
  cpu::kScalarKernels.dequantize[dtype](spec, num_rows, {0, spec.in_features, row_bytes},
                                        records.data(), expected.data(), false);
  return expected;
}

class Grid {
 public:
  explicit Grid(uint64_t seed) : seed_(seed) {}

  // Every kind of spec of one width, with one mapping after the other.
  void TestWidth(int64_t in_features, int64_t num_rows) {
    for (const int64_t block_size : kBlockSizes) {
      for (const QuantType quant_type : kQuantTypes) {
        for (const ScaleKind scale_kind : kScaleKinds) {
          spec_ = MakeSpec(in_features, block_size, scale_kind, quant_type);
          random_ = Random(seed_ << 40 ^ in_features << 20 ^ block_size << 4 ^
                           static_cast<int>(scale_kind) << 1 ^ static_cast<int>(quant_type));
          const Bytes records = MakeRecords(spec_, num_rows, random_);
          for (const DType dtype : kDTypes) TestDType(dtype, num_rows, records);
        }
      }
    }
  }

  // A launch of more groups than one can have becomes several, which cover all rows.
  void TestManyGroups() {
    spec_ = MakeSpec(64, 64, ScaleKind::kSquare8, QuantType::kNf4);
    const int64_t num_rows = (int64_t{1} << 30) + 5;  // two groups each
    const uint64_t place = uint64_t{1} << 40;         // never accessed
    std::vector<emulator::Recorded> launches;
    emulator::state.recorder = [&](const emulator::Recorded& launch) {
      launches.push_back(launch);
    };
    cuda::SetDequantizeTuning({});
    cuda::LaunchDequantize(spec_, kBFloat16, num_rows, reinterpret_cast<const uint8_t*>(place),
                           reinterpret_cast<uint8_t*>(2 * place), nullptr);
    emulator::state.recorder = nullptr;
    int64_t row = 0;
    for (size_t i = 0; i < launches.size(); ++i) {
      const auto pointer = [&](size_t launch, int argument) {
        return Load<uint64_t>(launches[launch].arguments[argument].data());
      };
      const bool is_last = i + 1 == launches.size();
      const int64_t end =
          is_last ? num_rows : static_cast<int64_t>((pointer(i + 1, 0) - place) / spec_.pitch());
      Check(pointer(i, 0) == place + row * spec_.pitch(), "a launch starts at another record");
      Check(pointer(i, 1) == 2 * place + row * 128, "a launch starts at another output");
      Check(launches[i].blocks == CeilDiv(2 * (end - row), launches[i].threads),
            "a launch has another number of blocks");
      row = end;
    }
    Check(launches.size() > 1, "a single launch for more than 2^31 groups");
  }

  // What cannot be counted with 32 bits is refused.
  void TestLimits() {
    constexpr ScaleKind kSquare8 = ScaleKind::kSquare8;
    const auto refuses = [](const RecordSpec& spec, const char* words) {
      std::string said;
      try {
        cuda::LaunchDequantize(spec, kBFloat16, 1, nullptr, nullptr, nullptr);
      } catch (const std::invalid_argument& error) {
        said = error.what();
      }
      Check(said.find(words) != std::string::npos, words);
    };
    emulator::state.recorder = [](const emulator::Recorded&) {};  // a launch would crash
    refuses(MakeSpec(int64_t{1} << 29, 64, ScaleKind::kFloat32, QuantType::kNf4),
            "in_features is 536870912, and the CUDA kernels take less than 536870912: set NF4");
    refuses({64, 64, kSquare8, 1, int64_t{1} << 29, QuantType::kNf4},
            "a record has 4294967360 bytes, and the CUDA kernels take less than 4294967296");
    refuses({64, 64, kSquare8, int64_t{1} << 31, 2, QuantType::kNf4},
            "the last of 2 segments of 2147483648 blocks starts too far behind the first");
    refuses({64, 64, kSquare8, int64_t{1} << 40, 1025, QuantType::kNf4}, "of 1099511627776 blocks");
    emulator::state.recorder = nullptr;
  }

  // Phases of every size, with segments as long as can be.
  void TestPhases() {
    random_ = Random(seed_);
    const int64_t kFarthest = (int64_t{1} << 31) - 1;
    for (const int64_t segment_length : {int64_t{5}, kFarthest / 3, kFarthest}) {
      const int64_t num_segments = segment_length == kFarthest ? 2 : 4;
      spec_ = {300, 16, ScaleKind::kSquare8, segment_length, num_segments, QuantType::kNf4};
      Bytes records = MakeRecords(spec_, 11, random_);
      const int64_t far = std::min(segment_length * num_segments, int64_t{1} << 32) - 1;
      const int64_t phases[] = {
          0,       segment_length - 3, segment_length, 2 * segment_length - 9, far - 9,   far,
          1 << 30, kFarthest - 9,      kFarthest,      kFarthest + 1,          UINT32_MAX};
      for (int64_t row = 0; row < 11; ++row) {
        Store(records.data() + row * spec_.pitch() + spec_.segments_offset(),
              static_cast<uint32_t>(phases[row]));
      }
      for (const DType dtype : kDTypes) TestDType(dtype, 11, records);
    }
    // A single segment has everything, however long it is.
    spec_ = {300, 16, ScaleKind::kSquare8, int64_t{1} << 40, 1, QuantType::kNf4};
    TestDType(kBFloat16, 3, MakeRecords(spec_, 3, random_));
  }

  // The last rows of a weight whose record and output are both larger than 4 GiB.
  void TestFarRows() {
    spec_ = MakeSpec(64, 64, ScaleKind::kSquare8, QuantType::kNf4);
    random_ = Random(seed_);
    const int64_t num_rows = (int64_t{1} << 26) + 128;
    const int64_t num_tested = 128;  // the groups of a block
    const int64_t first = num_rows - num_tested;
    uint8_t* const records = Reserve(num_rows * spec_.pitch());
    const Bytes last = MakeRecords(spec_, num_tested, random_);
    std::memcpy(records + first * spec_.pitch(), last.data(), last.size());
    for (const DType dtype : {kBFloat16, kFloat32}) {
      const int64_t row_bytes = spec_.in_features * ElementBytes(dtype);
      uint8_t* const out = Reserve(num_rows * row_bytes);
      emulator::state.first_block = static_cast<unsigned>(first / num_tested);
      cuda::SetDequantizeTuning({});
      cuda::LaunchDequantize(spec_, dtype, num_rows, records, out, nullptr);
      emulator::state.first_block = 0;
      Bytes actual(out + first * row_bytes, out + num_rows * row_bytes);
      UnifyNans(dtype, actual);
      comparer_.Compare("dequantize far rows", spec_, dtype, {}, {}, actual.data(),
                        Expected(spec_, dtype, num_tested, last));
      munmap(out, num_rows * row_bytes);
    }
    munmap(records, num_rows * spec_.pitch());
  }

  int64_t num_comparisons() const { return comparer_.num_comparisons(); }

 private:
  static void Check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "cuda_grid_dequantize: %s\n", what);
    std::exit(1);
  }

  // Pages that take no memory until they are written.
  static uint8_t* Reserve(int64_t num_bytes) {
    void* const pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Check(pages != MAP_FAILED, "no address space");
    return static_cast<uint8_t*>(pages);
  }

  void TestDType(DType dtype, int64_t num_rows, const Bytes& records) {
    const Bytes expected = Expected(spec_, dtype, num_rows, records);
    // float32 asks for 36 values of other lanes, which takes long here: one mapping will do.
    const Mapping chosen = Any(kMappings);
    for (const Mapping mapping : kMappings) {
      if (dtype == kFloat32 && mapping != chosen) continue;
      cuda::SetDequantizeTuning({mapping, random_.Below(3)});
      emulator::state.compute_capability = random_.Below(2) == 0 ? 90 : 100;
      emulator::state.seed = static_cast<uint32_t>(random_.Next());
      const Placement placement{Any(kRecordShifts), Any(kOutShifts), false};
      const uint8_t* const record = in_.Place(records.data(), records.size(), placement.in_shift);
      uint8_t* const out = out_.Place(expected.size(), placement.out_shift);
      cuda::LaunchDequantize(spec_, dtype, 0, record, out, nullptr);
      cuda::LaunchDequantize(spec_, dtype, num_rows, record, out, nullptr);
      Bytes actual(out, out + expected.size());
      UnifyNans(dtype, actual);
      char op[64];
      std::snprintf(op, sizeof(op), "dequantize %s sm_%d", kMappingNames[static_cast<int>(mapping)],
                    emulator::state.compute_capability);
      comparer_.Compare(op, spec_, dtype, placement, {&in_, &out_}, actual.data(), expected);
    }
  }

  template <typename T, size_t kSize>
  T Any(const T (&choices)[kSize]) {
    return choices[random_.Below(kSize)];
  }

  const uint64_t seed_;
  RecordSpec spec_{};
  Random random_{0};
  Buffer in_{kMaxBytes};
  Buffer out_{kMaxBytes};
  Comparer comparer_{"cuda"};
};

int Run(int64_t stride, uint64_t seed) {
  Grid grid(seed);
  for (int64_t in_features = 1; in_features <= 300; in_features += stride) {
    grid.TestWidth(in_features, 3);
  }
  for (const int64_t in_features : kWidths) grid.TestWidth(in_features, 3);
  grid.TestWidth(40, kManyRows);
  grid.TestWidth(kWideFeatures, 3);
  grid.TestManyGroups();
  grid.TestLimits();
  grid.TestPhases();
  grid.TestFarRows();
  std::printf("dequantize: %" PRId64 " comparisons\n", grid.num_comparisons());
  return 0;
}

}  // namespace
}  // namespace nf4tensor

int main(int num_arguments, char** arguments) {
  return nf4tensor::RunWithArguments("dequantize", num_arguments, arguments, nf4tensor::Run);
}
