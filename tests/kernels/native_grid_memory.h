// Memory for native_grid.cpp that notices every byte read or written outside of it.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/record.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(from, num_bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(from, num_bytes) static_cast<void>(0)
#endif

namespace nf4tensor {
namespace {

// How many bytes the first one lies above a multiple of 64; or such that the last one lies at the
// end of a page, behind which nobody may read or write.
constexpr int64_t kAtEnd = -1;

// What buffers are full of before: it shows what was written that should not be.
constexpr uint8_t kFill = 0xA5;

// Bytes between guards: before them and behind them are known bytes, which an address sanitizer
// watches, and behind these is a page that faults.
class Buffer {
 public:
  explicit Buffer(int64_t capacity) : capacity_(RoundUp(capacity + 2 * kGuard, kPage)) {
    void* const pages = mmap(nullptr, capacity_ + kPage, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
      std::perror("native_grid: mmap");
      std::exit(2);
    }
    begin_ = static_cast<uint8_t*>(pages);
    end_ = begin_ + capacity_;
    mprotect(end_, kPage, PROT_NONE);
    Place(0, 0);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(begin_, capacity_);
    munmap(begin_, capacity_ + kPage);
  }

  // Puts num_bytes somewhere else, all of them new.
  uint8_t* Place(int64_t num_bytes, int64_t shift) {
    ASAN_UNPOISON_MEMORY_REGION(begin_, capacity_);
    data_ = shift == kAtEnd ? end_ - num_bytes : end_ - RoundUp(num_bytes + shift, 64) + shift;
    data_end_ = data_ + num_bytes;
    if (data_ - kGuard < begin_) std::abort();
    std::memset(data_ - kGuard, kFill, end_ - data_ + kGuard);
    ASAN_POISON_MEMORY_REGION(data_ - kGuard, kGuard);
    ASAN_POISON_MEMORY_REGION(data_end_, end_ - data_end_);
    return data_;
  }

  uint8_t* Place(const void* bytes, int64_t num_bytes, int64_t shift) {
    uint8_t* const data = Place(num_bytes, shift);
    if (num_bytes > 0) std::memcpy(data, bytes, num_bytes);
    return data;
  }

  // Whether nothing was written before or behind the bytes.
  bool GuardsHold() const {
    ASAN_UNPOISON_MEMORY_REGION(begin_, capacity_);
    for (const uint8_t* p = data_ - kGuard; p < data_; ++p) {
      if (*p != kFill) return false;
    }
    for (const uint8_t* p = data_end_; p < end_; ++p) {
      if (*p != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kPage = 1 << 16;  // the largest page of any processor
  static constexpr int64_t kGuard = 64;

  int64_t capacity_;
  uint8_t* begin_;
  uint8_t* end_;
  uint8_t* data_ = nullptr;
  uint8_t* data_end_ = nullptr;
};

}  // namespace
}  // namespace nf4tensor
