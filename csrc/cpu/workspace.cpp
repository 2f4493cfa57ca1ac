#include "cpu/workspace.h"

#include <sys/mman.h>

#include <atomic>
#include <new>

namespace nf4tensor::cpu {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;

// No lock: a process that forks while another of its threads has a buffer loses that one only.
struct Slot {
  std::atomic<bool> is_taken{false};
  uint8_t* begin = nullptr;
  int64_t num_bytes = 0;
};

Slot slots[Workspace::kNumKept];

int64_t RoundUpTo(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

uint8_t* Map(int64_t num_bytes) {
  // One huge page more, so that the buffer can start at one.
  void* mapped = mmap(nullptr, num_bytes + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  uint8_t* const begin = static_cast<uint8_t*>(mapped);
  const int64_t before =
      RoundUpTo(reinterpret_cast<intptr_t>(begin), kHugePage) - reinterpret_cast<intptr_t>(begin);
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(begin + before + num_bytes, kHugePage - before);
  madvise(begin + before, num_bytes, MADV_HUGEPAGE);  // advice: a system without them ignores it
  return begin + before;
}

int TakeSlot() {
  for (int i = 0; i < Workspace::kNumKept; ++i) {
    if (!slots[i].is_taken.exchange(true, std::memory_order_acquire)) return i;
  }
  return -1;
}

void GiveBack(Slot& slot) { slot.is_taken.store(false, std::memory_order_release); }

int64_t Unmap(Slot& slot) {
  const int64_t num_bytes = slot.num_bytes;
  if (num_bytes > 0) munmap(slot.begin, num_bytes);
  slot.begin = nullptr;
  slot.num_bytes = 0;
  return num_bytes;
}

// What Take(count) uses up.
int64_t BytesFor(int64_t count) {
  return RoundUpTo(count * static_cast<int64_t>(sizeof(float)), kCacheLine);
}

int64_t BytesFor(std::initializer_list<int64_t> counts) {
  int64_t num_bytes = 0;
  for (const int64_t count : counts) num_bytes += BytesFor(count);
  return num_bytes;
}

}  // namespace

Workspace::Workspace(std::initializer_list<int64_t> counts)
    : slot_(TakeSlot()), num_bytes_(RoundUpTo(BytesFor(counts), kHugePage)) {
  if (slot_ < 0) {
    begin_ = Map(num_bytes_);
  } else {
    Slot& slot = slots[slot_];
    if (slot.num_bytes < num_bytes_) {
      Unmap(slot);
      try {
        slot.begin = Map(num_bytes_);
      } catch (...) {
        GiveBack(slot);
        throw;
      }
      slot.num_bytes = num_bytes_;
    }
    begin_ = slot.begin;
  }
  next_ = begin_;
}

Workspace::~Workspace() {
  if (slot_ < 0) {
    munmap(begin_, num_bytes_);
  } else {
    GiveBack(slots[slot_]);
  }
}

float* Workspace::Take(int64_t count) {
  uint8_t* const taken = next_;
  next_ += BytesFor(count);
  return reinterpret_cast<float*>(taken);
}

int64_t Workspace::Release() {
  int64_t released = 0;
  for (Slot& slot : slots) {
    if (slot.is_taken.exchange(true, std::memory_order_acquire)) continue;
    released += Unmap(slot);
    GiveBack(slot);
  }
  return released;
}

}  // namespace nf4tensor::cpu

// Frees the memory that products keep, and returns how many bytes that was.
extern "C" __attribute__((visibility("default"))) int64_t nf4tensor_release_workspace() {
  return nf4tensor::cpu::Workspace::Release();
}
