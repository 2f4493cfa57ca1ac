// Memory for the duration of one product, kept for the next one.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace nf4tensor::cpu {

// A buffer of floats. At most kNumKept buffers are kept between products, each as large as the
// largest product needed that had it; a product that finds all of them taken, since that many run
// at once, gets one of its own. So threads, nested calls and backward passes never share one. Kept
// buffers lie in huge pages where the system offers them.
class Workspace {
 public:
  static constexpr int kNumKept = 8;

  // With room for one Take of each of some counts. Throws std::bad_alloc where the system has no
  // more memory.
  explicit Workspace(std::initializer_list<int64_t> counts);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // The next count floats of the buffer, at a cache line. Their contents are anything.
  float* Take(int64_t count);

  // Gives the buffers that no product is using back to the system, and returns their bytes.
  static int64_t Release();

 private:
  int slot_ = -1;  // or -1: not kept
  int64_t num_bytes_;
  uint8_t* next_;
  uint8_t* begin_;
};

}  // namespace nf4tensor::cpu
