// Loops over tasks on torch's threads. Included by each variant; everything here is local to it.
#pragma once

#include "library.h"

namespace onepass {
namespace {

template <class Body>
struct DynamicLoop {
  const Body& body;
  int64_t count, next;

  static void region(void* self) {
    auto& loop = *static_cast<DynamicLoop*>(self);
    for (;;) {
      const int64_t task = __atomic_fetch_add(&loop.next, 1, __ATOMIC_RELAXED);
      if (task >= loop.count) return;
      loop.body(task);
    }
  }
};

// Calls body(task) for 0 <= task < count, in ascending order of start. Which thread runs a task changes no result.
template <class Body>
void parallel_tasks(Pool pool, int64_t count, const Body& body) {
  DynamicLoop<Body> loop{body, count, 0};
  if (pool.start && pool.threads > 1 && count > 1) {
    // Always the whole pool: libgomp makes new threads when the number changes from one region to the next.
    pool.start(&DynamicLoop<Body>::region, &loop, static_cast<unsigned>(pool.threads), 0);
  } else {
    DynamicLoop<Body>::region(&loop);
  }
}

// Calls body(first, last) over pieces of `rows` of which each touches at least 32,768 elements, or about that.
template <class Body>
void parallel_rows(Pool pool, int64_t rows, int64_t row_elements, const Body& body) {
  constexpr int64_t kPieceElements = 32768;
  int64_t piece = kPieceElements / (row_elements > 0 ? row_elements : 1);
  if (piece < 1) piece = 1;
  const int64_t pieces = (rows + piece - 1) / piece;
  struct Rows {
    const Body& body;
    int64_t rows, piece;
    void operator()(int64_t task) const {
      const int64_t first = task * piece, last = first + piece;
      body(first, last < rows ? last : rows);
    }
  };
  parallel_tasks(pool, pieces, Rows{body, rows, piece});
}

}  // namespace
}  // namespace onepass
