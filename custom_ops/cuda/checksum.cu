// Sum of the 32-bit words of a piece; custom_ops/checksum.py says what it is for. Pieces are
// multiples of 8 bytes, so accesses are of 8. A grid is x pieces (there may be W^2) by y blocks of
// each.

// Subtracts from `sums[piece * stride]` all words but that at index 1; copies them, unless
// `copies` is null.
extern "C" __global__ void subtract(const uint2* words, uint2* copies, uint32* sums, int64 pairs,
                                    int64 stride) {
  const int64 first = int64(blockIdx.x) * pairs;
  const int64 threads = int64(gridDim.y) * blockDim.x;
  uint32 sum = 0;
  for (int64 at = int64(blockIdx.y) * blockDim.x + threadIdx.x; at < pairs; at += threads) {
    const uint2 x = words[first + at];
    sum += x.x + (at ? x.y : 0);
    if (copies && at) copies[first + at] = x;
    if (copies && !at) reinterpret_cast<uint32*>(copies + first)[0] = x.x;
  }
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(sums + blockIdx.x * stride, 0u - sum);
}
