#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <random>
#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __align__
#define __align__(n) alignas(n)
namespace emu {
struct Copy { unsigned to; const void* from; bool there; };
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; dim3 tid; std::vector<std::vector<Copy>> groups; std::vector<Copy> open; };
extern char shared_[1 << 18];
extern std::vector<Fiber> fibers;
extern ucontext_t main_context;
extern int current, threads;
extern long progress;
extern bool eager;
struct Barrier { int count = 0; long generation = 0; };
extern Barrier warp_barriers[32], block_barrier;
extern char exchange[32][32][64];
extern int kind[32][32];
inline void yield() { swapcontext(&fibers[current].context, &main_context); }
inline void arrive(Barrier& b, int n) {
  long g = b.generation;
  if (++b.count == n) { b.count = 0; ++b.generation; ++progress; return; }
  while (b.generation == g) yield();
}
inline void warp_sync() { arrive(warp_barriers[current / 32], 32); }
inline void block_sync_() { arrive(block_barrier, threads); }
// collective: publish my bytes, then f(read)
template <class T, class F> auto collective(int what, const T& x, F f) {
  int w = current / 32, l = current % 32;
  static_assert(sizeof(T) <= 64);
  memcpy(exchange[w][l], &x, sizeof(T)); kind[w][l] = what;
  warp_sync();
  for (int i = 0; i < 32; ++i) if (kind[w][i] != what) { fprintf(stderr, "lanes diverged: %d %d\n", what, kind[w][i]); abort(); }
  auto r = f([&](int i) { T y; memcpy(&y, exchange[w][i], sizeof(T)); return y; });
  warp_sync();
  return r;
}
void run_grid(int grid, int threads, int shared, std::function<void()> body);
}
struct Tid { operator dim3() const; };
#define threadIdx (emu::fibers[emu::current].tid)
extern dim3 blockIdx, gridDim, blockDim;
template <class T> T __shfl_sync(unsigned, T x, int lane) { return emu::collective(1, x, [&](auto get) { return get(lane & 31); }); }
template <class T> T __shfl_xor_sync(unsigned, T x, int m) { int l = emu::current % 32; return emu::collective(2, x, [&](auto get) { return get(l ^ m); }); }
template <class T> T __shfl_up_sync(unsigned, T x, int m) { int l = emu::current % 32; return emu::collective(3, x, [&](auto get) { return get(l >= m ? l - m : l); }); }
inline int __any_sync(unsigned, bool x) { return emu::collective(4, x, [&](auto get) { bool a = false; for (int i = 0; i < 32; ++i) a |= get(i); return int(a); }); }
inline int __reduce_max_sync(unsigned, int x) { return emu::collective(5, x, [&](auto get) { int a = get(0); for (int i = 1; i < 32; ++i) a = std::max(a, get(i)); return a; }); }
inline void __syncwarp() { emu::warp_sync(); }
inline void __syncthreads() { emu::block_sync_(); }
inline void __threadfence() {}
inline int atomicAdd(int* p, int x) { int y = *p; *p += x; return y; }
inline unsigned atomicInc(unsigned* p, unsigned most) { unsigned y = *p; *p = y >= most ? 0 : y + 1; return y; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T x) { *p = x; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __fdiv_rn(float a, float b) { return a / b; }
using std::min; using std::max;
inline int64_t max(int64_t a, int b) { return std::max(a, int64_t(b)); }
