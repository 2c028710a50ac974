// What the library's parts share: arguments of each op and the table of functions that every variant fills.
// Strides are in elements. Shapes, formulas and sources are in the Python op modules of the same names.
#pragma once

#include <stdint.h>

namespace onepass {

enum Dtype : int64_t { BF16 = 0, FP32 = 1 };
enum GatedKind : int64_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

// Torch's own OpenMP pool. A second pool beside it would fight with its spinning workers for the cores.
using Region = void (*)(void*);
using StartRegion = void (*)(Region, void*, unsigned threads, unsigned flags);

struct Pool {
  StartRegion start;  // null: everything runs on the calling thread
  int64_t threads;
};

struct AttentionArgs {
  Dtype dtype;
  const void *q, *k, *v;
  void* out;
  int64_t q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_row, out_head;
  const int32_t *page_table, *cu_q, *q_pos;
  int64_t table_row, segments, heads, kv_heads, head_dim, page_tokens, window;
  float scale, soft_cap;
  const float* sinks;  // [heads] or null
  float* lse;          // or null
  int64_t lse_row, lse_head;
};

struct RmsNormArgs {
  Dtype dtype;
  void* x;
  const void *residual, *weight;  // residual may be null
  void* out;
  int64_t rows, heads, width;  // x is [rows, heads, width]
  int64_t x_row, x_head, residual_row, residual_head, out_row, out_head;
  float eps, offset;
};

struct RopeArgs {
  Dtype dtype;
  const void* x;
  void* out;  // may be x
  int64_t rows, heads, head_dim, half;
  int64_t x_row, x_head;
  int64_t out_page, out_row, out_head, page_tokens;  // without slots, row i goes to out + i * out_row
  const int64_t* slots;                              // or null
  const float *cos, *sin;                            // null: a copy
  int64_t table_row;
  const void* positions;
  bool positions_are_int64, interleaved;
};

struct GatedActArgs {
  Dtype dtype;
  const void* gate_up;
  void* out;
  int64_t rows, width, gate_up_row, out_row;
  GatedKind kind;
};

struct LinearArgs {
  Dtype dtype;  // of x and weight
  const void *x, *weight;
  float* out;
  int64_t rows, width, out_width, x_row, weight_row, out_row;
};

struct Kernels {
  const char* name;
  void (*attention)(const AttentionArgs&, Pool);
  void (*rms_norm)(const RmsNormArgs&, Pool);
  void (*rope)(const RopeArgs* ops, int64_t count, Pool);
  void (*gated_act)(const GatedActArgs&, Pool);
  void (*linear)(const LinearArgs&, Pool);
};

extern const Kernels avx512_bf16, avx512, avx2;

}  // namespace onepass
