// CUDA C++ for a CPU, as far as csrc/ speaks it: g++ includes this before everything else. A block's threads are fibers,
// which take turns in an order that changes; where they meet (barriers, shuffles), each goes on once all have arrived,
// so that what is missing shows as a deadlock or a wrong result. Blocks run one after another, in the order of their
// numbers, but for those of a cluster, which run together, and of which only the shared memory that the launch asks for
// is a block's own. That memory begins as NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__

namespace emulator {

constexpr int kWarp = 32, kMostThreads = 2048, kMostBlocks = 8, kSharedBytes = 232448;  // of a cluster; of a block

struct Copy {
  unsigned to;
  const void* from;
};

struct Fiber {
  ucontext_t context;  // to begin with
  jmp_buf place;       // afterwards, without the system calls of a change of contexts
  std::vector<char> stack;
  bool begun, done;
  dim3 index, block;
  std::vector<std::vector<Copy>> groups;  // copies under way, which arrive as late as they may
  std::vector<Copy> open;
  void* seen_as = nullptr;  // by ThreadSanitizer
};

struct Barrier {
  int arrived = 0;
  long generation = 0;
  char order[2];  // where ThreadSanitizer keeps who comes before whom: every other time, as a thread may run ahead
};

extern std::vector<Fiber> fibers;
extern int current, threads, blocks;  // threads of a block, blocks of a cluster
extern char memory[kMostBlocks][kSharedBytes];
extern size_t shared_bytes;  // of it, as many as the launch asked for
extern Barrier of_warps[kMostThreads / kWarp], of_blocks[kMostBlocks], of_cluster;
extern bool any_of_block[kMostBlocks];

inline int rank() { return current / threads; }
inline char* shared() { return memory[rank()]; }

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

void arrive(Barrier& barrier, int count);
void run(dim3 grid, int cluster, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);

// What each lane of the warp publishes, read by f(get); all lanes have to make the same call.
template <class T, class F>
auto together(int call, const T& own, F f) {
  static char published[kMostThreads / kWarp][kWarp][64];
  static int calls[kMostThreads / kWarp][kWarp];
  static_assert(sizeof(T) <= 64);
  const int warp = current / kWarp, lane = current % kWarp;
  std::memcpy(published[warp][lane], &own, sizeof(T));
  calls[warp][lane] = call;
  arrive(of_warps[warp], kWarp);
  for (int other = 0; other < kWarp; ++other)
    if (calls[warp][other] != call) fail("lanes of a warp have diverged");
  const auto result = f([&](int other) {
    T x;
    std::memcpy(&x, published[warp][other % kWarp], sizeof(T));
    return x;
  });
  arrive(of_warps[warp], kWarp);
  return result;
}

template <class T, class F>
T folded(int call, T own, F f) {
  return together(call, own, [&](auto get) {
    T x = get(0);
    for (int lane = 1; lane < kWarp; ++lane) x = f(x, get(lane));
    return x;
  });
}

inline int lane() { return current % kWarp; }

}  // namespace emulator

#define threadIdx (emulator::fibers[emulator::current].index)
#define blockIdx (emulator::fibers[emulator::current].block)
extern dim3 gridDim, blockDim;

template <class T>
T __shfl_sync(unsigned, T x, int from) {
  return emulator::together(1, x, [&](auto get) { return get(from & 31); });
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::together(2, x, [&](auto get) { return get(emulator::lane() ^ mask); });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
  return emulator::together(3, x, [&](auto get) { return get(emulator::lane() - (emulator::lane() >= by ? by : 0)); });
}
inline unsigned __ballot_sync(unsigned, bool x) {
  return emulator::folded(4, unsigned(x) << emulator::lane(), [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned, bool x) {
  return emulator::folded(5, int(x), [](int a, int b) { return a | b; });
}
template <class T>
T __reduce_add_sync(unsigned, T x) {
  return emulator::folded(6, x, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_min_sync(unsigned, T x) {
  return emulator::folded(7, x, [](T a, T b) { return std::min(a, b); });
}
template <class T>
T __reduce_max_sync(unsigned, T x) {
  return emulator::folded(8, x, [](T a, T b) { return std::max(a, b); });
}
inline void __syncwarp() { emulator::arrive(emulator::of_warps[emulator::current / 32], 32); }
inline void __syncthreads() { emulator::arrive(emulator::of_blocks[emulator::rank()], emulator::threads); }
inline int __syncthreads_or(bool x) {
  bool* of_block = &emulator::any_of_block[emulator::rank()];
  if (x) __atomic_store_n(of_block, true, __ATOMIC_RELAXED);
  __syncthreads();
  const bool any = __atomic_load_n(of_block, __ATOMIC_RELAXED);
  __syncthreads();
  __atomic_store_n(of_block, false, __ATOMIC_RELAXED);
  __syncthreads();
  return any;
}
inline void __threadfence() {}

// Threads take turns: between the two halves no other comes in.
template <class T>
T exchanged(T* at, T x) {
  return __atomic_exchange_n(at, x, __ATOMIC_RELAXED);
}
template <class T>
T now_at(T* at) {
  return __atomic_load_n(at, __ATOMIC_RELAXED);
}
template <class T>
T atomicAdd(T* at, T x) { return exchanged(at, now_at(at) + x); }
inline int atomicMin(int* at, int x) { return exchanged(at, std::min(now_at(at), x)); }
template <class T>
T atomicMax(T* at, T x) { return exchanged(at, std::max(now_at(at), x)); }
inline unsigned atomicInc(unsigned* at, unsigned most) { return exchanged(at, now_at(at) >= most ? 0 : now_at(at) + 1); }

template <class T>
const T& aligned(const T* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T)) emulator::fail("an address isn't a multiple of its number's size");
  return *at;
}
template <class T>
T __ldg(const T* at) { return aligned(at); }
template <class T>
T __ldcg(const T* at) { return aligned(at); }
template <class T, class U>
void __stcg(T* at, const U& x) { const_cast<T&>(aligned(at)) = x; }
template <class T, class U>
void __stcs(T* at, const U& x) { const_cast<T&>(aligned(at)) = x; }

inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const uint64_t both = uint64_t(high) << 32 | low;
  unsigned x = 0;
  for (int i = 0; i < 4; ++i) x |= unsigned(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return x;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }

using std::isnan;
using std::signbit;
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

// Of the runtime, what csrc/ calls and takes a kernel.
#define cudaLaunchKernelEx emulated_launch
#define cudaFuncGetAttributes emulated_attributes
#define cudaFuncSetAttribute emulated_attribute

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A... arguments) {
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  emulator::run(config->gridDim, cluster, config->blockDim, config->dynamicSmemBytes, [=] { kernel(P(arguments)...); });
  return cudaSuccess;
}
template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(P...)) {
  return *attributes = {}, attributes->ptxVersion = 90, cudaSuccess;
}
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*)(P...), cudaFuncAttribute, int bytes) {
  return bytes > emulator::kSharedBytes ? cudaErrorInvalidValue : cudaSuccess;
}
