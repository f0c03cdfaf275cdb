// The largest elements of each chunk; custom_ops/topk.py says what is computed.

#include <cmath>
#include <functional>

#include "common.h"

namespace {

constexpr int64_t kChunk = 65536;
constexpr int64_t kBlock = 16;
constexpr int64_t kSamples = 1024;

struct Layout {  // custom_ops.topk.NativeLayout
  int64_t numel, chunks, quota, last_quota, offsets_offset, payload_bytes;

  int64_t length(int64_t chunk) const { return std::min(kChunk, numel - chunk * kChunk); }
  int64_t entries(int64_t chunk) const { return chunk == chunks - 1 ? last_quota : quota; }
};

inline uint32_t magnitude(float x) { return bits_of(x) & kMagnitudeMask; }

// To the nearest bf16, but never to infinity.
inline uint16_t to_brain(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return uint16_t((rounded & 0x7fffu) == 0x7f80u ? rounded - 1 : rounded);
}

struct Scratch {
  std::vector<uint32_t> sample;
  std::vector<uint32_t> found;  // magnitudes of candidates
  std::vector<uint16_t> where;  // their offsets
  std::vector<uint32_t> ranked;
};

// Offsets and magnitudes of what is at least `threshold`, in order.
void collect(const float* values, int64_t length, uint32_t threshold, Scratch& scratch) {
  scratch.found.clear();
  scratch.where.clear();
  const auto look = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      if (magnitude(values[i]) >= threshold) {
        scratch.found.push_back(magnitude(values[i]));
        scratch.where.push_back(uint16_t(i));
      }
  };
  int64_t start = 0;
  for (; start + kBlock <= length; start += kBlock) {
    int32_t largest = 0;
    for (int64_t i = start; i < start + kBlock; ++i)
      largest = std::max(largest, int32_t(magnitude(values[i])));
    if (uint32_t(largest) >= threshold) look(start, start + kBlock);
  }
  look(start, length);
}

// Finds the non-zero elements among which the `quota` largest are: guesses a threshold from a
// sample, and a lower one as long as it leaves too few.
void candidates(const float* values, int64_t length, int64_t quota, Scratch& scratch) {
  const int64_t stride = (length + kSamples - 1) / kSamples;
  scratch.sample.clear();
  for (int64_t i = 0; i < length; i += stride) scratch.sample.push_back(magnitude(values[i]));
  const int64_t size = int64_t(scratch.sample.size());
  const double expected = double(quota) * double(size) / double(length);
  int64_t rank = int64_t(expected + 3 * std::sqrt(expected)) + 1;
  for (;; rank *= 2) {
    uint32_t threshold = 1;
    if (rank < size) {
      const auto nth = scratch.sample.begin() + rank;
      std::nth_element(scratch.sample.begin(), nth, scratch.sample.end(), std::greater<>());
      threshold = std::max(threshold, *nth);
    }
    collect(values, length, threshold, scratch);
    if (int64_t(scratch.found.size()) >= quota || threshold == 1) return;
  }
}

// Sends a chunk's largest elements, of equal ones the first; `values` keep what isn't sent.
void encode(float* values, int64_t length, int64_t quota, uint8_t* sent, uint8_t* offsets,
            Scratch& scratch) {
  candidates(values, length, quota, scratch);
  uint32_t smallest = 0;  // that is sent
  int64_t equal = 0;      // to the smallest: how many of them are sent
  if (int64_t(scratch.found.size()) > quota) {
    scratch.ranked = scratch.found;
    const auto nth = scratch.ranked.begin() + quota - 1;
    std::nth_element(scratch.ranked.begin(), nth, scratch.ranked.end(), std::greater<>());
    smallest = *nth;
    equal = quota -
            std::count_if(scratch.ranked.begin(), nth, [&](uint32_t m) { return m > smallest; });
  }
  int64_t entry = 0;
  for (size_t c = 0; c < scratch.found.size(); ++c) {
    if (scratch.found[c] < smallest || (scratch.found[c] == smallest && equal-- <= 0)) continue;
    float& value = values[scratch.where[c]];
    const uint16_t brain = to_brain(value);
    store(sent + 2 * entry, brain);
    store(offsets + 2 * entry, scratch.where[c]);
    value -= float_of(uint32_t(brain) << 16);
    ++entry;
  }
  std::fill(sent + 2 * entry, sent + 2 * quota, 0);
  std::fill(offsets + 2 * entry, offsets + 2 * quota, 0);
}

// values = flat + residual; whether all are finite.
bool accumulate(const float* flat, const float* residual, int64_t length, float* values) {
  int32_t largest = 0;
  for (int64_t i = 0; i < length; ++i) {
    values[i] = flat[i] + residual[i];
    largest = std::max(largest, int32_t(magnitude(values[i])));
  }
  return uint32_t(largest) < kInfinityBits;
}
}  // namespace

extern "C" {

void fxpasses_topk_encode(const float* flat, const float* residual, float* new_residual,
                          uint8_t* payload, const Layout* layout, int64_t threads) {
  bool failed = false;
#pragma omp parallel num_threads(threads) reduction(|| : failed)
  {
    Scratch scratch;
#pragma omp for
    for (int64_t chunk = 0; chunk < layout->chunks; ++chunk) {
      const int64_t start = chunk * kChunk, first = 2 * chunk * layout->quota;
      if (!accumulate(flat + start, residual + start, layout->length(chunk), new_residual + start))
        failed = true;
      else
        encode(new_residual + start, layout->length(chunk), layout->entries(chunk),
               payload + kHeaderBytes + first, payload + layout->offsets_offset + first, scratch);
    }
  }
  if (failed) {
    std::memset(payload, 0, layout->payload_bytes);
    std::copy(residual, residual + layout->numel, new_residual);
    return;
  }
  std::memset(payload, 0, kHeaderBytes);
  payload[0] = 1;
  const int64_t entries = (layout->offsets_offset - kHeaderBytes) / 2;
  std::fill(payload + layout->offsets_offset + 2 * entries, payload + layout->payload_bytes, 0);
}

void fxpasses_topk_decode(const uint8_t* payloads, int64_t rows, float* out, const Layout* layout,
                          int64_t threads) {
  const bool finite = all_finite(payloads, rows, layout->payload_bytes);
  const float background = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  const float share = 1.0f / float(rows);
#pragma omp parallel for num_threads(threads)
  for (int64_t chunk = 0; chunk < layout->chunks; ++chunk) {
    float* sums = out + chunk * kChunk;
    const int64_t length = layout->length(chunk);
    std::fill(sums, sums + length, background);
    for (int64_t row = 0; row < rows && finite; ++row) {
      const uint8_t* values =
          payloads + row * layout->payload_bytes + kHeaderBytes + 2 * chunk * layout->quota;
      const uint8_t* offsets = values + layout->offsets_offset - kHeaderBytes;
      for (int64_t entry = 0; entry < layout->entries(chunk); ++entry) {
        const int64_t offset = load<uint16_t>(offsets + 2 * entry);
        if (offset < length)  // always, unless the payload is damaged
          sums[offset] += float_of(uint32_t(load<uint16_t>(values + 2 * entry)) << 16) * share;
      }
    }
  }
}
}
