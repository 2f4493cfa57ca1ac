// The kernels for AVX-512 F, BW, VL and DQ. Compiled with those flags and entered only where the
// processor has them all.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/formats.h"
#include "cpu/kernels.h"

namespace nf4tensor::cpu {
namespace {

#include "cpu/dequantize_rows.h"
#include "cpu/dots.h"
#include "cpu/quantize_rows.h"
#include "cpu/tiles.h"
// Needs them.
#include "cpu/avx512_blocks.h"
#include "cpu/avx512_tiles.h"

// Bytes move within 16 only, so each 16 of them are loaded into every place at once.
struct Unpacker {
  static void Words(const uint8_t* packed, __m512i (&index)[2]) {
    index[0] = WordIndices(LoadPacked16(packed));
    index[1] = WordIndices(LoadPacked16(packed + 16));
  }

  static void Dwords(const uint8_t* packed, __m512i (&index)[4]) {
    const __m512i first = ShuffleDwords(LoadPacked16(packed));
    const __m512i second = ShuffleDwords(LoadPacked16(packed + 16));
    index[0] = DwordIndices(first, 0);
    index[1] = DwordIndices(first, 1);
    index[2] = DwordIndices(second, 0);
    index[3] = DwordIndices(second, 1);
  }
};

}  // namespace

const Kernels kAvx512Kernels = Avx512<Unpacker>::Table("avx512");

}  // namespace nf4tensor::cpu
