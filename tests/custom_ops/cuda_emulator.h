// CUDA on the CPU, as far as the kernels of custom_ops/cuda need it: blocks run one after another;
// a block's threads are coroutines that give way where CUDA's wait for each other.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct float4 {
  float x, y, z, w;
};
struct ushort4 {
  unsigned short x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z,
                            unsigned short w) {
  return {x, y, z, w};
}

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr size_t kStack = 64 * 1024;

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  int waits[2] = {0, 0};  // how often it has reached a barrier: of its warp, of its block
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline unsigned current;
inline uint64_t exchanged[2048];  // a value of each thread, for shuffles

inline void entry() {
  body();
  threads[current].done = true;
  swapcontext(&threads[current].context, &scheduler);
}

inline void yield() {
  const unsigned self = current;
  swapcontext(&threads[self].context, &scheduler);
}

// Until all threads [first, last) that still run are here as often as this one.
inline void wait(int kind, unsigned first, unsigned last) {
  const int turn = ++threads[current].waits[kind];
  for (;;) {
    bool all = true;
    for (unsigned t = first; t < last; ++t)
      all &= threads[t].done || threads[t].waits[kind] >= turn;
    if (all) return;
    yield();
  }
}

inline void wait_for_warp() {
  const unsigned first = current / 32 * 32;
  wait(0, first, std::min<unsigned>(first + 32, threads.size()));
}

template <class T>
T from_lane(T x, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(&exchanged[current], &x, sizeof x);
  wait_for_warp();
  T result;
  std::memcpy(&result, &exchanged[current / 32 * 32 + lane % 32], sizeof result);
  wait_for_warp();
  return result;
}

inline void run_block(unsigned count) {
  threads.resize(count);
  for (unsigned t = 0; t < count; ++t) {
    Thread& thread = threads[t];
    thread.done = false;
    thread.waits[0] = thread.waits[1] = 0;
    thread.stack.resize(kStack);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
  }
  for (unsigned left = count; left;) {
    left = 0;
    for (current = 0; current < count; ++current) {
      if (threads[current].done) continue;
      threadIdx.x = current;
      swapcontext(&scheduler, &threads[current].context);
      left += !threads[current].done;
    }
  }
}

template <class... Args>
void launch(void (*kernel)(Args...), unsigned x, unsigned y, unsigned count, void** pointers) {
  const auto call = [&]<size_t... I>(std::index_sequence<I...>) {
    kernel(*static_cast<Args*>(pointers[I])...);
  };
  body = [&] { call(std::index_sequence_for<Args...>{}); };
  blockDim.x = count;
  gridDim = {x, y, 1};
  for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block(count);
}
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned, T x, unsigned lane) {
  return emulator::from_lane(x, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, unsigned mask) {
  return emulator::from_lane(x, (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T x, unsigned step) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::from_lane(x, lane + step < 32 ? lane + step : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T x, unsigned step) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::from_lane(x, lane >= step ? lane - step : lane);
}
inline void __syncwarp() { emulator::wait_for_warp(); }
inline void __syncthreads() { emulator::wait(1, 0, emulator::threads.size()); }
template <class T>
T atomicAdd(T* at, T x) {
  const T before = *at;
  *at += x;
  return before;
}
inline unsigned atomicCAS(unsigned* at, unsigned wanted, unsigned x) {
  const unsigned before = *at;
  if (before == wanted) *at = x;
  return before;
}
inline int atomicMax(int* at, int x) {
  const int before = *at;
  *at = std::max(before, x);
  return before;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
