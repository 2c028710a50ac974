// AVX-512 with VDPBF16PS: bf16 attention on pairs of bf16. Compiled with this instruction set alone (setup.py).
#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace onepass {
extern const Kernels avx512_bf16 = {"avx512-bf16", attention, rms_norm, rope, gated_act, linear};
}
