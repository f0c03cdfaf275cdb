// Integers with a scale per group. custom_ops/quantise.py says what is computed,
// custom_ops/layout.py what stands where.

#include <cmath>

#include "common.h"

namespace {

struct Segment {  // custom_ops.layout.Segment
  int64_t shard, start, length, group, code;
};

struct Place {  // of a group within a piece, in bytes
  int64_t scale, zero, codes;
};

struct Layout {  // custom_ops.quantise.NativeLayout
  int64_t bits, group, symmetric, rotate, shards, piece_bytes, zeros_offset, codes_offset;

  int64_t code_bytes(int64_t length) const { return (length * bits + 7) / 8; }
  int64_t code_bytes_of(const Segment& segment) const {
    return segment.length / group * code_bytes(group) + code_bytes(segment.length % group);
  }
  Place place(const Segment& segment, int64_t g) const {
    const int64_t index = segment.group + g;
    return {kHeaderBytes + 2 * index, zeros_offset + index,
            codes_offset + segment.code + g * code_bytes(group)};
  }
};

inline int64_t groups_in(const Segment& segment, int64_t group) {
  return (segment.length + group - 1) / group;
}

struct Rounding {
  bool stochastic;
  uint32_t key;
};

constexpr int64_t kHadamard = 32;
constexpr float kSmallestScale = 0x1p-100f;

// Divides a span; a bit more than levels - 1, so that no two rounded ends lie further apart than
// there are codes.
template <int Bits>
constexpr float kStep = float((1 + 0x1p-16) / ((1 << Bits) - 2));

// The zero point of symmetric codes.
template <int Bits>
constexpr float kMiddle = (1 << Bits) / 2 - 1;

struct Grid {
  float scale;
  float zero;
};

// Integers in the order of the floats that these bits are.
inline int32_t ordered(uint32_t bits) {
  const int32_t value = int32_t(bits);
  return value ^ int32_t(uint32_t(value >> 31) & kMagnitudeMask);
}

// Smallest and largest value, zero included; false if one isn't finite.
inline bool range(const float* values, int64_t length, bool symmetric, float& low, float& high) {
  if (symmetric) {
    int32_t largest = 0;
    for (int64_t i = 0; i < length; ++i)
      largest = std::max(largest, int32_t(bits_of(values[i]) & kMagnitudeMask));
    high = float_of(uint32_t(largest));
    low = -high;
    return uint32_t(largest) < kInfinityBits;
  }
  int32_t largest = 0, smallest = 0;
  for (int64_t i = 0; i < length; ++i) {
    const int32_t value = ordered(bits_of(values[i]));
    largest = std::max(largest, value);
    smallest = std::min(smallest, value);
  }
  high = float_of(uint32_t(largest));
  low = smallest < 0 ? float_of(uint32_t(ordered(uint32_t(smallest)))) : 0.0f;
  return largest < int32_t(kInfinityBits) && smallest > ordered(kInfinityBits | ~kMagnitudeMask);
}

template <int Bits>
inline Grid grid_of(float low, float high, bool symmetric) {
  const float exact = std::max(high * kStep<Bits> - low * kStep<Bits>, kSmallestScale);
  const float scale = float_of((bits_of(exact) + 0xffffu) & 0xffff0000u);
  const float zero = symmetric ? kMiddle<Bits> : std::ceil(-low * (1.0f / scale));
  return {scale, zero};
}

// Finaliser of MurmurHash3: a bijection of 32 bits.
inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// Grid points relative to zero: nearest, or by chance one of the two neighbours. `position` is that
// of values[0].
inline void round_all(const float* values, int64_t length, float inverse, Rounding rounding,
                      int64_t position, float* points) {
  if (!rounding.stochastic) {
    for (int64_t i = 0; i < length; ++i) points[i] = std::nearbyint(values[i] * inverse);
    return;
  }
  for (int64_t i = 0; i < length; ++i) {
    const float scaled = values[i] * inverse;
    const float below = std::floor(scaled);
    const uint32_t random = mixed(uint32_t(position + i) ^ rounding.key) >> 8;
    points[i] = below + (float(int32_t(random)) * 0x1p-24f < scaled - below ? 1.0f : 0.0f);
  }
}

template <int Bits>
inline void pack(const float* points, int64_t length, float zero, uint8_t* codes) {
  if constexpr (Bits == 8) {
    for (int64_t i = 0; i < length; ++i) codes[i] = uint8_t(int32_t(points[i] + zero));
  } else {
    const int64_t half = (length + 1) / 2;
    for (int64_t i = 0; i < length - half; ++i)
      codes[i] = uint8_t(int32_t(points[i] + zero) | int32_t(points[i + half] + zero) << 4);
    if (length % 2) codes[half - 1] = uint8_t(int32_t(points[half - 1] + zero));
  }
}

// sums = or += (code - zero) * scale
template <int Bits, bool First>
inline void add(const uint8_t* __restrict codes, int64_t length, Grid grid,
                float* __restrict sums) {
  const auto put = [&](int64_t i, int32_t code) {
    const float value = (float(code) - grid.zero) * grid.scale;
    sums[i] = First ? value : sums[i] + value;
  };
  const int64_t half = Bits == 8 ? length : (length + 1) / 2;
  for (int64_t i = 0; i < half; ++i) put(i, Bits == 8 ? codes[i] : codes[i] & 15);
  for (int64_t i = half; i < length; ++i) put(i, codes[i - half] >> 4);
}

// Walsh-Hadamard transform of each full block, without a scale. All stages have the same form
// (Pease), which vectorises.
inline void stage(const float* __restrict from, float* __restrict to) {
  for (int64_t i = 0; i < kHadamard / 2; ++i) {
    const float a = from[2 * i], b = from[2 * i + 1];
    to[i] = a + b;
    to[i + kHadamard / 2] = a - b;
  }
}

inline void transform(float* values, int64_t length) {
  for (float* block = values; block + kHadamard <= values + length; block += kHadamard) {
    float a[kHadamard], b[kHadamard], c[kHadamard];
    stage(block, a);
    stage(a, b);
    stage(b, a);
    stage(a, b);
    stage(b, c);
    std::copy(c, c + kHadamard, block);
  }
}

inline void rotate(float* values, int64_t length) {
  const int64_t rotated = length / kHadamard * kHadamard;
  for (int64_t i = 0; i < rotated; ++i) values[i] *= 1.0f / kHadamard;
  transform(values, rotated);
}

struct Work {  // for one group
  std::vector<float> values, coded, points;

  explicit Work(int64_t length) : values(length), coded(length), points(length) {}
};

int64_t longest_group(const Segment* segments, int64_t count, int64_t group) {
  int64_t longest = 0;
  for (int64_t s = 0; s < count; ++s)
    longest = std::max(longest, std::min(segments[s].length, group));
  return longest;
}

// Quantises one group; `values` become what was lost.
template <int Bits>
inline bool encode(float* values, int64_t length, const Layout& layout, Rounding rounding,
                   int64_t position, uint8_t* piece, Place place, Work& work) {
  float *points = work.points.data(), *coded = values;
  if (layout.rotate) {
    coded = work.coded.data();
    std::copy(values, values + length, coded);
    rotate(coded, length);
  }
  float low, high;
  if (!range(coded, length, layout.symmetric, low, high)) return false;
  const Grid grid = grid_of<Bits>(low, high, layout.symmetric);
  store(piece + place.scale, uint16_t(bits_of(grid.scale) >> 16));
  if (!layout.symmetric) piece[place.zero] = uint8_t(grid.zero);
  round_all(coded, length, 1.0f / grid.scale, rounding, position, points);
  pack<Bits>(points, length, grid.zero, piece + place.codes);
  if (!layout.rotate) {
    for (int64_t i = 0; i < length; ++i) values[i] -= clamped(points[i] * grid.scale);
  } else {
    for (int64_t i = 0; i < length; ++i) points[i] *= grid.scale * 0.5f;
    transform(points, length);
    for (int64_t i = 0; i < length; ++i) values[i] -= clamped(points[i] * 2.0f);
  }
  return true;
}

// Calls `work(segment's index, group within it, start, length)` for each group; `start` is that of
// the bucket.
template <class Work>
inline void for_each_group(const Segment* segments, int64_t count, int64_t group,
                           const Work& work) {
  for (int64_t s = 0; s < count; ++s) {
    const Segment& segment = segments[s];
#pragma omp for nowait schedule(static)
    for (int64_t g = 0; g < groups_in(segment, group); ++g)
      work(s, g, segment.start + g * group, std::min(group, segment.length - g * group));
  }
}

// Completes a piece whose groups are written: its header, and zeros where no group stands.
void frame(uint8_t* piece, int64_t shard, const Segment* segments, int64_t count,
           const Layout& layout, bool finite) {
  std::memset(piece, 0, finite ? kHeaderBytes : layout.piece_bytes);
  if (!finite) return;
  piece[0] = 1;
  int64_t groups = 0, bytes = 0;
  for (int64_t s = 0; s < count; ++s) {
    if (segments[s].shard != shard) continue;
    groups = segments[s].group + groups_in(segments[s], layout.group);
    bytes = segments[s].code + layout.code_bytes_of(segments[s]);
  }
  std::fill(piece + kHeaderBytes + 2 * groups, piece + layout.zeros_offset, 0);
  if (!layout.symmetric)
    std::fill(piece + layout.zeros_offset + groups, piece + layout.codes_offset, 0);
  std::fill(piece + layout.codes_offset + bytes, piece + layout.piece_bytes, 0);
}

template <int Bits>
bool quantise(const float* flat, const float* residual, float* new_residual, uint8_t* payload,
              const Segment* segments, int64_t count, const Layout& layout, Rounding rounding,
              int64_t threads) {
  const int64_t longest = longest_group(segments, count, layout.group);
  bool failed = false;
#pragma omp parallel num_threads(threads) reduction(|| : failed)
  {
    Work work(longest);
    for_each_group(
        segments, count, layout.group, [&](int64_t s, int64_t g, int64_t start, int64_t length) {
          const Place place = layout.place(segments[s], g);
          float* values = new_residual ? new_residual + start : work.values.data();
          if (residual)
            for (int64_t i = 0; i < length; ++i) values[i] = flat[start + i] + residual[start + i];
          else
            std::copy(flat + start, flat + start + length, values);
          uint8_t* piece = payload + segments[s].shard * layout.piece_bytes;
          failed |= !encode<Bits>(values, length, layout, rounding, start, piece, place, work);
        });
  }
  return !failed;
}

// Mean of one group over the payloads, whose pieces begin at `pieces`.
template <int Bits>
inline void mean_of_group(const uint8_t* pieces, int64_t rows, int64_t row_bytes,
                          const Layout& layout, Mean mean, Place place, int64_t length,
                          float* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* piece = pieces + row * row_bytes;
    const float scale = float_of(uint32_t(load<uint16_t>(piece + place.scale)) << 16);
    const float zero = layout.symmetric ? kMiddle<Bits> : float(piece[place.zero]);
    const auto run = row ? add<Bits, false> : add<Bits, true>;
    run(piece + place.codes, length, {scale * mean.down, zero}, sums);
  }
  if (layout.rotate) transform(sums, length);
  for (int64_t i = 0; i < length; ++i) sums[i] = clamped(sums[i] * mean.factor);
}

template <int Bits>
void dequantise(const uint8_t* payloads, int64_t rows, float* out, const Segment* segments,
                int64_t count, const Layout& layout, int64_t threads) {
  const int64_t row_bytes = layout.shards * layout.piece_bytes;
  const Mean mean(rows);
#pragma omp parallel num_threads(threads)
  for_each_group(
      segments, count, layout.group, [&](int64_t s, int64_t g, int64_t start, int64_t length) {
        const uint8_t* pieces = payloads + segments[s].shard * layout.piece_bytes;
        if (all_finite(pieces, rows, row_bytes))
          mean_of_group<Bits>(pieces, rows, row_bytes, layout, mean, layout.place(segments[s], g),
                              length, out + start);
        else
          std::fill(out + start, out + start + length, std::numeric_limits<float>::quiet_NaN());
      });
}

template <int Bits, int OutBits>
bool requantise(const uint8_t* pieces, int64_t rows, const float* residual, float* new_residual,
                uint8_t* out, int64_t first, const Segment* segments, const Segment* out_segments,
                int64_t count, const Layout& layout, const Layout& out_layout, Rounding rounding,
                int64_t threads) {
  if (!all_finite(pieces, rows, layout.piece_bytes)) return false;
  const Mean mean(rows);
  const int64_t longest = longest_group(segments, count, layout.group);
  bool failed = false;
#pragma omp parallel num_threads(threads) reduction(|| : failed)
  {
    Work work(longest);
    for_each_group(
        segments, count, layout.group, [&](int64_t s, int64_t g, int64_t start, int64_t length) {
          float* values = new_residual ? new_residual + start - first : work.values.data();
          mean_of_group<Bits>(pieces, rows, layout.piece_bytes, layout, mean,
                              layout.place(segments[s], g), length, values);
          if (residual)
            for (int64_t i = 0; i < length; ++i) values[i] += residual[start - first + i];
          failed |= !encode<OutBits>(values, length, out_layout, rounding, start, out,
                                     out_layout.place(out_segments[s], g), work);
        });
  }
  return !failed;
}
}  // namespace

extern "C" {

void fxpasses_quantise(const float* flat, const float* residual, float* new_residual,
                       uint8_t* payload, const Segment* segments, int64_t count,
                       const Layout* layout, int64_t numel, int64_t stochastic, int64_t key,
                       int64_t threads) {
  const auto run = layout->bits == 8 ? quantise<8> : quantise<4>;
  const bool finite = run(flat, residual, new_residual, payload, segments, count, *layout,
                          {stochastic != 0, uint32_t(key)}, threads);
  for (int64_t shard = 0; shard < layout->shards; ++shard)
    frame(payload + shard * layout->piece_bytes, shard, segments, count, *layout, finite);
  if (!finite && new_residual) std::copy(residual, residual + numel, new_residual);
}

void fxpasses_dequantise(const uint8_t* payloads, int64_t rows, float* out, const Segment* segments,
                         int64_t count, const Layout* layout, int64_t threads) {
  const auto run = layout->bits == 8 ? dequantise<8> : dequantise<4>;
  run(payloads, rows, out, segments, count, *layout, threads);
}

// `segments` are those of one shard, whose elements begin at `first`; `residual` has `numel`
// elements.
void fxpasses_requantise(const uint8_t* pieces, int64_t rows, const float* residual,
                         float* new_residual, uint8_t* out, int64_t shard, int64_t first,
                         int64_t numel, const Segment* segments, const Segment* out_segments,
                         int64_t count, const Layout* layout, const Layout* out_layout,
                         int64_t stochastic, int64_t key, int64_t threads) {
  const bool to8 = out_layout->bits == 8;
  const auto run = layout->bits == 8 ? (to8 ? requantise<8, 8> : requantise<8, 4>)
                                     : (to8 ? requantise<4, 8> : requantise<4, 4>);
  if (new_residual)
    std::fill(new_residual, new_residual + numel, 0.0f);  // also where the bucket has ended
  const bool finite = run(pieces, rows, residual, new_residual, out, first, segments, out_segments,
                          count, *layout, *out_layout, {stochastic != 0, uint32_t(key)}, threads);
  frame(out, shard, out_segments, count, *out_layout, finite);
  if (!finite && new_residual) std::copy(residual, residual + numel, new_residual);
}
}
