// AVX-512F, BW, DQ, VL: bf16 attention widens to fp32. Compiled with this instruction set alone (setup.py).
#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace onepass {
extern const Kernels avx512 = {"avx512", attention, rms_norm, rope, gated_act, linear};
}
