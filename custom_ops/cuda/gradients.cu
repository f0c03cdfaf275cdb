// Gradients times a factor, and their norm; custom_ops/gradients.py says what is computed.
//
// A block's sum of squares goes to a place of its own, so that sums have one order. Constants:
// FLAT, THREADS.

extern "C" __global__ void unscale(const Flat* flat, const float* factor, float* unscaled,
                                   double* sums, int* bad, int64 numel) {
  __shared__ double of_warps[THREADS / 32];
  const float by = *factor;
  const int64 threads = int64(gridDim.x) * THREADS;
  const int64 thread = int64(blockIdx.x) * THREADS + threadIdx.x;
  uint32 largest = 0;
  double sum = 0;
  const auto see = [&](float x) {
    const uint32 magnitude = bits_of(x) & kMagnitudeMask;
    largest = magnitude > largest ? magnitude : largest;
    sum += double(x) * double(x);
    return x;
  };
  const int64 quads = aligned(flat, 16) && aligned(unscaled, 16) ? numel / 4 : 0;
  for (int64 quad = thread; quad < quads; quad += threads) {
    const float4 x = load4(flat + 4 * quad);
    const float a = see(x.x * by), b = see(x.y * by), c = see(x.z * by), d = see(x.w * by);
    *reinterpret_cast<float4*>(unscaled + 4 * quad) = make_float4(a, b, c, d);
  }
  for (int64 at = 4 * quads + thread; at < numel; at += threads)
    unscaled[at] = see(widened(flat[at]) * by);
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  if (largest >= kInfinityBits) *bad = 1;
  __syncthreads();
  if (threadIdx.x) return;
  for (int warp = 1; warp < THREADS / 32; ++warp) sum += of_warps[warp];
  sums[blockIdx.x] = sum;
}
