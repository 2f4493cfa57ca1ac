// Which kernels the launch functions of csrc/cuda start, with what: the emulator records their
// launches instead of running them, so device pointers may be any numbers. For launches.py, which
// compiles this file as a library together with csrc/cuda/*.cu.
#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "cuda/device.h"

namespace {

using namespace nf4tensor;

std::string NameOf(const void* kernel) {
  Dl_info info;
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) return "?";
  return info.dli_sname;
}

std::string Hex(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    text += digits;
  }
  return text;
}

// A line for each launch: the kernel, its blocks, the threads of each, the bytes of each argument.
template <typename Call>
const char* Record(int compute_capability, Call call) {
  static std::string lines;
  lines.clear();
  emulator::state.compute_capability = compute_capability;
  emulator::state.recorder = [](const emulator::Recorded& launch) {
    lines += NameOf(launch.kernel) + ' ' + std::to_string(launch.blocks) + ' ' +
             std::to_string(launch.threads);
    for (const auto& argument : launch.arguments) lines += ' ' + Hex(argument);
    lines += '\n';
  };
  call();
  return lines.c_str();
}

const uint8_t* At(uint64_t address) { return reinterpret_cast<const uint8_t*>(address); }
uint8_t* AtMutable(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

}  // namespace

extern "C" {

// What grids depend on: the processors of the device, and how dequantize is tuned.
void Configure(int num_processors, int mapping, int64_t max_blocks) {
  emulator::state.num_processors = num_processors;
  cuda::SetDequantizeTuning({static_cast<cuda::Mapping>(mapping), max_blocks});
}

const char* RecordDequantize(int compute_capability, const RecordSpec* spec, int dtype,
                             int64_t num_rows, uint64_t record, uint64_t out) {
  return Record(compute_capability, [=] {
    cuda::LaunchDequantize(*spec, static_cast<DType>(dtype), num_rows, At(record), AtMutable(out),
                           nullptr);
  });
}

const char* RecordQuantize(int compute_capability, const RecordSpec* spec, int dtype,
                           int64_t num_rows, uint64_t weight, int keep_phase, uint64_t record) {
  return Record(compute_capability, [=] {
    cuda::LaunchQuantize(*spec, static_cast<DType>(dtype), num_rows, At(weight), keep_phase != 0,
                         AtMutable(record), nullptr);
  });
}

// Nothing where the kernel does not take the call.
const char* RecordLinear(int compute_capability, const RecordSpec* spec, int dtype,
                         int64_t num_rows, int64_t num_inputs, const uint64_t* pointers) {
  return Record(compute_capability, [=] {
    const cuda::LinearCall call{*spec,           static_cast<DType>(dtype), num_rows,
                                num_inputs,      At(pointers[0]),           At(pointers[1]),
                                At(pointers[2]), AtMutable(pointers[3])};
    if (cuda::CanFuse(call)) cuda::LaunchLinear(call, nullptr);
  });
}
}
