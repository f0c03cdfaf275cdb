// An element that is damaged; custom_ops/faults.py says how. Constant: SIZE, bytes of an element.

#if SIZE == 1
using Bits = signed char;
#elif SIZE == 2
using Bits = short;
#elif SIZE == 4
using Bits = int;
#else
using Bits = int64;
#endif

// Copies 16 bytes a thread and damages one element of the copy, if it lies there. The arrays have
// `bytes` bytes, whole elements.
extern "C" __global__ void strike(const uint8* x, uint8* struck, const int64* row,
                                  const int64* index, int64* news, int64 site, int64 bytes) {
  const int64 first = 16 * (int64(blockIdx.x) * blockDim.x + threadIdx.x);
  if (first >= bytes) return;
  const int64 end = first + 16 < bytes ? first + 16 : bytes;
  if (end - first == 16 && aligned(x, 16) && aligned(struck, 16))
    *reinterpret_cast<uint4*>(struck + first) = *reinterpret_cast<const uint4*>(x + first);
  else
    for (int64 at = first; at < end; ++at) struck[at] = x[at];
  const int64 hit = *index * SIZE;
  if (row[0] != site || hit < first || hit >= end) return;
  const Bits before = *reinterpret_cast<const Bits*>(x + hit);
  const Bits after = Bits((before & Bits(row[2])) ^ Bits(row[3]));
  *reinterpret_cast<Bits*>(struck + hit) = after;
  news[0] = 1;
  news[1] = *index;
  news[2] = before;
  news[3] = after;
}
