// Sum of the 32-bit words of a piece; custom_ops/checksum.py says what it is for.

#include "common.h"

extern "C" {

// Of each piece of `words` words, the one at index 1 left out.
void fxpasses_checksums(const uint8_t* pieces, int64_t count, int64_t words, uint32_t* out,
                        int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t piece = 0; piece < count; ++piece) {
    const uint8_t* from = pieces + piece * words * 4;
    uint32_t sum = load<uint32_t>(from);
    for (int64_t word = 2; word < words; ++word) sum += load<uint32_t>(from + 4 * word);
    out[piece] = ~sum;
  }
}
}
