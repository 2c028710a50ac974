// Norm, rotary embedding and gated activation, each row computed on its own in fp32 and rounded once.
#pragma once

#include <math.h>

#include "library.h"
#include "parallel.h"
#include "vec.h"

namespace onepass {
namespace {

// Calls body(offset, count) for [0, n) in steps of a register, the last one perhaps shorter.
template <class Body>
inline void by_register(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, static_cast<int64_t>(kLanes));
  if (i < n) body(i, n - i);
}

template <class Element>
inline Vec load_n(const Element* p, int64_t n) {
  return n == kLanes ? load(p) : load_part(p, n);
}

template <class Element>
inline void store_n(Element* p, Vec x, int64_t n) {
  if (n == kLanes) store(p, x);
  else store_part(p, x, n);
}

template <class Element>
void rms_norm_row(Element* x, const Element* residual, const Element* weight, Element* out, const RmsNormArgs& args) {
  if (residual) {
    by_register(args.width, [&](int64_t i, int64_t n) {
      store_n(x + i, load_n(x + i, n) + load_n(residual + i, n), n);
    });
  }
  constexpr int kSums = 4;  // enough chains to hide the latency of an addition
  Vec sums[kSums];
  for (auto& s : sums) s = zero();
  int64_t i = 0;
  for (; i + kSums * kLanes <= args.width; i += kSums * kLanes)
    for (int j = 0; j < kSums; ++j) {
      const Vec a = load(x + i + j * kLanes);
      sums[j] = fma(a, a, sums[j]);
    }
  by_register(args.width - i, [&](int64_t at, int64_t n) {
    const Vec a = load_n(x + i + at, n);
    sums[0] = fma(a, a, sums[0]);
  });
  const float squares = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const Vec inverse = set1(1.0f / sqrtf(squares / static_cast<float>(args.width) + args.eps));
  const Vec offset = set1(args.offset);
  by_register(args.width, [&](int64_t at, int64_t n) {
    store_n(out + at, load_n(x + at, n) * inverse * (load_n(weight + at, n) + offset), n);
  });
}

template <class Element>
void rms_norm_rows(const RmsNormArgs& args, Pool pool) {
  auto* x = static_cast<Element*>(args.x);
  auto* out = static_cast<Element*>(args.out);
  const auto* residual = static_cast<const Element*>(args.residual);
  const auto* weight = static_cast<const Element*>(args.weight);
  parallel_rows(pool, args.rows, args.heads * args.width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t head = 0; head < args.heads; ++head)
        rms_norm_row(x + row * args.x_row + head * args.x_head,
                     residual ? residual + row * args.residual_row + head * args.residual_head : nullptr, weight,
                     out + row * args.out_row + head * args.out_head, args);
  });
}

inline void rms_norm(const RmsNormArgs& args, Pool pool) {
  if (args.dtype == FP32) rms_norm_rows<float>(args, pool);
  else rms_norm_rows<uint16_t>(args, pool);
}

// Neighbouring dims, taken one pair at a time: checkpoints are brought to the other form when they are loaded.
template <class Element>
void turn_neighbours(const Element* x, Element* out, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    float pair[kLanes] = {}, turned[kLanes];
    store(pair, load_part(x + 2 * i, 2));
    const float a = pair[0], b = pair[1];
    turned[0] = a * cos[i] - b * sin[i];
    turned[1] = b * cos[i] + a * sin[i];
    store_part(out + 2 * i, load_part(turned, 2), 2);
  }
}

template <class Element>
void turn_halves(const Element* x, Element* out, const float* cos, const float* sin, int64_t half) {
  by_register(half, [&](int64_t i, int64_t n) {
    const Vec a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(out + i, a * c - b * s, n);
    store_n(out + half + i, b * c + a * s, n);
  });
}

template <class Element>
void rope_row(const RopeArgs& args, int64_t row) {
  const auto* x = static_cast<const Element*>(args.x) + row * args.x_row;
  auto* out = static_cast<Element*>(args.out);
  if (args.slots) {
    const int64_t slot = args.slots[row];
    if (slot < 0) return;
    out += slot / args.page_tokens * args.out_page + slot % args.page_tokens * args.out_row;
  } else {
    out += row * args.out_row;
  }
  const float *cos = nullptr, *sin = nullptr;
  if (args.cos) {
    const int64_t position = args.positions_are_int64 ? static_cast<const int64_t*>(args.positions)[row]
                                                      : static_cast<const int32_t*>(args.positions)[row];
    cos = args.cos + position * args.table_row;
    sin = args.sin + position * args.table_row;
  }
  const int64_t turned = cos ? 2 * args.half : 0;
  for (int64_t head = 0; head < args.heads; ++head, x += args.x_head, out += args.out_head) {
    if (cos && args.interleaved) turn_neighbours(x, out, cos, sin, args.half);
    else if (cos) turn_halves(x, out, cos, sin, args.half);
    if (x != out) memcpy(out + turned, x + turned, (args.head_dim - turned) * sizeof(Element));
  }
}

// Several tensors of the same rows: keys and values go to their pages in one sweep.
inline void rope(const RopeArgs* ops, int64_t count, Pool pool) {
  parallel_rows(pool, ops->rows, count * ops->heads * ops->head_dim, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t i = 0; i < count; ++i) {
        if (ops[i].dtype == FP32) rope_row<float>(ops[i], row);
        else rope_row<uint16_t>(ops[i], row);
      }
  });
}

constexpr float kSwigluAlpha = 1.702f, kSwigluLimit = 7.0f;  // gpt-oss, as in kernels/gated_act.py
constexpr float kGeluRoot = 0.7978845608028654f, kGeluCube = 0.044715f;

template <int Kind, int Degree>
inline Vec gated(Vec gate, Vec up) {
  if (Kind == SILU) return times_sigmoid<Degree>(gate, gate) * up;
  if (Kind == CLAMPED_SWIGLU) {
    const Vec limit = set1(kSwigluLimit), bounded = min(limit, gate);
    const Vec shifted = min(limit, max(set1(-kSwigluLimit), up)) + set1(1.0f);
    return times_sigmoid<Degree>(bounded, bounded * set1(kSwigluAlpha)) * shifted;
  }
  // x/2 · (1 + tanh y) = x · σ(2y): no cancellation where the answer is small.
  const Vec inner = gate * set1(2.0f * kGeluRoot) * fma(gate * gate, set1(kGeluCube), set1(1.0f));
  return times_sigmoid<Degree>(gate, inner) * up;
}

template <class Element, int Kind>
void gated_rows(const GatedActArgs& args, Pool pool) {
  constexpr int kDegree = sizeof(Element) == 2 ? 4 : 6;
  const auto* input = static_cast<const Element*>(args.gate_up);
  auto* output = static_cast<Element*>(args.out);
  parallel_rows(pool, args.rows, args.width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const Element* gate = input + row * args.gate_up_row;
      Element* out = output + row * args.out_row;
      by_register(args.width, [&](int64_t i, int64_t n) {
        store_n(out + i, gated<Kind, kDegree>(load_n(gate + i, n), load_n(gate + args.width + i, n)), n);
      });
    }
  });
}

template <class Element>
void gated_kind(const GatedActArgs& args, Pool pool) {
  switch (args.kind) {
    case SILU: return gated_rows<Element, SILU>(args, pool);
    case GELU_TANH: return gated_rows<Element, GELU_TANH>(args, pool);
    case CLAMPED_SWIGLU: return gated_rows<Element, CLAMPED_SWIGLU>(args, pool);
  }
}

inline void gated_act(const GatedActArgs& args, Pool pool) {
  if (args.dtype == FP32) gated_kind<float>(args, pool);
  else gated_kind<uint16_t>(args, pool);
}

}  // namespace
}  // namespace onepass
