// What has no other name in C++: the tensor cores' instructions, copies into shared memory that go on beside the warp,
// hints to the L2 cache and to the compiler. Fragments are as the PTX manual has them for mma.m16n8k16; lane = 4g + t.
// tests/emulator has the same for a CPU.
#pragma once

#include "common.cuh"

namespace mor {

// The shared memory that a launch asks for.
template <class T>
__device__ __forceinline__ T* launched_memory() {
  extern __shared__ __align__(128) char memory[];
  return reinterpret_cast<T*>(memory);
}

// Keeps what is known from being worked out again and again.
__device__ __forceinline__ unsigned kept(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class T>
__device__ __forceinline__ const T* kept(const T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// 16 bytes.
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(__cvta_generic_to_global(from))
               : "memory");
}

// The same, or zeros, without a branch.
__device__ __forceinline__ void copy_async_or_clear(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void clear_shared(unsigned to) {
  asm volatile("st.shared.v4.u32 [%0], {0, 0, 0, 0};\n" ::"r"(to) : "memory");
}

__device__ __forceinline__ void load_shared(unsigned (&x)[4], unsigned from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Until no more than the last N groups of the thread's copies are under way.
template <int N>
__device__ __forceinline__ void await_groups() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices of 16 bits; lane 8 * i + j gives the address of row j of matrix i and gets, of each, the elements
// 2t and 2t + 1 of row g.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

// The same of column g.
__device__ __forceinline__ void load_transposed(unsigned (&x)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

// An 8 x 8 matrix of 16 bits, of which a lane has elements 2t and 2t + 1 of row g; then of column g.
__device__ __forceinline__ unsigned transposed(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// c (16 x 8) += a (16 x 16) b (16 x 8)
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x; 0 for -inf
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The e4m3 numbers in the low 16 bits as a pair in fp16, exactly.
__device__ __forceinline__ unsigned from_e4m3(unsigned pair) {
#if __CUDA_ARCH__ >= 890
  unsigned y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(y) : "h"(static_cast<unsigned short>(pair)));
  return y;
#else
  // the bits of fp16 numbers that are 2^-8 of them, smaller ones included; what would be 480 is NaN
  const unsigned wide = __byte_perm(pair, 0, 0x1404);
  const unsigned small = (wide & 0x80008000u) | (wide & 0x7f007f00u) >> 1;
  const __half2 value = __hmul2(reinterpret_cast<const __half2&>(small), __float2half2_rn(256.0f));
  return reinterpret_cast<const unsigned&>(value) | __heq2_mask(__habs2(value), __float2half2_rn(480.0f));
#endif
}

// Of each half, rounded once: the exact product of two bf16 numbers fits into fp32.
template <class T>
__device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
  const Pair y = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const unsigned&>(y);
}

// Has the line that is there brought into the L2 cache.
__device__ __forceinline__ void request_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(__cvta_generic_to_global(from)));
}

// The blocks of a cluster wait for one another in two steps: what a thread wrote before it arrived, others see after
// they have waited. A kernel that isn't launched in clusters is in one of its own, as every block is before Hopper.
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void await_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#else
  __syncthreads();
#endif
}

// The last thing that a kernel does whose blocks have read one another's shared memory. Nothing is handed over, and so
// nothing that was written has to arrive first.
__device__ __forceinline__ void end_together() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
#endif
}

// What block `rank` of the cluster has where this one has `own`, without a branch; zeros if there is no such block.

__device__ __forceinline__ float4 load_of_cluster4(unsigned own, int rank, bool there) {
  float4 x{};
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p;\n.reg .u32 at;\nsetp.ne.b32 p, %6, 0;\n@p mapa.shared::cluster.u32 at, %4, %5;\n"
               "@p ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at];}\n"
               : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w) : "r"(own), "r"(rank), "r"(int(there)) : "memory");
#else
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];}\n"
               : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w) : "r"(own), "r"(int(there)) : "memory");
#endif
  return x;
}

__device__ __forceinline__ float load_of_cluster(unsigned own, int rank, bool there) {
  float x = 0.0f;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p;\n.reg .u32 at;\nsetp.ne.b32 p, %3, 0;\n@p mapa.shared::cluster.u32 at, %1, %2;\n"
               "@p ld.shared::cluster.f32 %0, [at];}\n"
               : "+f"(x) : "r"(own), "r"(rank), "r"(int(there)) : "memory");
#else
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.shared.f32 %0, [%1];}\n"
               : "+f"(x) : "r"(own), "r"(int(there)) : "memory");
#endif
  return x;
}

// What becomes of a line of the L2 cache: most rows that are scored stay until they are copied, and nothing else does.
__device__ __forceinline__ unsigned long long to_stay() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 0.6;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ unsigned long long to_leave() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes, zeros where there are none
__device__ __forceinline__ int4 load(const int4* from, bool there, unsigned long long policy) {
  int4 bits{};
  if (there)
    asm volatile("ld.global.nc.L2::cache_hint.v4.s32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(from), "l"(policy));
  return bits;
}

__device__ __forceinline__ void store(int4* to, const int4& bits, unsigned long long policy) {
  asm volatile("st.global.L2::cache_hint.v4.s32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(bits.x), "r"(bits.y),
               "r"(bits.z), "r"(bits.w), "l"(policy) : "memory");
}

}  // namespace mor
