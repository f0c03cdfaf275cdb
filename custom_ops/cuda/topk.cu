// The largest elements of each chunk; custom_ops/topk.py says what is computed,
// custom_ops/triton/topk.py how, but that a histogram takes no longer for having more classes: one
// of the upper 11 bits of magnitudes while the chunk is read, and two of 10 bits of what may be sent.
//
// Constants: THREADS (of a block), WORLD, FLAT.

constexpr int64 kChunk = 65536;
constexpr int kBins = 2048;
constexpr int kWarps = THREADS / 32;

__device__ inline uint32 magnitude(float x) { return bits_of(x) & kMagnitudeMask; }

// The sum over all threads of a block up to and with this one, and over all.
struct Sums {
  int up_to_here, total;
};

__device__ inline Sums block_sums(int x, int* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += before;
  }
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? scratch[w] : 0;
    total += scratch[w];
  }
  __syncthreads();
  return {x + before, total};
}

// The class of the `rank`-th largest (from 1): result[0]; how many are in higher classes: result[1].
__device__ inline void class_of_rank(const int* counts, int bins, int rank, int* scratch,
                                     int* result) {
  const int each = (bins + THREADS - 1) / THREADS;
  const int end = bins - int(threadIdx.x) * each;  // threads go downwards, so sums do as well
  int own = 0;
  for (int bin = end - 1; bin >= end - each && bin >= 0; --bin) own += counts[bin];
  int above = block_sums(own, scratch).up_to_here - own;
  for (int bin = end - 1; bin >= end - each && bin >= 0; --bin) {
    if (above < rank && above + counts[bin] >= rank) {
      result[0] = bin;
      result[1] = above;
    }
    above += counts[bin];
  }
  __syncthreads();
}

__device__ inline void zero(int* counts, int bins) {
  for (int bin = threadIdx.x; bin < bins; bin += THREADS) counts[bin] = 0;
  __syncthreads();
}

// `found`: room for the offsets of a chunk's candidates, for each block. `offsets`: where the
// payload's offsets stand, in values of 16 bits.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    encode(const Flat* flat, const float* residual, float* kept, uint16* payload, uint16* found,
           int* bad, int64 numel, int64 quota, int64 last_quota, int64 offsets, int64 chunks) {
  __shared__ int counts[kBins];
  __shared__ int scratch[kWarps];
  __shared__ int result[2];
  found += blockIdx.x * kChunk;
  for (int64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64 start = chunk * kChunk;
    const int length = int(numel - start < kChunk ? numel - start : kChunk);
    const int room = int(chunk == chunks - 1 ? last_quota : quota);
    float* values = kept + start;
    zero(counts, kBins);

    bool failed = false;
    int nonzero = 0;
    const auto see = [&](float x) {
      failed |= magnitude(x) >= kInfinityBits;
      nonzero += magnitude(x) != 0;
      if (magnitude(x)) atomicAdd(&counts[magnitude(x) >> 20], 1);
    };
    // A chunk begins at a multiple of 65,536, so quads are aligned if arrays are.
    const int quads = aligned(flat, 16) && aligned(residual, 16) && aligned(kept, 16) ? length / 4 : 0;
    for (int quad = threadIdx.x; quad < quads; quad += THREADS) {
      float4 x = load4(flat + start + 4 * quad);
      const float4 old = *reinterpret_cast<const float4*>(residual + start + 4 * quad);
      x = make_float4(x.x + old.x, x.y + old.y, x.z + old.z, x.w + old.w);
      *reinterpret_cast<float4*>(values + 4 * quad) = x;
      see(x.x);
      see(x.y);
      see(x.z);
      see(x.w);
    }
    for (int i = 4 * quads + threadIdx.x; i < length; i += THREADS) {
      values[i] = widened(flat[start + i]) + residual[start + i];
      see(values[i]);
    }
    if (failed) *bad = 1;
    const int total = block_sums(nonzero, scratch).total;
    const int sent = total < room ? total : room;
    if (threadIdx.x < 2) result[threadIdx.x] = 0;
    __syncthreads();
    class_of_rank(counts, kBins, sent, scratch, result);
    const uint32 upper = result[0];
    int left = sent - result[1];

    int count = 0;
    for (int base = 0; base < length; base += 4 * THREADS) {
      uint32 taken = 0;
      for (int i = 0; i < 4; ++i) {
        const int at = base + 4 * int(threadIdx.x) + i;
        const uint32 m = at < length ? magnitude(values[at]) : 0;
        taken |= uint32(m && m >> 20 >= upper) << i;
      }
      const int own = __popc(taken);
      const Sums sums = block_sums(own, scratch);
      int number = count + sums.up_to_here - own;
      for (int i = 0; i < 4; ++i)
        if (taken >> i & 1) found[number++] = uint16(base + 4 * int(threadIdx.x) + i);
      count += sums.total;
    }
    zero(counts, 1024);

    for (int c = threadIdx.x; c < count; c += THREADS) {
      const uint32 m = magnitude(values[found[c]]);
      if (m >> 20 == upper) atomicAdd(&counts[m >> 10 & 1023], 1);
    }
    __syncthreads();
    class_of_rank(counts, 1024, left, scratch, result);
    const uint32 prefix = upper << 10 | uint32(result[0]);
    left -= result[1];
    zero(counts, 1024);
    for (int c = threadIdx.x; c < count; c += THREADS) {
      const uint32 m = magnitude(values[found[c]]);
      if (m >> 10 == prefix) atomicAdd(&counts[m & 1023], 1);
    }
    __syncthreads();
    class_of_rank(counts, 1024, left, scratch, result);
    const uint32 smallest = prefix << 10 | uint32(result[0]);
    left -= result[1];  // of those equal to the smallest that is sent
    __syncthreads();

    uint16* brains = payload + kHeaderBytes / 2 + chunk * quota;
    uint16* places = payload + offsets + chunk * quota;
    int entry = 0, equals = 0;
    for (int base = 0; base < count; base += THREADS) {
      const int c = base + int(threadIdx.x);
      const int offset = c < count ? found[c] : 0;
      const float x = c < count ? values[offset] : 0.0f;
      const bool equal = c < count && magnitude(x) == smallest;
      const Sums equal_sums = block_sums(equal, scratch);
      const bool taken = c < count && (magnitude(x) > smallest ||
                                       (equal && equals + equal_sums.up_to_here <= left));
      const Sums sums = block_sums(taken, scratch);
      if (taken) {
        const int number = entry + sums.up_to_here - 1;
        uint32 brain = to_brain(x);
        if ((brain & 0x7fffu) == 0x7f80u) --brain;  // never infinity
        brains[number] = uint16(brain);
        places[number] = uint16(offset);
        values[offset] = x - float_of(brain << 16);
      }
      equals += equal_sums.total;
      entry += sums.total;
    }
    for (int i = sent + threadIdx.x; i < room; i += THREADS) brains[i] = places[i] = 0;
    __syncthreads();
  }
}

// An atomic addition that keeps subnormals: `atomicAdd` of floats in global memory takes them for zero.
__device__ inline void add(float* at, float x) {
  uint32* word = reinterpret_cast<uint32*>(at);
  uint32 before = *word;
  while (true) {
    const uint32 seen = atomicCAS(word, before, bits_of(float_of(before) + x));
    if (seen == before) return;
    before = seen;
  }
}

// A row's entries are at different offsets (or zero, or damaged), so their order does not matter;
// rows follow one another.
extern "C" __global__ void decode(const uint8* payloads, int64 row_bytes, float* out, float share,
                                  int64 numel, int64 quota, int64 last_quota, int64 offsets,
                                  int64 chunks) {
  const int64 chunk = blockIdx.x, start = chunk * kChunk;
  const int length = int(numel - start < kChunk ? numel - start : kChunk);
  const int entries = int(chunk == chunks - 1 ? last_quota : quota);
  float* sums = out + start;
  bool finite = true;
  for (int64 r = 0; r < WORLD; ++r) finite &= payloads[r * row_bytes] == 1;
  const float x = finite ? 0.0f : not_a_number();
  const int quads = aligned(out, 16) ? length / 4 : 0;
  for (int quad = threadIdx.x; quad < quads; quad += blockDim.x)
    reinterpret_cast<float4*>(sums)[quad] = make_float4(x, x, x, x);
  for (int i = 4 * quads + threadIdx.x; i < length; i += blockDim.x) sums[i] = x;
  for (int64 r = 0; r < WORLD && finite; ++r) {
    __syncthreads();
    const uint16* row = reinterpret_cast<const uint16*>(payloads + r * row_bytes) + chunk * quota;
    for (int entry = threadIdx.x; entry < entries; entry += blockDim.x) {
      const uint16 offset = row[offsets + entry];
      const float part = float_of(uint32(row[kHeaderBytes / 2 + entry]) << 16) * share;
      // Offsets are within, unless the payload is damaged. A zero would change nothing.
      if (offset < length && part != 0) add(sums + offset, part);
    }
  }
}
