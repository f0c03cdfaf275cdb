// Gradients times a factor, and their norm; custom_ops/gradients.py says what is computed.

#include <cmath>

#include "common.h"

namespace {
constexpr int64_t kLanes = 8;  // sums that are under way, so that a vector unit has work
}

extern "C" {

// `found_norm`: 1 if a product is not finite, else 0; the norm. `sums` holds one number for each
// block, so that the order of additions is the same for all numbers of threads.
void fxpasses_unscale(const float* flat, const float* factor, float* unscaled, double* sums,
                      float* found_norm, int64_t numel, int64_t block, int64_t threads) {
  const float by = *factor;
  const int64_t blocks = (numel + block - 1) / block;
  int32_t largest = 0;
#pragma omp parallel for num_threads(threads) reduction(max : largest)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t start = b * block, end = std::min(numel, start + block);
    double lanes[kLanes] = {};
    for (int64_t i = start; i < end; ++i) {
      const float value = flat[i] * by;
      unscaled[i] = value;
      largest = std::max(largest, int32_t(bits_of(value) & kMagnitudeMask));
    }
    for (int64_t i = start; i < end; ++i)
      lanes[(i - start) % kLanes] += double(unscaled[i]) * unscaled[i];
    double sum = 0;
    for (double lane : lanes) sum += lane;
    sums[b] = sum;
  }
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += sums[b];
  found_norm[0] = uint32_t(largest) >= kInfinityBits;
  found_norm[1] = float(std::sqrt(total));
}
}
