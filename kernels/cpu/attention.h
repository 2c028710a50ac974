// Causal attention of packed query segments over paged keys and values: kernels/attention.py has shapes and formula.
//
// Everything is transposed. The lanes of a register are query rows, keys and head dims are broadcast, so that maximum,
// sum and rescaling are plain vertical operations and no row ever meets another. The rows of one kv head are numbered
// (query, head within the group): a tile of 48 rows in a group of 3 heads spans 16 positions, and little above the
// diagonal is computed. Keys come in tiles of kKeyTile that start at absolute multiples of it, in ascending order;
// what a tile skips or masks contributes exact zeros. So a row's bits depend on its own segment alone.
//
// A `Dot` says how two operands meet: DotFp32 multiplies numbers, DotBf16 pairs of bf16 (two dims of q·k, two keys of
// p·v) by VDPBF16PS. Either way an operand's unit is 4 bytes.
#pragma once

#include <math.h>
#include <stdlib.h>

#include "library.h"
#include "parallel.h"
#include "vec.h"

namespace onepass {
namespace {

constexpr int kKeyTile = 128;
constexpr int kTileVecs = 3;                       // registers of query rows a tile
constexpr int kTileRows = kTileVecs * kLanes;
constexpr int kBroadcasts = kLanes == 16 ? 8 : 4;  // keys or dims at a time: 24 or 12 accumulators
constexpr int kKeyGroup = 8;
constexpr int kMaxBlockTiles = 4;
constexpr float kMasked = -1e37f;  // finite, and far below kStart: a masked key weighs exactly nothing in any row
constexpr float kStart = -1e30f;

inline Vec bits_of(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_set1_epi32(x));
#else
  return _mm256_castsi256_ps(_mm256_set1_epi32(x));
#endif
}

template <class Element>
struct DotFp32 {
  using Input = Element;
  static constexpr int kPack = 1;  // numbers a unit
  static constexpr int kDegree = 6;
  static constexpr bool kKeysInPlace = sizeof(Element) == 4;
  static Vec dot(Vec a, Vec b, Vec c) { return fma(a, b, c); }
  // Units [0, kLanes) of a row of q.
  static Vec load_units(const Element* row) { return load(row); }
  static void pack_weights(float* out, Vec first, Vec second, int64_t stride) {
    store(out, first);
    store(out + stride, second);
  }
  // Two value rows; null is a row of zeros.
  static void pack_values(float* out, const Element* first, const Element* second, int64_t dims) {
    copy(out, first, dims);
    copy(out + dims, second, dims);
  }
  static void copy(float* out, const Element* row, int64_t dims) {
    for (int64_t d = 0; d < dims; d += kLanes) store(out + d, row ? load(row + d) : zero());
  }
};

#if defined(__AVX512BF16__)
struct DotBf16 {
  using Input = uint16_t;
  static constexpr int kPack = 2;
  static constexpr int kDegree = 4;
  static constexpr bool kKeysInPlace = true;
  static Vec dot(Vec a, Vec b, Vec c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
  static Vec load_units(const uint16_t* row) { return _mm512_loadu_ps(row); }
  static void pack_weights(float* out, Vec first, Vec second, int64_t) {
    alignas(64) static constexpr uint16_t kInterleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(kInterleave);
    const __m512i both_halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, both_halves));
  }
  static void pack_values(float* out, const uint16_t* first, const uint16_t* second, int64_t dims) {
    for (int64_t d = 0; d < dims; d += 16) {
      const __m512i low = first ? widen(first + d) : _mm512_setzero_si512();
      const __m512i high = second ? widen(second + d) : _mm512_setzero_si512();
      _mm512_storeu_si512(out + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
  static __m512i widen(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};
#endif

// What does not change within a segment and kv head.
template <class Dot>
struct HeadTask {
  using Input = typename Dot::Input;
  const AttentionArgs& args;
  const Input *k, *v;    // of this kv head
  const int32_t* pages;  // of this segment
  int64_t group, start, first_head, first_query;
  int64_t units;
  float score_scale;  // from a stored score to the exponent of 2
  int page_shift;

  const Input* key(int64_t position) const {
    return k + pages[position >> page_shift] * args.k_page + (position & (args.page_tokens - 1)) * args.k_row;
  }
  const Input* value(int64_t position) const {
    return v + pages[position >> page_shift] * args.v_page + (position & (args.page_tokens - 1)) * args.v_row;
  }
};

// A tile of query rows with what the online softmax knows of them so far.
struct RowTile {
  float* q;             // [units, kTileRows]
  float* acc;           // [head_dim, kTileRows]
  float* top;           // [kTileRows], exponent of 2
  float* total;         // [kTileRows]
  int32_t* positions;   // [kTileRows]
  int64_t first, rows;  // rows of the segment and kv head
  int64_t lowest, highest;
  struct {
    int64_t query, head;  // of each row
  } at[kTileRows];
};

// out[j, row] = Σ_unit q[unit, row] · keys[j][unit] for kBroadcasts keys. Returns nothing but these: only then does the
// compiler keep all sums in registers.
template <class Dot, int Vecs>
inline void multiply(const float* q, const float* const* keys, int64_t units, float* out) {
  Vec sum[kBroadcasts][Vecs];
  for (int j = 0; j < kBroadcasts; ++j)
    for (int i = 0; i < Vecs; ++i) sum[j][i] = zero();
  for (int64_t unit = 0; unit < units; ++unit, q += kTileRows) {
    Vec row[Vecs];
    for (int i = 0; i < Vecs; ++i) row[i] = load(q + i * kLanes);
    for (int j = 0; j < kBroadcasts; ++j) {
      const Vec key = bits_of(keys[j] + unit);
      for (int i = 0; i < Vecs; ++i) sum[j][i] = Dot::dot(row[i], key, sum[j][i]);
    }
  }
  for (int j = 0; j < kBroadcasts; ++j)
    for (int i = 0; i < Vecs; ++i) store(out + j * kTileRows + i * kLanes, sum[j][i]);
}

// Soft cap and mask of the scores of one group of keys, in place.
template <int Vecs>
void adjust(const AttentionArgs& args, const RowTile& tile, int64_t position, bool masked, float* scores) {
  const Vec inner = set1(args.scale / args.soft_cap), outer = set1(args.soft_cap * kLog2E);
  const int64_t window = args.window > 0 ? args.window : INT32_MAX;
  for (int j = 0; j < kKeyGroup; ++j) {
    // Key k is seen from positions k ... k + window - 1.
    const int64_t key = position + j, end = key + window < INT32_MAX ? key + window : INT32_MAX;
    const VecInt before = set1_int(static_cast<int32_t>(key - 1)), behind = set1_int(static_cast<int32_t>(end));
    for (int i = 0; i < Vecs; ++i) {
      float* place = scores + j * kTileRows + i * kLanes;
      Vec score = load(place);
      if (args.soft_cap > 0) score = tanh(score * inner) * outer;
      if (masked) {
        const VecInt at = load_int(tile.positions + i * kLanes);
        score = select(both(greater(at, before), greater(behind, at)), score, set1(kMasked));
      }
      store(place, score);
    }
  }
}

// Takes keys [first, last) of the tile that starts at key_tile into `tile`; both are multiples of kKeyGroup.
// values: packed units of the whole key tile. keys: fp32 rows of the key tile where they are not read in place.
template <class Dot, int Vecs>
void take_keys(const HeadTask<Dot>& task, const RowTile& tile, int64_t key_tile, int64_t first, int64_t last,
               const float* keys, const float* values, float* scores, float* weights) {
  const int64_t dims = task.args.head_dim, window = task.args.window;
  for (int64_t position = first; position < last; position += kKeyGroup) {
    const float* rows[kKeyGroup];
    const float* group = Dot::kKeysInPlace ? reinterpret_cast<const float*>(task.key(position))
                                           : keys + (position - key_tile) * dims;
    const int64_t stride = Dot::kKeysInPlace ? task.args.k_row * sizeof(typename Dot::Input) : dims * sizeof(float);
    for (int j = 0; j < kKeyGroup; ++j)
      rows[j] = reinterpret_cast<const float*>(reinterpret_cast<const char*>(group) + j * stride);
    float* out = scores + (position - key_tile) * kTileRows;
    for (int j = 0; j < kKeyGroup; j += kBroadcasts)
      multiply<Dot, Vecs>(tile.q, rows + j, task.units, out + j * kTileRows);
    const bool masked = position + kKeyGroup - 1 > tile.lowest || (window > 0 && position <= tile.highest - window);
    if (masked || task.args.soft_cap > 0) adjust<Vecs>(task.args, tile, position, masked, out);
  }

  const Vec scale = set1(task.score_scale);
  Vec rescale[Vecs];
  for (int i = 0; i < Vecs; ++i) {
    Vec high = set1(kMasked), high_odd = high;
    for (int64_t j = first - key_tile; j < last - key_tile; j += 2) {
      high = max(high, load(scores + j * kTileRows + i * kLanes));
      high_odd = max(high_odd, load(scores + (j + 1) * kTileRows + i * kLanes));
    }
    const Vec old = load(tile.top + i * kLanes);
    const Vec now = max(old, max(high, high_odd) * scale);
    rescale[i] = exp2<6>(old - now);
    store(tile.top + i * kLanes, now);
    Vec even = zero(), odd = zero();
    for (int64_t j = first - key_tile; j < last - key_tile; j += 2) {
      const float* pair = scores + j * kTileRows + i * kLanes;
      const Vec a = exp2<Dot::kDegree>(fma(load(pair), scale, -now));
      const Vec b = exp2<Dot::kDegree>(fma(load(pair + kTileRows), scale, -now));
      even = even + a;
      odd = odd + b;
      Dot::pack_weights(weights + j / Dot::kPack * kTileRows + i * kLanes, a, b, kTileRows);
    }
    store(tile.total + i * kLanes, fma(load(tile.total + i * kLanes), rescale[i], even + odd));
  }

  const int64_t from = (first - key_tile) / Dot::kPack, to = (last - key_tile) / Dot::kPack;
  for (int64_t d = 0; d < dims; d += kBroadcasts) {
    float* acc = tile.acc + d * kTileRows;
    Vec sum[kBroadcasts][Vecs];
    for (int j = 0; j < kBroadcasts; ++j)
      for (int i = 0; i < Vecs; ++i) sum[j][i] = load(acc + j * kTileRows + i * kLanes) * rescale[i];
    for (int64_t unit = from; unit < to; ++unit) {
      Vec row[Vecs];
      for (int i = 0; i < Vecs; ++i) row[i] = load(weights + unit * kTileRows + i * kLanes);
      for (int j = 0; j < kBroadcasts; ++j) {
        const Vec value = bits_of(values + unit * dims + d + j);
        for (int i = 0; i < Vecs; ++i) sum[j][i] = Dot::dot(row[i], value, sum[j][i]);
      }
    }
    for (int j = 0; j < kBroadcasts; ++j)
      for (int i = 0; i < Vecs; ++i) store(acc + j * kTileRows + i * kLanes, sum[j][i]);
  }
}

template <class Dot>
void begin_tile(const HeadTask<Dot>& task, RowTile& tile) {
  const AttentionArgs& args = task.args;
  int64_t query = tile.first / task.group, head = tile.first % task.group;
  for (int64_t lane = 0; lane < kTileRows; ++lane) {
    tile.at[lane] = {task.first_query + query, task.first_head + head};
    tile.positions[lane] = static_cast<int32_t>(task.start + query);
    tile.top[lane] = args.sinks ? args.sinks[task.first_head + head] * kLog2E : kStart;
    tile.total[lane] = args.sinks ? 1.0f : 0.0f;
    if (lane + 1 < tile.rows && ++head == task.group) head = 0, ++query;
  }
  tile.lowest = tile.positions[0];
  tile.highest = tile.positions[kTileRows - 1];
  memset(tile.acc, 0, args.head_dim * kTileRows * sizeof(float));

  const auto* q = static_cast<const typename Dot::Input*>(args.q);
  const int64_t lanes = (tile.rows + kLanes - 1) / kLanes * kLanes;
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    for (int64_t unit = 0; unit < task.units; unit += kLanes) {
      const int64_t count = task.units - unit < kLanes ? task.units - unit : kLanes;
      Vec block[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        const auto at = tile.at[lane + j];
        const auto* source = q + at.query * args.q_row + at.head * args.q_head + unit * Dot::kPack;
        if (count == kLanes) {
          block[j] = Dot::load_units(source);
        } else {
          typename Dot::Input part[kLanes * Dot::kPack] = {};
          memcpy(part, source, count * Dot::kPack * sizeof(part[0]));
          block[j] = Dot::load_units(part);
        }
      }
      transpose(block);
      for (int64_t j = 0; j < count; ++j) store(tile.q + (unit + j) * kTileRows + lane, block[j]);
    }
  }
}

template <class Dot>
void end_tile(const HeadTask<Dot>& task, const RowTile& tile) {
  const AttentionArgs& args = task.args;
  auto* out = static_cast<typename Dot::Input*>(args.out);
  for (int64_t lane = 0; lane < tile.rows; lane += kLanes) {
    const Vec inverse = set1(1.0f) / load(tile.total + lane);
    for (int64_t d = 0; d < args.head_dim; d += kLanes) {
      Vec block[kLanes];
      for (int j = 0; j < kLanes; ++j) block[j] = load(tile.acc + (d + j) * kTileRows + lane) * inverse;
      transpose(block);
      for (int64_t j = 0; j < kLanes && lane + j < tile.rows; ++j) {
        const auto at = tile.at[lane + j];
        store(out + at.query * args.out_row + at.head * args.out_head + d, block[j]);
      }
    }
  }
  if (!args.lse) return;
  for (int64_t lane = 0; lane < tile.rows; ++lane) {
    const auto at = tile.at[lane];
    args.lse[at.query * args.lse_row + at.head * args.lse_head] = tile.top[lane] * kLn2 + logf(tile.total[lane]);
  }
}

// Rows [first_row, first_row + count) of one segment and kv head: several tiles share each packed tile of values.
template <class Dot>
void attend_block(const HeadTask<Dot>& task, int64_t first_row, int64_t count) {
  const AttentionArgs& args = task.args;
  const int64_t dims = args.head_dim, window = args.window;
  const int64_t tiles = (count + kTileRows - 1) / kTileRows;
  const int64_t tile_floats = (task.units + dims + 3) * kTileRows;
  const int64_t key_floats = Dot::kKeysInPlace ? 0 : kKeyTile * dims;
  const int64_t weight_floats = kKeyTile / Dot::kPack * kTileRows, value_floats = kKeyTile / Dot::kPack * dims;
  const int64_t floats = tiles * tile_floats + key_floats + value_floats + kKeyTile * kTileRows + weight_floats;
  // On the stack: half a megabyte at most, warm from one block to the next, and nobody has to free it.
  auto* memory = static_cast<float*>(__builtin_alloca_with_align(floats * sizeof(float), 512));
  float* keys = memory;
  float* values = keys + key_floats;
  float* scores = values + value_floats;
  float* weights = scores + kKeyTile * kTileRows;

  RowTile tile[kMaxBlockTiles];
  float* next = weights + weight_floats;
  for (int64_t i = 0; i < tiles; ++i, next += tile_floats) {
    tile[i].q = next;
    tile[i].acc = tile[i].q + task.units * kTileRows;
    tile[i].top = tile[i].acc + dims * kTileRows;
    tile[i].total = tile[i].top + kTileRows;
    tile[i].positions = reinterpret_cast<int32_t*>(tile[i].total + kTileRows);
    tile[i].first = first_row + i * kTileRows;
    tile[i].rows = count - i * kTileRows < kTileRows ? count - i * kTileRows : kTileRows;
    begin_tile(task, tile[i]);
  }

  auto lowest_key = [window](int64_t position) { return window > 0 && position >= window ? position - window + 1 : 0; };
  const int64_t block_first = lowest_key(tile[0].lowest), block_last = tile[tiles - 1].highest + 1;
  for (int64_t key_tile = block_first / kKeyTile * kKeyTile; key_tile < block_last; key_tile += kKeyTile) {
    const int64_t key_tile_end = key_tile + kKeyTile;
    auto rounded = [](int64_t x, int64_t up) { return (x + up) / kKeyGroup * kKeyGroup; };
    const int64_t low = rounded(block_first > key_tile ? block_first : key_tile, 0);
    const int64_t high = rounded(block_last < key_tile_end ? block_last : key_tile_end, kKeyGroup - 1);
    for (int64_t position = low; position < high; position += 2) {
      // Memory outside the block's keys may hold anything: its weight is 0, but 0 · NaN is NaN.
      auto row = [&](int64_t at) { return at >= block_first && at < block_last ? task.value(at) : nullptr; };
      Dot::pack_values(values + (position - key_tile) / Dot::kPack * dims, row(position), row(position + 1), dims);
      if constexpr (!Dot::kKeysInPlace) {
        Dot::copy(keys + (position - key_tile) * dims, task.key(position), dims);
        Dot::copy(keys + (position + 1 - key_tile) * dims, task.key(position + 1), dims);
      }
    }
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t tile_first = lowest_key(tile[i].lowest), tile_last = tile[i].highest + 1;
      const int64_t first = rounded(tile_first > key_tile ? tile_first : key_tile, 0);
      const int64_t last = rounded(tile_last < key_tile_end ? tile_last : key_tile_end, kKeyGroup - 1);
      if (first >= last) continue;
      auto take = tile[i].rows <= kLanes       ? take_keys<Dot, 1>
                  : tile[i].rows <= 2 * kLanes ? take_keys<Dot, 2>
                                               : take_keys<Dot, 3>;
      take(task, tile[i], key_tile, first, last, keys, values, scores, weights);
    }
  }
  for (int64_t i = 0; i < tiles; ++i) end_tile(task, tile[i]);
}

template <class Dot>
void attend(const AttentionArgs& args, Pool pool) {
  using Input = typename Dot::Input;
  const int64_t group = args.heads / args.kv_heads;
  // Blocks of several tiles pack values less often; fewer tiles when there would not be work for all threads.
  int64_t block_tiles = args.head_dim > 128 ? kMaxBlockTiles / 2 : kMaxBlockTiles;
  auto blocks_of = [&](int64_t segment) {
    const int64_t rows = (args.cu_q[segment + 1] - args.cu_q[segment]) * group, block = block_tiles * kTileRows;
    return (rows + block - 1) / block;
  };
  int64_t count = 0;
  for (;; block_tiles /= 2) {
    count = 0;
    for (int64_t segment = 0; segment < args.segments; ++segment) count += blocks_of(segment) * args.kv_heads;
    if (block_tiles == 1 || count >= 4 * pool.threads) break;
  }
  if (count == 0) return;

  // Task numbers run through segments, kv heads, and blocks from the last one (the longest) to the first. One kv head
  // after another: the keys and values of all heads of a long prefix do not fit the cache together.
  auto* ends = static_cast<int64_t*>(malloc(args.segments * sizeof(int64_t)));
  if (!ends) abort();
  int64_t end = 0;
  for (int64_t segment = 0; segment < args.segments; ++segment)
    ends[segment] = end += blocks_of(segment) * args.kv_heads;

  parallel_tasks(pool, count, [&](int64_t number) {
    int64_t low = 0, high = args.segments - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ends[middle] > number) high = middle; else low = middle + 1;
    }
    const int64_t segment = low, blocks = blocks_of(segment);
    const int64_t rest = number - (segment ? ends[segment - 1] : 0);
    const int64_t kv_head = rest / blocks, block = blocks - 1 - rest % blocks;
    const int64_t first_query = args.cu_q[segment], rows = (args.cu_q[segment + 1] - first_query) * group;
    const HeadTask<Dot> task{args,
                             static_cast<const Input*>(args.k) + kv_head * args.k_head,
                             static_cast<const Input*>(args.v) + kv_head * args.v_head,
                             args.page_table + segment * args.table_row,
                             group,
                             args.q_pos[segment],
                             kv_head * group,
                             first_query,
                             args.head_dim / Dot::kPack,
                             args.soft_cap > 0 ? 1.0f : args.scale * kLog2E,
                             __builtin_ctzll(args.page_tokens)};
    const int64_t first_row = block * block_tiles * kTileRows, left = rows - first_row;
    attend_block(task, first_row, left < block_tiles * kTileRows ? left : block_tiles * kTileRows);
  });
  free(ends);
}

inline void attention(const AttentionArgs& args, Pool pool) {
  if (args.dtype == FP32) {
    attend<DotFp32<float>>(args, pool);
  } else {
#if defined(__AVX512BF16__)
    attend<DotBf16>(args, pool);
#else
    attend<DotFp32<uint16_t>>(args, pool);
#endif
  }
}

}  // namespace
}  // namespace onepass
