// x · weightᵀ in fp32 to the end, for the language-model head: its weight is read in place, once, however few rows x has.
//
// The lanes of a register hold parts of one sum, and are added at its end: always in the same order, so that a result
// depends on its row of x and its row of the weight alone.
#pragma once

#include "attention.h"
#include "library.h"
#include "parallel.h"
#include "vec.h"

namespace onepass {
namespace {

constexpr int64_t kWeightRows = 256;  // of one task; they stay in the cache while all rows of x pass by
constexpr int kBlock = 4;             // rows of x, and rows of the weight, at a time: 16 accumulators

// sums[i, j] = the lanes' parts of x[i] · weights[j], for Rows rows of x.
template <class Dot, int Rows>
inline void part_sums(const LinearArgs& args, const typename Dot::Input* x,
                      const typename Dot::Input* const (&weights)[kBlock], float* sums) {
  Vec sum[Rows][kBlock];
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < kBlock; ++j) sum[i][j] = zero();
  for (int64_t k = 0; k < args.width; k += kLanes * Dot::kPack) {
    Vec row[kBlock];
    for (int j = 0; j < kBlock; ++j) row[j] = Dot::load_units(weights[j] + k);
    for (int i = 0; i < Rows; ++i) {
      const Vec other = Dot::load_units(x + i * args.x_row + k);
      for (int j = 0; j < kBlock; ++j) sum[i][j] = Dot::dot(other, row[j], sum[i][j]);
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < kBlock; ++j) store(sums + (i * kLanes + j) * kLanes, sum[i][j]);
}

// out[i, 0 ... count - 1] for Rows rows of x and up to kLanes rows of the weight.
template <class Dot, int Rows>
void products(const LinearArgs& args, const typename Dot::Input* x, const typename Dot::Input* weight, int64_t count,
              float* out) {
  alignas(64) float sums[Rows * kLanes * kLanes];
  for (int64_t j = 0; j < kLanes; j += kBlock) {
    const typename Dot::Input* rows[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const int64_t row = j + i < count ? j + i : count - 1;  // past the end the last one is taken again
      rows[i] = weight + row * args.weight_row;
    }
    part_sums<Dot, Rows>(args, x, rows, sums + j * kLanes);
  }
  for (int i = 0; i < Rows; ++i) {
    Vec block[kLanes];
    for (int j = 0; j < kLanes; ++j) block[j] = load(sums + (i * kLanes + j) * kLanes);
    transpose(block);
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int j = 0; j < width; ++j) block[j] = block[j] + block[j + width];
    if (count == kLanes) store(out + i * args.out_row, block[0]);
    else store_part(out + i * args.out_row, block[0], count);
  }
}

template <class Dot>
void linear_rows(const LinearArgs& args, Pool pool) {
  using Input = typename Dot::Input;
  const auto* weight = static_cast<const Input*>(args.weight);
  parallel_tasks(pool, (args.out_width + kWeightRows - 1) / kWeightRows, [&](int64_t task) {
    const int64_t begin = task * kWeightRows;
    const int64_t end = begin + kWeightRows < args.out_width ? begin + kWeightRows : args.out_width;
    for (int64_t column = begin; column < end; column += kLanes) {
      const int64_t count = end - column < kLanes ? end - column : kLanes;
      const Input* rows = weight + column * args.weight_row;
      for (int64_t i = 0; i < args.rows; i += kBlock) {
        const Input* x = static_cast<const Input*>(args.x) + i * args.x_row;
        float* out = args.out + i * args.out_row + column;
        switch (args.rows - i) {
          case 1: products<Dot, 1>(args, x, rows, count, out); break;
          case 2: products<Dot, 2>(args, x, rows, count, out); break;
          case 3: products<Dot, 3>(args, x, rows, count, out); break;
          default: products<Dot, kBlock>(args, x, rows, count, out);
        }
      }
    }
  });
}

inline void linear(const LinearArgs& args, Pool pool) {
  if (args.dtype == FP32) {
    linear_rows<DotFp32<float>>(args, pool);
  } else {
#if defined(__AVX512BF16__)
    linear_rows<DotBf16>(args, pool);
#else
    linear_rows<DotFp32<uint16_t>>(args, pool);
#endif
  }
}

}  // namespace
}  // namespace onepass
