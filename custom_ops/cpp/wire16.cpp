// 16-bit floats with a power-of-two scale; custom_ops/wire16.py says what is computed.
//
// Conversions are integer arithmetic, which every vector unit has.

#include "common.h"

namespace {

constexpr int kLargestExponent = 100;  // of a scale, so that no product of scales is subnormal
constexpr int64_t kBlock = 1024;

inline float power_of_two(int exponent) { return float_of(uint32_t(127 + exponent) << 23); }

// The largest exponent, up to a limit, with which values up to this one stay within fp16's 65504.
int exponent_for(uint32_t largest_bits) {
  constexpr uint32_t limit = 0x477fe000u;  // 65504
  const int field = int(largest_bits >> 23);
  const bool beyond = (largest_bits & 0x7fffffu) > (limit & 0x7fffffu);
  return std::min(kLargestExponent, int(limit >> 23) - field - beyond);
}

struct Half {
  static inline uint16_t narrow(float x) {  // |x| <= 65504
    const uint32_t bits = bits_of(x), magnitude = bits & kMagnitudeMask;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    return uint16_t((bits >> 16 & 0x8000u) | (magnitude < 113u << 23 ? subnormal : normal));
  }
  static inline float widen(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    const bool subnormal = magnitude < 0x400u;  // decoded as if there were a leading one, less that
    const uint32_t exponent = subnormal             ? 113u << 23
                              : magnitude < 0x7c00u ? 112u << 23
                                                    : 224u << 23;
    const float value = float_of((magnitude << 13) + exponent) - (subnormal ? 0x1p-14f : 0.0f);
    return float_of(uint32_t(half & 0x8000u) << 16 | bits_of(value));
  }
};

struct Brain {
  static inline uint16_t narrow(float x) {
    const uint32_t bits = bits_of(x);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  static inline float widen(uint16_t brain) { return float_of(uint32_t(brain) << 16); }
};

uint32_t largest_magnitude(const float* values, int64_t numel, int64_t threads) {
  int32_t largest = 0;
#pragma omp parallel for simd num_threads(threads) reduction(max : largest)
  for (int64_t i = 0; i < numel; ++i)
    largest = std::max(largest, int32_t(bits_of(values[i]) & kMagnitudeMask));
  return uint32_t(largest);
}

template <class Format>
void encode(const float* values, int64_t numel, float scale, uint8_t* out, int64_t threads) {
#pragma omp parallel for simd num_threads(threads)
  for (int64_t i = 0; i < numel; ++i) store(out + 2 * i, Format::narrow(values[i] * scale));
}

template <class Format, bool First>
void add(const uint8_t* __restrict values, int64_t length, float scale, float* __restrict sums) {
  for (int64_t i = 0; i < length; ++i) {
    const float value = Format::widen(load<uint16_t>(values + 2 * i)) * scale;
    sums[i] = First ? value : sums[i] + value;
  }
}

template <class Format>
void decode(const uint8_t* pieces, int64_t rows, int64_t row_bytes, int64_t numel, float* out,
            int64_t threads) {
  const Mean mean(rows);
#pragma omp parallel for num_threads(threads)
  for (int64_t start = 0; start < numel; start += kBlock) {
    const int64_t length = std::min(kBlock, numel - start);
    float* sums = out + start;
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* piece = pieces + row * row_bytes;
      const float scale = power_of_two(-int8_t(piece[1])) * mean.down;
      const auto run = row ? add<Format, false> : add<Format, true>;
      run(piece + kHeaderBytes + 2 * start, length, scale, sums);
    }
    for (int64_t i = 0; i < length; ++i) sums[i] = clamped(sums[i] * mean.factor);
  }
}
}  // namespace

extern "C" {

void fxpasses_encode16(const float* flat, uint8_t* payload, int64_t numel, int64_t shards,
                       int64_t shard_numel, int64_t piece_bytes, int64_t brain, int64_t threads) {
  const auto run = brain ? encode<Brain> : encode<Half>;
  std::vector<uint32_t> largest(shards);
  bool finite = true;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t start = std::min(numel, shard * shard_numel);
    largest[shard] = largest_magnitude(flat + start, std::min(shard_numel, numel - start), threads);
    finite &= largest[shard] < kInfinityBits;
  }
  for (int64_t shard = 0; shard < shards; ++shard) {
    uint8_t* piece = payload + shard * piece_bytes;
    const int64_t start = std::min(numel, shard * shard_numel);
    const int64_t length = finite ? std::min(shard_numel, numel - start) : 0;
    const int exponent = exponent_for(largest[shard]);
    std::memset(piece, 0, kHeaderBytes);
    if (finite) {
      piece[0] = 1;
      piece[1] = uint8_t(int8_t(exponent));
      run(flat + start, length, power_of_two(exponent), piece + kHeaderBytes, threads);
    }
    std::fill(piece + kHeaderBytes + 2 * length, piece + piece_bytes, 0);
  }
}

void fxpasses_decode16(const uint8_t* payloads, int64_t rows, float* out, int64_t numel,
                       int64_t shards, int64_t shard_numel, int64_t piece_bytes, int64_t brain,
                       int64_t threads) {
  const auto run = brain ? decode<Brain> : decode<Half>;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const uint8_t* pieces = payloads + shard * piece_bytes;
    const int64_t start = std::min(numel, shard * shard_numel);
    const int64_t length = std::min(shard_numel, numel - start);
    if (all_finite(pieces, rows, shards * piece_bytes))
      run(pieces, rows, shards * piece_bytes, length, out + start, threads);
    else
      std::fill(out + start, out + start + length, std::numeric_limits<float>::quiet_NaN());
  }
}
}
