// AVX2 with FMA: everything widens to fp32. Compiled with this instruction set alone (setup.py).
#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace onepass {
extern const Kernels avx2 = {"avx2", attention, rms_norm, rope, gated_act, linear};
}
