// 16-bit floats with a power-of-two scale; custom_ops/wire16.py says what is computed.
//
// A thread takes four values; shards begin at multiples of 16 elements. Constants: BRAIN, WORLD,
// FLAT.

constexpr int kLargestExponent = 100;

__device__ inline float power_of_two(int exponent) { return float_of(uint32(127 + exponent) << 23); }

// The largest exponent, up to a limit, with which values up to this one stay within fp16's 65504.
__device__ inline int exponent_for(uint32 largest) {
  constexpr uint32 limit = 0x477fe000u;  // 65504
  const int beyond = (largest & 0x7fffffu) > (limit & 0x7fffffu);
  const int exponent = int(limit >> 23) - int(largest >> 23) - beyond;
  return exponent < kLargestExponent ? exponent : kLargestExponent;
}

__device__ inline uint16 to_half(float x) {  // |x| <= 65504
  const uint32 bits = bits_of(x), magnitude = bits & kMagnitudeMask;
  const uint32 normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32 subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  return uint16((bits >> 16 & 0x8000u) | (magnitude < 113u << 23 ? subnormal : normal));
}

__device__ inline uint16 narrow(float x) { return BRAIN ? uint16(to_brain(x)) : to_half(x); }

__device__ inline float widen(uint16 x) {
  return BRAIN ? float_of(uint32(x) << 16) : half_to_float(x);
}

// Up to four elements of a bucket from `at` on, zeros beyond `end`.
__device__ inline float4 some(const Flat* flat, int64 at, int64 end) {
  if (at + 4 <= end && aligned(flat + at, 4 * sizeof(Flat))) return load4(flat + at);
  return make_float4(at < end ? widened(flat[at]) : 0.0f,
                     at + 1 < end ? widened(flat[at + 1]) : 0.0f,
                     at + 2 < end ? widened(flat[at + 2]) : 0.0f,
                     at + 3 < end ? widened(flat[at + 3]) : 0.0f);
}

__device__ inline int64 own_quad() {
  return 4 * (int64(blockIdx.x) * blockDim.x + threadIdx.x);
}

__device__ inline int64 end_of(int64 shard, int64 shard_numel, int64 numel) {
  const int64 end = (shard + 1) * shard_numel;
  return end < numel ? end : numel;
}

extern "C" __global__ void largest_of(const Flat* flat, int* largest, int64 numel,
                                      int64 shard_numel) {
  const int64 shard = blockIdx.y;
  const int64 threads = int64(gridDim.x) * blockDim.x;
  const int64 end = end_of(shard, shard_numel, numel);
  int found = 0;
  for (int64 at = shard * shard_numel + own_quad(); at < end; at += 4 * threads) {
    const float4 x = some(flat, at, end);
    const float values[4] = {x.x, x.y, x.z, x.w};
    for (float value : values) {
      const int magnitude = int(bits_of(value) & kMagnitudeMask);
      found = magnitude > found ? magnitude : found;
    }
  }
  found = warp_max(found);
  if (threadIdx.x % 32 == 0) atomicMax(largest + shard, found);
}

// A piece is header, the shard's values, zeros up to `piece_bytes`.
extern "C" __global__ void encode(const Flat* flat, uint8* payload, const int* largest,
                                  int64 numel, int64 shards, int64 shard_numel,
                                  int64 piece_bytes) {
  const int64 shard = blockIdx.y, within = own_quad();
  const int64 end = end_of(shard, shard_numel, numel);
  bool finite = true;
  for (int64 other = 0; other < shards; ++other) finite &= uint32(largest[other]) < kInfinityBits;
  const int exponent = exponent_for(uint32(largest[shard]));
  const float scale = power_of_two(exponent);
  uint16* piece = reinterpret_cast<uint16*>(payload + shard * piece_bytes);
  if (within == 0)
    *reinterpret_cast<uint64*>(piece) = finite ? 1u | uint32(exponent & 255) << 8 : 0u;
  if (2 * within >= piece_bytes - kHeaderBytes) return;
  ushort4 out = make_ushort4(0, 0, 0, 0);
  if (finite) {
    const float4 x = some(flat, shard * shard_numel + within, end);
    out = make_ushort4(narrow(x.x * scale), narrow(x.y * scale), narrow(x.z * scale),
                       narrow(x.w * scale));
  }
  *reinterpret_cast<ushort4*>(piece + kHeaderBytes / 2 + within) = out;
}

extern "C" __global__ void decode(const uint8* payloads, int64 row_bytes, float* out, float down,
                                  float factor, int64 numel, int64 shard_numel,
                                  int64 piece_bytes) {
  const int64 shard = blockIdx.y, within = own_quad(), at = shard * shard_numel + within;
  const int64 end = end_of(shard, shard_numel, numel);
  if (at >= end || within >= shard_numel) return;
  float sums[4];
  bool finite = true;
  for (int64 r = 0; r < WORLD; ++r) {
    const uint8* piece = payloads + r * row_bytes + shard * piece_bytes;
    finite &= piece[0] == 1;
    const float scale = power_of_two(-int(static_cast<signed char>(piece[1]))) * down;
    const ushort4 x = *reinterpret_cast<const ushort4*>(piece + kHeaderBytes + 2 * within);
    const float values[4] = {widen(x.x) * scale, widen(x.y) * scale, widen(x.z) * scale,
                             widen(x.w) * scale};
    for (int i = 0; i < 4; ++i) sums[i] = r ? sums[i] + values[i] : values[i];
  }
  for (int i = 0; i < 4; ++i) sums[i] = finite ? clamped(sums[i] * factor) : not_a_number();
  if (at + 4 <= end && aligned(out + at, 16))
    *reinterpret_cast<float4*>(out + at) = make_float4(sums[0], sums[1], sums[2], sums[3]);
  else
    for (int i = 0; i < 4; ++i)
      if (at + i < end) out[at + i] = sums[i];
}
