// What all kernels share. Results are the same on every machine: built with -ffp-contract=off, and
// no value depends on the order of a floating-point reduction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kMagnitudeMask = 0x7fffffffu;
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr int64_t kHeaderBytes = 8;

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float clamped(float x) {  // for an infinity that rounding made; NaN stays
  x = x > kLargest ? kLargest : x;
  return x < -kLargest ? -kLargest : x;
}

template <class T>
static inline T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
static inline void store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Of the sum of W values that were multiplied by 2^-headroom: the mean is that sum times `factor`.
struct Mean {
  float down;    // 2^-headroom: no sum of W finite values overflows
  float factor;  // 2^headroom / W

  explicit Mean(int64_t rows) {
    int headroom = 1;
    while ((int64_t{1} << (headroom - 1)) < rows) ++headroom;
    down = float_of(uint32_t(127 - headroom) << 23);
    factor = float_of(uint32_t(127 + headroom) << 23) / float(rows);
  }
};

// Whether the pieces that begin here, one a row, all say that they are finite.
static inline bool all_finite(const uint8_t* pieces, int64_t rows, int64_t row_bytes) {
  for (int64_t row = 0; row < rows; ++row)
    if (pieces[row * row_bytes] != 1) return false;
  return true;
}
