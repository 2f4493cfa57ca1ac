// AVX-512 on processors without it, for native_grid.cpp only: stands in for the compiler's
// <immintrin.h>. SIMDe computes what it has, portably; what SIMDe 0.7 lacks is here, one element
// at a time. Remove each where SIMDe has it.
#pragma once

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

using __mmask16 = simde__mmask16;
using __mmask32 = simde__mmask32;

namespace emulation {

// Reads only the elements whose bit is set, and zeros for the others.
template <typename Register, typename Element>
inline Register LoadMasked(uint64_t mask, const void* from, Element) {
  Element elements[sizeof(Register) / sizeof(Element)] = {};
  for (size_t i = 0; i < sizeof(Register) / sizeof(Element); ++i) {
    if ((mask >> i & 1) == 0) continue;
    std::memcpy(&elements[i], static_cast<const uint8_t*>(from) + i * sizeof(Element),
                sizeof(Element));
  }
  Register loaded;
  std::memcpy(&loaded, elements, sizeof(loaded));
  return loaded;
}

// Writes only the elements whose bit is set.
template <typename Register, typename Element>
inline void StoreMasked(void* to, uint64_t mask, Register values, Element) {
  Element elements[sizeof(Register) / sizeof(Element)];
  std::memcpy(elements, &values, sizeof(values));
  for (size_t i = 0; i < sizeof(Register) / sizeof(Element); ++i) {
    if ((mask >> i & 1) == 0) continue;
    std::memcpy(static_cast<uint8_t*>(to) + i * sizeof(Element), &elements[i], sizeof(Element));
  }
}

// One element after another through a function.
template <typename To, typename ToElement, typename FromElement, typename From, typename Function>
inline To Map(From from, Function function) {
  FromElement before[sizeof(From) / sizeof(FromElement)];
  ToElement after[sizeof(To) / sizeof(ToElement)] = {};
  std::memcpy(before, &from, sizeof(from));
  for (size_t i = 0; i < sizeof(From) / sizeof(FromElement); ++i) after[i] = function(before[i]);
  To to;
  std::memcpy(&to, after, sizeof(to));
  return to;
}

// The compiler's own conversions, which round to nearest even and keep subnormals.
inline __m256i FloatsToHalves(__m512 values) {
  return Map<__m256i, _Float16, float>(values, [](float x) { return static_cast<_Float16>(x); });
}

inline __m512 HalvesToFloats(__m256i values) {
  return Map<__m512, float, _Float16>(values, [](_Float16 x) { return static_cast<float>(x); });
}

inline __m512i WidenWords(__m256i values) {
  return Map<__m512i, uint32_t, uint16_t>(values, [](uint16_t x) { return uint32_t{x}; });
}

inline __m128i LowestBytes(__m512i values) {
  return Map<__m128i, uint8_t, uint64_t>(values, [](uint64_t x) { return uint8_t(x); });
}

// Faults where the processor would.
inline void StoreAligned(void* to, __m512i values) {
  if (reinterpret_cast<uintptr_t>(to) % 64 != 0) __builtin_trap();
  std::memcpy(to, &values, sizeof(values));
}

}  // namespace emulation

#define _mm_maskz_loadu_epi8(mask, from) \
  emulation::LoadMasked<__m128i>(static_cast<__mmask16>(mask), from, uint8_t{})
#define _mm256_maskz_loadu_epi16(mask, from) \
  emulation::LoadMasked<__m256i>(static_cast<__mmask16>(mask), from, uint16_t{})
#define _mm512_maskz_loadu_epi16(mask, from) \
  emulation::LoadMasked<__m512i>(static_cast<__mmask32>(mask), from, uint16_t{})
#define _mm512_maskz_loadu_epi32(mask, from) \
  emulation::LoadMasked<__m512i>(static_cast<__mmask16>(mask), from, uint32_t{})
#define _mm512_maskz_loadu_ps(mask, from) \
  emulation::LoadMasked<__m512>(static_cast<__mmask16>(mask), from, uint32_t{})
#define _mm_mask_storeu_epi8(to, mask, values) \
  emulation::StoreMasked(to, static_cast<__mmask16>(mask), values, uint8_t{})
#define _mm256_mask_storeu_epi16(to, mask, values) \
  emulation::StoreMasked(to, static_cast<__mmask16>(mask), values, uint16_t{})
#define _mm512_mask_storeu_epi32(to, mask, values) \
  emulation::StoreMasked(to, static_cast<__mmask16>(mask), values, uint32_t{})
#define _mm512_mask_storeu_ps(to, mask, values) \
  emulation::StoreMasked(to, static_cast<__mmask16>(mask), values, uint32_t{})
#define _mm512_stream_si512(to, values) emulation::StoreAligned(to, values)
#define _mm512_cvtps_ph(values, rounding) emulation::FloatsToHalves(values)
#define _mm512_cvtph_ps(values) emulation::HalvesToFloats(values)
#define _mm512_cvtepu16_epi32(values) emulation::WidenWords(values)
#define _mm512_cvtepi64_epi8(values) emulation::LowestBytes(values)
#define _mm512_cmpneq_epi32_mask(a, b) static_cast<__mmask16>(~_mm512_cmpeq_epi32_mask(a, b))
