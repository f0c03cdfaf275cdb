// Integers with a scale per group. custom_ops/quantise.py says what is computed,
// custom_ops/groups.py what the table says.
//
// A warp takes a group. A full group of 128, 256 or 512 lies in registers, in accesses of 16 bytes;
// any other is read twice, the second time from the cache, so a group may have any length.
//
// Constants: GROUP, BITS, OUT_BITS (of what is encoded), SYMMETRIC, ROTATE, STOCHASTIC, WORLD, STEP
// (as bits of a float), FLAT.

constexpr int64 kHadamard = 32;
constexpr float kSmallestScale = 0x1p-100f;
constexpr int64 kGroup = GROUP;
constexpr bool kMayKeep = kGroup % 128 == 0 && kGroup <= 512 && !ROTATE;
constexpr int kQuads = kMayKeep ? kGroup / 128 : 1;  // of elements, in a lane

__device__ constexpr float middle_of(int bits) { return float((1 << bits) / 2 - 1); }

struct Group {
  int64 start, length, piece, scale, zero, code;
};

// The group of this warp; length 0 if there is none.
__device__ inline Group find(const int64* table, int64 segments, int64 count, int bits) {
  const int64 number = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  int64 low = 0, high = segments;
  while (high - low > 1) {
    const int64 mid = (low + high) / 2;
    if (table[mid] <= number)
      low = mid;
    else
      high = mid;
  }
  const int64 within = number - table[low];
  const int64 left = table[2 * segments + low] - within * kGroup;
  const int64 bytes = (kGroup * bits + 7) / 8;
  return {table[segments + low] + within * kGroup,
          number >= count ? 0 : (left < kGroup ? left : kGroup),
          table[3 * segments + low],
          table[4 * segments + low] + 2 * within,
          table[5 * segments + low] + within,
          table[6 * segments + low] + within * bytes};
}

__device__ inline int lane() { return threadIdx.x % 32; }

// Walsh-Hadamard transform of the values of the lanes, in the order of the reference's additions.
__device__ inline float transform(float x) {
  const int pair = 2 * (lane() % 16);
  for (int stage = 0; stage < 5; ++stage) {
    const float even = __shfl_sync(kAllLanes, x, pair), odd = __shfl_sync(kAllLanes, x, pair + 1);
    x = lane() < 16 ? even + odd : even - odd;
  }
  return x;
}

// Integers in the order of the floats that these bits are.
__device__ inline int ordered(uint32 bits) {
  return int(bits) ^ int(uint32(int(bits) >> 31) & kMagnitudeMask);
}

struct Range {  // of what a lane has seen, zero included
  int largest = 0, negated_smallest = 0;

  __device__ void see(float x) {
    const int value = SYMMETRIC ? int(bits_of(x) & kMagnitudeMask) : ordered(bits_of(x));
    largest = value > largest ? value : largest;
    if (!SYMMETRIC) negated_smallest = ~value > negated_smallest ? ~value : negated_smallest;
  }
};

struct Grid {
  float scale, inverse, zero;
  bool finite;
};

__device__ inline Grid grid_of(Range range) {
  const int largest = warp_max(range.largest);
  const float high = float_of(uint32(largest));
  float low = -high;
  bool finite = uint32(largest) < kInfinityBits;
  if (!SYMMETRIC) {
    const int smallest = ~warp_max(range.negated_smallest);
    low = smallest < 0 ? float_of(uint32(smallest) ^ kMagnitudeMask) : 0.0f;
    finite = finite && smallest > ordered(kInfinityBits | ~kMagnitudeMask);
  }
  const float step = float_of(STEP);
  float exact = high * step - low * step;
  exact = exact < kSmallestScale ? kSmallestScale : exact;
  const float scale = float_of((bits_of(exact) + 0xffffu) & 0xffff0000u);
  const float inverse = 1.0f / scale;
  return {scale, inverse, SYMMETRIC ? middle_of(OUT_BITS) : ceilf(-low * inverse), finite};
}

__device__ inline uint32 mixed(uint32 x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// custom_ops.noise.key_of
__device__ inline uint32 key_of(int64 seed) {
  uint64 high = (uint64(seed) >> 32) + 1;  // 33 bits, perhaps
  high = (high ^ high >> 16) * 0x85ebca6bu & 0xffffffffu;
  high = (high ^ high >> 13) * 0xc2b2ae35u & 0xffffffffu;
  return mixed(uint32(seed) ^ uint32(high ^ high >> 16));
}

__device__ inline float rounded(float scaled, int64 position, uint32 key) {
  if (!STOCHASTIC) return rintf(scaled);
  const float below = floorf(scaled);
  const float random = float(mixed(uint32(position) ^ key) >> 8) * 0x1p-24f;
  return below + (random < scaled - below ? 1.0f : 0.0f);
}

__device__ inline uint32 packed(float a, float b, float c, float d) {
  return uint32(a) | uint32(b) << 8 | uint32(c) << 16 | uint32(d) << 24;
}

// Four codes as four bytes of a group: element 4 lane of each 128. Of int4, once all are known.
__device__ inline void store_codes(const uint32 (&codes)[kQuads], uint8* at) {
  uint32* words = reinterpret_cast<uint32*>(at);
  if (OUT_BITS == 8) {
    for (int q = 0; q < kQuads; ++q) words[32 * q + lane()] = codes[q];
  } else if (kQuads == 1) {
    const uint32 high = __shfl_down_sync(kAllLanes, codes[0], 16);
    if (lane() < 16) words[lane()] = codes[0] | high << 4;
  } else {
    for (int q = 0; q < kQuads / 2; ++q)
      words[32 * q + lane()] = codes[q] | codes[q + kQuads / 2] << 4;
  }
}

__device__ inline void store_grid(const Group& group, const Grid& grid, uint8* payload) {
  if (lane()) return;
  *reinterpret_cast<uint16*>(payload + group.scale) = uint16(bits_of(grid.scale) >> 16);
  if (!SYMMETRIC) payload[group.zero] = uint8(grid.zero);
}

// Encodes a group whose values are `value(i)`, zero beyond its end, asked for by all lanes; or
// `quad(i)`: four of them, for full groups that `keep` allows. `group` says where in the payload; `lost`, unless it is null, where the group's
// losses begin.
template <class Value, class Quad>
__device__ inline void encode(const Value& value, const Quad& quad, bool keep, const Group& group,
                              uint32 key, uint8* payload, float* lost, int* bad) {
  keep = kMayKeep && keep && group.length == kGroup && aligned(payload + group.code, 4) &&
         (!lost || aligned(lost, 16));
  Range range;
  if (keep) {
    float4 kept[kQuads];
    for (int q = 0; q < kQuads; ++q) {
      kept[q] = quad(128 * q + 4 * lane());
      range.see(kept[q].x);
      range.see(kept[q].y);
      range.see(kept[q].z);
      range.see(kept[q].w);
    }
    const Grid grid = grid_of(range);
    uint32 codes[kQuads];
    for (int q = 0; q < kQuads; ++q) {
      const int64 first = 128 * q + 4 * lane(), at = group.start + first;
      const float a = rounded(kept[q].x * grid.inverse, at, key);
      const float b = rounded(kept[q].y * grid.inverse, at + 1, key);
      const float c = rounded(kept[q].z * grid.inverse, at + 2, key);
      const float d = rounded(kept[q].w * grid.inverse, at + 3, key);
      codes[q] = packed(a + grid.zero, b + grid.zero, c + grid.zero, d + grid.zero);
      if (lost)
        *reinterpret_cast<float4*>(lost + first) = make_float4(
            kept[q].x - clamped(a * grid.scale), kept[q].y - clamped(b * grid.scale),
            kept[q].z - clamped(c * grid.scale), kept[q].w - clamped(d * grid.scale));
    }
    store_codes(codes, payload + group.code);
    store_grid(group, grid, payload);
    if (lane() == 0 && !grid.finite) *bad = 1;
    return;
  }
  const auto coded = [&](float x, int64 base) {
    return ROTATE && base + kHadamard <= group.length ? transform(x * (1.0f / kHadamard)) : x;
  };
  for (int64 base = 0; base < group.length; base += 32)
    range.see(coded(value(base + lane()), base));
  const Grid grid = grid_of(range);
  const int64 half = OUT_BITS == 8 ? group.length : (group.length + 1) / 2;
  for (int64 base = 0; base < group.length; base += 32) {
    const int64 i = base + lane();
    const bool exists = i < group.length;
    const float x = value(i);
    const float point = rounded(coded(x, base) * grid.inverse, group.start + i, key);
    const uint8 code = uint8(point + grid.zero);
    // Of two elements that share a byte the first comes no later in this loop, or in this turn.
    if (exists && i < half) payload[group.code + i] = code;
    __syncwarp();
    if (exists && i >= half) payload[group.code + i - half] |= uint8(code << 4);
    float decoded = clamped(point * grid.scale);
    if (ROTATE) {
      float sum = point * (grid.scale * 0.5f);
      if (base + kHadamard <= group.length) sum = transform(sum);
      decoded = clamped(sum * 2.0f);
    }
    if (lost && exists) lost[i] = x - decoded;
  }
  if (group.length) store_grid(group, grid, payload);
  if (lane() == 0 && !grid.finite) *bad = 1;
}

struct Row {  // of a group in one payload
  const uint8* codes;
  float scale, zero;
};

__device__ inline Row row_of(const uint8* payload, const Group& group, float down) {
  const uint16 half = *reinterpret_cast<const uint16*>(payload + group.scale);
  return {payload + group.code, float_of(uint32(half) << 16) * down,
          SYMMETRIC ? middle_of(BITS) : float(payload[group.zero])};
}

// The mean of WORLD payloads at an element of a group, and at four of a full one.
struct Mean {
  const uint8* payloads;
  int64 row_bytes;
  Group group;
  float down, factor;

  // All lanes of a warp call this, `base` being the first lane's element.
  __device__ float at(int64 i, int64 base) const {
    float sum = 0;
    const bool exists = i < group.length;
    for (int64 r = 0; r < WORLD; ++r) {
      const Row row = row_of(payloads + r * row_bytes, group, down);
      uint32 code = 0;
      if (exists && BITS == 8) code = row.codes[i];
      if (exists && BITS == 4) {
        const int64 half = (group.length + 1) / 2;
        code = i < half ? row.codes[i] & 15 : row.codes[i - half] >> 4;
      }
      const float share = (float(code) - row.zero) * row.scale;
      sum = r ? sum + share : share;
    }
    if (ROTATE && base + kHadamard <= group.length) sum = transform(sum);
    return clamped(sum * factor);
  }

  __device__ float4 four(int64 i) const {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int64 r = 0; r < WORLD; ++r) {
      const Row row = row_of(payloads + r * row_bytes, group, down);
      const bool high = BITS == 4 && i >= kGroup / 2;
      uint32 codes = *reinterpret_cast<const uint32*>(row.codes + (high ? i - kGroup / 2 : i));
      if (BITS == 4) codes = codes >> (high ? 4 : 0) & 0x0f0f0f0fu;
      const float a = (float(codes & 255) - row.zero) * row.scale;
      const float b = (float(codes >> 8 & 255) - row.zero) * row.scale;
      const float c = (float(codes >> 16 & 255) - row.zero) * row.scale;
      const float d = (float(codes >> 24) - row.zero) * row.scale;
      sum = r ? make_float4(sum.x + a, sum.y + b, sum.z + c, sum.w + d) : make_float4(a, b, c, d);
    }
    return make_float4(clamped(sum.x * factor), clamped(sum.y * factor), clamped(sum.z * factor),
                       clamped(sum.w * factor));
  }

  __device__ bool keeps() const {
    return kMayKeep && group.length == kGroup && row_bytes % 4 == 0 &&
           aligned(payloads + group.code, 4);
  }
};

extern "C" __global__ void quantise(const Flat* flat, const float* residual, const int64* seed,
                                    uint8* payload, float* lost, int* bad, const int64* table,
                                    int64 segments, int64 count) {
  const Group group = find(table, segments, count, OUT_BITS);
  const Flat* values = flat + group.start;
  const float* olds = residual ? residual + group.start : nullptr;
  const bool keep = aligned(values, 4 * sizeof(Flat)) && (!olds || aligned(olds, 16));
  encode(
      [&](int64 i) {
        if (i >= group.length) return 0.0f;
        return olds ? widened(values[i]) + olds[i] : widened(values[i]);
      },
      [&](int64 i) {
        float4 x = load4(values + i);
        if (!olds) return x;
        const float4 old = *reinterpret_cast<const float4*>(olds + i);
        return make_float4(x.x + old.x, x.y + old.y, x.z + old.z, x.w + old.w);
      },
      keep, group, STOCHASTIC ? key_of(*seed) : 0, payload, olds ? lost + group.start : nullptr,
      bad);
}

extern "C" __global__ void dequantise(const uint8* payloads, int64 row_bytes, float* out,
                                      float down, float factor, const int64* table, int64 segments,
                                      int64 count) {
  const Group group = find(table, segments, count, BITS);
  if (!group.length) return;
  const Mean mean{payloads, row_bytes, group, down, factor};
  bool finite = true;
  for (int64 r = 0; r < WORLD; ++r) finite &= payloads[r * row_bytes + group.piece] == 1;
  float* to = out + group.start;
  const float nan = not_a_number();
  if (mean.keeps() && aligned(to, 16)) {
    for (int64 i = 4 * lane(); i < kGroup; i += 128) {
      const float4 x = mean.four(i);
      *reinterpret_cast<float4*>(to + i) = finite ? x : make_float4(nan, nan, nan, nan);
    }
    return;
  }
  for (int64 base = 0; base < group.length; base += 32) {
    const int64 i = base + lane();
    const float x = mean.at(i, base);
    if (i < group.length) to[i] = finite ? x : nan;
  }
}

// `first`: the shard's first element; the residuals begin there.
extern "C" __global__ void requantise(const uint8* pieces, int64 row_bytes, const float* residual,
                                      const int64* seed, uint8* out, float* lost, int* bad,
                                      int64 first, float down, float factor, const int64* table,
                                      const int64* out_table, int64 segments, int64 count) {
  const Mean mean{pieces, row_bytes, find(table, segments, count, BITS), down, factor};
  const Group group = find(out_table, segments, count, OUT_BITS);
  const float* olds = residual ? residual + group.start - first : nullptr;
  encode(
      [&](int64 i) {
        const float x = mean.at(i, i - lane());
        if (i >= group.length) return 0.0f;
        return olds ? x + olds[i] : x;
      },
      [&](int64 i) {
        const float4 x = mean.four(i);
        if (!olds) return x;
        const float4 old = *reinterpret_cast<const float4*>(olds + i);
        return make_float4(x.x + old.x, x.y + old.y, x.z + old.z, x.w + old.w);
      },
      mean.keeps() && (!olds || aligned(olds, 16)), group, STOCHASTIC ? key_of(*seed) : 0, out,
      olds ? lost + group.start - first : nullptr, bad);
}
