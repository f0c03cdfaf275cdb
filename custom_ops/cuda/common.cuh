// What all kernels share. Compiled without contraction of multiplications and additions, with
// subnormals and correctly rounded divisions, so the bits are those of the reference.
#pragma once

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;

constexpr uint32 kInfinityBits = 0x7f800000u;
constexpr uint32 kMagnitudeMask = 0x7fffffffu;
constexpr float kLargest = 3.4028234663852886e38f;
constexpr uint32 kAllLanes = 0xffffffffu;
constexpr int64 kHeaderBytes = 8;

__device__ inline uint32 bits_of(float x) { return __float_as_uint(x); }
__device__ inline float float_of(uint32 bits) { return __uint_as_float(bits); }
__device__ inline float not_a_number() { return float_of(0x7fc00000u); }

__device__ inline float clamped(float x) {  // for an infinity that rounding made; NaN stays
  x = x > kLargest ? kLargest : x;
  return x < -kLargest ? -kLargest : x;
}

// To the nearest bf16.
__device__ inline uint32 to_brain(float x) {
  const uint32 bits = bits_of(x);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 & 0xffffu;
}

__device__ inline float half_to_float(uint16 half) {
  const uint32 magnitude = half & 0x7fffu;
  const bool subnormal = magnitude < 0x400u;  // decoded as if there were a leading one, less that
  const uint32 exponent = subnormal ? 113u << 23 : magnitude < 0x7c00u ? 112u << 23 : 224u << 23;
  const float value = float_of((magnitude << 13) + exponent) - (subnormal ? 0x1p-14f : 0.0f);
  return float_of(uint32(half & 0x8000u) << 16 | bits_of(value));
}

// A bucket's elements in fp32. `FLAT` is 0 for fp32, 1 for bf16, 2 for fp16.
#ifdef FLAT
#if FLAT == 0
using Flat = float;
__device__ inline float widened(Flat x) { return x; }
#elif FLAT == 1
using Flat = uint16;
__device__ inline float widened(Flat x) { return float_of(uint32(x) << 16); }
#else
using Flat = uint16;
__device__ inline float widened(Flat x) { return half_to_float(x); }
#endif

// Four of them, at an index that is a multiple of four of an aligned array.
__device__ inline float4 load4(const Flat* at) {
#if FLAT == 0
  return *reinterpret_cast<const float4*>(at);
#else
  const ushort4 x = *reinterpret_cast<const ushort4*>(at);
  return make_float4(widened(x.x), widened(x.y), widened(x.z), widened(x.w));
#endif
}
#endif

__device__ inline bool aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uint64>(pointer) % bytes == 0;
}

__device__ inline int warp_max(int x) {
  for (int step = 16; step; step /= 2) {
    const int other = __shfl_xor_sync(kAllLanes, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// Zeros in [start, end) of a payload, by all threads of a block.
__device__ inline void clear(uint8* payload, int64 start, int64 end) {
  for (int64 at = start + threadIdx.x; at < end; at += blockDim.x) payload[at] = 0;
}

// The last step of what encodes: headers, and zeros where nothing stands; or, if anything was not
// finite, nothing but zeros, and the residual as it was. See custom_ops/triton/finish.py.
extern "C" __global__ void finish(uint8* payload, const float* residual, float* lost,
                                  const int* bad, const uint8* pieces, int64 rows, int64 row_bytes,
                                  const int64* gaps, int64 gap_count, int64 shards,
                                  int64 payload_bytes, int64 held, int64 room) {
  bool failed = *bad != 0;
  for (int64 row = 0; row < rows; ++row) failed |= pieces[row * row_bytes] != 1;
  const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 threads = int64(gridDim.x) * blockDim.x;
  if (failed) {
    for (int64 at = thread; at < payload_bytes / 8; at += threads)
      reinterpret_cast<uint64*>(payload)[at] = 0;
    if (residual)
      for (int64 at = thread; at < room; at += threads) lost[at] = residual[at];
    return;
  }
  for (int64 shard = blockIdx.x; shard < shards; shard += gridDim.x) {
    uint8* piece = payload + shard * (payload_bytes / shards);
    if (threadIdx.x == 0) *reinterpret_cast<uint64*>(piece) = 1;
    for (int64 gap = shard; gap < gap_count * shards; gap += shards)
      clear(piece, gaps[gap], gaps[gap_count * shards + gap]);
  }
  if (residual)
    for (int64 at = held + thread; at < room; at += threads) lost[at] = 0;
}
