// One register of fp32 numbers and the few operations that the kernels need, for AVX-512 and for AVX2 with FMA.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace onepass {
namespace {

#if defined(__AVX512F__)

using Vec = __m512;
using VecInt = __m512i;
using Mask = __mmask16;
constexpr int kLanes = 16;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline VecInt load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
inline VecInt set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// NaN in b comes through, NaN in a does not.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Mask greater(VecInt a, VecInt b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }

inline Vec load(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// To the nearest, ties to even, as torch rounds; NaN stays NaN.
inline void store(uint16_t* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  high = _mm512_mask_mov_epi32(high, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x times two to the whole number n.
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

inline void transpose(Vec (&r)[16]) {
  __m512i t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(_mm512_castps_si512(r[i]), _mm512_castps_si512(r[i + 1]));
    t[i + 1] = _mm512_unpackhi_epi32(_mm512_castps_si512(r[i]), _mm512_castps_si512(r[i + 1]));
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // u[4a + c] holds, in 128-bit lane l, column 4l + c of rows 4a .. 4a + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low02 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88), low13 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
    const __m512i high02 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
    const __m512i high13 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
    r[c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low02, high02, 0x88));
    r[8 + c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low02, high02, 0xdd));
    r[4 + c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low13, high13, 0x88));
    r[12 + c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low13, high13, 0xdd));
  }
}

#else

using Vec = __m256;
using VecInt = __m256i;
using Mask = __m256i;
constexpr int kLanes = 8;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline VecInt load_int(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline VecInt set1_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Mask greater(VecInt a, VecInt b) { return _mm256_cmpgt_epi32(a, b); }
inline Mask both(Mask a, Mask b) { return _mm256_and_si256(a, b); }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m)); }

inline float sum(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline Vec load(const uint16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

inline void store(uint16_t* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec scale_by_power(Vec x, Vec n) {
  // Below 2^-126 the answer is 0, above 2^127 infinity: the exponent field is then 0 or all ones. NaN in x stays.
  const Vec bounded = min(set1(128.0f), max(set1(-127.0f), n));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(bounded), set1_int(127)), 23);
  return x * _mm256_castsi256_ps(exponent);
}

inline void transpose(Vec (&r)[8]) {
  Vec t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
}

#endif

inline Vec zero() { return set1(0.0f); }

// The first n < kLanes numbers of p, zeros behind them.
template <class Element>
inline Vec load_part(const Element* p, int64_t n) {
  Element buffer[kLanes] = {};
  memcpy(buffer, p, n * sizeof(Element));
  return load(buffer);
}

template <class Element>
inline void store_part(Element* p, Vec x, int64_t n) {
  Element buffer[kLanes];
  store(buffer, x);
  memcpy(p, buffer, n * sizeof(Element));
}

// 2^x by a minimax polynomial on [-1/2, 1/2]: relative error 3e-6 in degree 4, fp32 rounding in degree 6. The constant
// term is exactly 1, so that 2^0 is: a key block that a row masks wholly must rescale the row by exactly 1.
template <int Degree>
inline Vec exp2_slope(Vec f) {  // (2^f - 1) / f
  Vec p;
  if (Degree == 4) {
    p = fma(set1(0.009582852944731712f), f, set1(0.055906426161527634f));
    p = fma(p, f, set1(0.24024099111557007f));
    p = fma(p, f, set1(0.6931241750717163f));
  } else {
    p = fma(set1(0.00015353361959569156f), f, set1(0.0013398875016719103f));
    p = fma(p, f, set1(0.00961843691766262f));
    p = fma(p, f, set1(0.055503323674201965f));
    p = fma(p, f, set1(0.24022647738456726f));
    p = fma(p, f, set1(0.6931471824645996f));
  }
  return p;
}

template <int Degree>
inline Vec exp2(Vec x) {
  const Vec n = nearest(x), f = x - n;
  return scale_by_power(fma(exp2_slope<Degree>(f), f, set1(1.0f)), n);
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// y · σ(x) = y / (1 + e^-x), where x may be infinite. NaN stays.
template <int Degree>
inline Vec times_sigmoid(Vec y, Vec x) {
  const Vec exponent = min(set1(1e4f), max(set1(-1e4f), x * set1(-kLog2E)));
  return y / (set1(1.0f) + exp2<Degree>(exponent));
}

// y / (y + 2) with y = e^2x - 1, which keeps the last digits of a small x.
inline Vec tanh(Vec x) {
  const Vec exponent = min(set1(20.0f), max(set1(-20.0f), x)) * set1(2.0f * kLog2E);
  const Vec n = nearest(exponent), f = exponent - n;
  const Vec y = scale_by_power(exp2_slope<6>(f) * f, n) + (scale_by_power(set1(1.0f), n) - set1(1.0f));
  return y / (y + set1(2.0f));
}

}  // namespace
}  // namespace onepass
