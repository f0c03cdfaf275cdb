// An element that is damaged; custom_ops/faults.py says how.

#include "common.h"

namespace {

template <class Bits>
void strike(uint8_t* at, int64_t keep, int64_t flip, int64_t* news) {
  const Bits before = load<Bits>(at);
  const Bits after = Bits((before & Bits(keep)) ^ Bits(flip));
  store(at, after);
  news[2] = before;
  news[3] = after;
}
}  // namespace

extern "C" {

// `x` has `numel` elements of `size` bytes.
void fxpasses_strike(uint8_t* x, const int64_t* row, int64_t* news, int64_t site, int64_t numel,
                     int64_t size, int64_t) {
  std::fill(news, news + 4, 0);
  if (row[0] != site || numel == 0) return;
  const int64_t at = (row[1] % numel + numel) % numel;
  news[0] = 1;
  news[1] = at;
  const auto run = size == 8   ? strike<int64_t>
                   : size == 4 ? strike<int32_t>
                   : size == 2 ? strike<int16_t>
                               : strike<int8_t>;
  run(x + at * size, row[2], row[3], news);
}
}
