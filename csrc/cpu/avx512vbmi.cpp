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

template <Path kPath>
using ToFloat32 = Avx512FourByteDecoder<Unpacker, kPath>;
template <Path kPath>
using ToBFloat16 = Avx512TwoByteDecoder<BFloat16, Unpacker, kPath>;
template <Path kPath>
using ToFloat16 = Avx512TwoByteDecoder<Float16, Unpacker, kPath>;
template <typename Format>
using ToFloats = OneTable<Avx512FloatDecoder<Format, Unpacker>>;

}  // namespace

const Kernels kAvx512VbmiKernels = {
    "avx512vbmi",
    {DequantizeRowsOnPath<ToFloat32>, DequantizeRowsOnPath<ToBFloat16>,
     DequantizeRowsOnPath<ToFloat16>},
    {QuantizeRowsWith<Avx512Encoder, Float32>, QuantizeRowsWith<Avx512Encoder, BFloat16>,
     QuantizeRowsWith<Avx512Encoder, Float16>},
    {DecodeTileWith<ToFloats<Float32>>, DecodeTileWith<ToFloats<BFloat16>>,
     DecodeTileWith<ToFloats<Float16>>},
    {Avx512Widen<Float32>, Avx512Widen<BFloat16>, Avx512Widen<Float16>},
    {Avx512Narrow<Float32>, Avx512Narrow<BFloat16>, Avx512Narrow<Float16>},
    MultiplyTransposedWith<Avx512Vector>,
    MultiplyWith<Avx512Vector>,
    /*max_dot_inputs=*/4,
    {ArrangeWith<Avx512Vector, ToFloats<Float32>>, ArrangeWith<Avx512Vector, ToFloats<BFloat16>>,
     ArrangeWith<Avx512Vector, ToFloats<Float16>>},
    {DotRowsWith<Avx512Vector, ToFloats<Float32>>, DotRowsWith<Avx512Vector, ToFloats<BFloat16>>,
     DotRowsWith<Avx512Vector, ToFloats<Float16>>},
};

}  // namespace nf4tensor::cpu
