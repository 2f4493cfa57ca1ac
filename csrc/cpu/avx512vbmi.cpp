// The kernels for AVX-512 F, BW, VL, DQ and VBMI. Compiled with those flags and entered only where
// the processor has them all.
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

// One shuffle moves 32 bytes anywhere.
struct Unpacker {
  static void Words(const uint8_t* packed, __m512i (&index)[2]) {
    const __m512i bytes = _mm512_permutexvar_epi8(LoadTable(kWordOrder), Load32(packed));
    for (int part = 0; part < 2; ++part) index[part] = _mm512_srlv_epi16(bytes, WordShift(part));
  }

  static void Dwords(const uint8_t* packed, __m512i (&index)[4]) {
    const __m512i bytes = _mm512_permutexvar_epi8(LoadTable(kDwordOrder), Load32(packed));
    for (int part = 0; part < 4; ++part) index[part] = DwordIndices(bytes, part);
  }

 private:
  static __m512i Load32(const uint8_t* packed) {
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
  }
};

}  // namespace

const Kernels kAvx512VbmiKernels = Avx512<Unpacker>::Table("avx512vbmi");

}  // namespace nf4tensor::cpu
