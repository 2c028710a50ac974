// The shared library's C interface, for ctypes (native.py). Compiled without any instruction set beyond the platform's.
#include "library.h"

#include <string.h>

using namespace onepass;

namespace {
const Kernels* const kFastestFirst[] = {&avx512_bf16, &avx512, &avx2};
const Kernels* chosen = nullptr;
StartRegion start_region = nullptr;

bool runs_here(const Kernels& kernels) {
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (&kernels == &avx512_bf16) return wide && __builtin_cpu_supports("avx512bf16");
  if (&kernels == &avx512) return wide;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Chooses the named variant, or the fastest one if name is empty; returns its name, or null if this CPU lacks it.
EXPORT const char* onepass_select(const char* name) {
  for (const Kernels* kernels : kFastestFirst) {
    if ((*name == 0 || strcmp(name, kernels->name) == 0) && runs_here(*kernels)) {
      chosen = kernels;
      return kernels->name;
    }
  }
  return nullptr;
}

EXPORT void onepass_use_pool(StartRegion start) { start_region = start; }

EXPORT void onepass_attention(const AttentionArgs* args, int64_t threads) {
  chosen->attention(*args, {start_region, threads});
}

EXPORT void onepass_rms_norm(const RmsNormArgs* args, int64_t threads) {
  chosen->rms_norm(*args, {start_region, threads});
}

EXPORT void onepass_rope(const RopeArgs* ops, int64_t count, int64_t threads) {
  chosen->rope(ops, count, {start_region, threads});
}

EXPORT void onepass_gated_act(const GatedActArgs* args, int64_t threads) {
  chosen->gated_act(*args, {start_region, threads});
}

EXPORT void onepass_linear(const LinearArgs* args, int64_t threads) {
  chosen->linear(*args, {start_region, threads});
}
