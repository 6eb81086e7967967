// What the kernels share. They load any dtype and compute in fp32; offsets are 64-bit before they are multiplied by a
// stride. A launcher takes device addresses, sizes and strides in elements, and the stream; no torch header is
// included, so that one build serves every version of it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "launch.h"

namespace mor {

using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;  // lanes

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_of(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Quotients of what is below 2^31, without a division.
struct Divisor {
  int divisor = 1;
  unsigned magic = 0, shift = 0;

  explicit Divisor(int d) : divisor(d) {
    if (d == 1) return;
    int bits = 1;
    while ((int64_t(1) << bits) < d) ++bits;
    magic = unsigned(((uint64_t(1) << (31 + bits)) + d - 1) / d);
    shift = bits - 1;
  }

  __device__ __forceinline__ int operator()(int n) const { return divisor == 1 ? n : __umulhi(n, magic) >> shift; }
  __device__ __forceinline__ int64_t operator()(int64_t n) const {  // of anything that isn't negative
    return n >> 31 ? n / divisor : (*this)(int(n));
  }
};

// f(T{}) for the T that a dtype's code stands for
template <class F>
void with_float(int dtype, F f) {
  switch (dtype) {
    case kF32: return f(float{});
    case kBF16: return f(bf16{});
    case kF16: return f(fp16{});
    default: throw std::invalid_argument("dtype: expected float32, bfloat16 or float16");
  }
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) { return __float2half_rn(x); }

__device__ __forceinline__ float load_any(const void* from, int dtype, int64_t i) {
  if (dtype == kF32) return static_cast<const float*>(from)[i];
  return dtype == kBF16 ? to_float(static_cast<const bf16*>(from)[i]) : to_float(static_cast<const fp16*>(from)[i]);
}

// N elements that travel together, 16 bytes at the most; a pointer to one is a multiple of its size.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// elements of T in 16 bytes
template <class T>
constexpr int kWide = 16 / sizeof(T);

// N elements that are kept in registers, as 32-bit words: elements of 16 bits would take a register each.
template <class T, int N>
struct Held {
  unsigned words[sizeof(T) * N / 4];
};
template <class T>
struct Held<T, 1> {
  T at;
};

// A row's elements from d on, 16 or 8 bytes of them or one. A streaming load (__ldcs) takes 4 % longer.
template <class T, int N>
__device__ __forceinline__ Held<T, N> load_held(const T* row, int d, int64_t stride) {
  Held<T, N> held;
  if constexpr (N == 1) {
    held.at = row[d * stride];
  } else if constexpr (sizeof(T) * N == 16) {
    const uint4 bits = *reinterpret_cast<const uint4*>(row + d);
    held.words[0] = bits.x, held.words[1] = bits.y, held.words[2] = bits.z, held.words[3] = bits.w;
  } else {
    const uint2 bits = *reinterpret_cast<const uint2*>(row + d);
    held.words[0] = bits.x, held.words[1] = bits.y;
  }
  return held;
}

template <class T, int N>
__device__ __forceinline__ void store_held(T* row, int d, int64_t stride, const Held<T, N>& held) {
  if constexpr (N == 1) {
    row[d * stride] = held.at;
  } else if constexpr (sizeof(T) * N == 16) {
    const uint4 bits{held.words[0], held.words[1], held.words[2], held.words[3]};
    __stcs(reinterpret_cast<uint4*>(row + d), bits);
  } else {
    __stcs(reinterpret_cast<uint2*>(row + d), uint2{held.words[0], held.words[1]});
  }
}

template <class T, int N>
__device__ __forceinline__ void to_floats(const Held<T, N>& held, float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = to_float(held.at);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = __uint_as_float(held.words[i]);
      } else if constexpr (std::is_same_v<T, bf16>) {
        x[i] = __uint_as_float(i % 2 ? held.words[i / 2] & 0xffff0000u : held.words[i / 2] << 16);
      } else {
        x[i] = __half2float(__ushort_as_half(held.words[i / 2] >> (i % 2 * 16)));
      }
    }
  }
}

template <class T, int N>
__device__ __forceinline__ Held<T, N> from_floats(const float (&x)[N]) {
  Held<T, N> held;
  if constexpr (N == 1) {
    held.at = from_float<T>(x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4 / sizeof(T)) {
      unsigned& word = held.words[i * sizeof(T) / 4];
      if constexpr (sizeof(T) == 4) {
        word = __float_as_uint(x[i]);
      } else if constexpr (std::is_same_v<T, bf16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
        word = reinterpret_cast<const unsigned&>(pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[i], x[i + 1]);
        word = reinterpret_cast<const unsigned&>(pair);
      }
    }
  }
  return held;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// Infinities as the largest finite number; NaN stays.
__device__ __forceinline__ float bounded(float x, float largest = 3.402823466e38f) {
  x = x > largest ? largest : x;
  return x < -largest ? -largest : x;
}

// 1 / (1 + e^-x), tanh x, or x
__device__ __forceinline__ float activate(float x, int activation) {
  if (activation == kSigmoid) return 1.0f / (1.0f + expf(-x));
  return activation == kTanh ? tanhf(x) : x;
}

struct Device {
  int multiprocessors;
  bool early;     // a kernel can begin before the one before it is over
  bool clusters;  // of blocks that read each other's shared memory
};

// Of the current one.
const Device& device();

// With `early`, the kernel may begin once all blocks of the one before it have called let_next_begin() or ended; what
// that one writes can be read, and what it uses be written, after await_previous().
template <class... P, class... A>
void launch_clusters(void (*kernel)(P...), dim3 grid, int cluster, int threads, int shared, bool early, Address stream,
                     A... arguments) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream_of(stream);
  config.attrs = attributes;
  if (early && device().early) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, P(arguments)...), "launch");
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, int shared, bool early, Address stream, A... arguments) {
  launch_clusters(kernel, grid, 1, threads, shared, early, stream, arguments...);
}

__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The first thing that a kernel does which is launched early and has nothing to do before its inputs are there.
__device__ __forceinline__ void take_over() {
  let_next_begin();
  await_previous();
}

// Whether rows at these addresses and strides can be read and written 16 bytes at a time.
template <class T>
bool aligned(std::initializer_list<Address> addresses, std::initializer_list<int64_t> strides) {
  const auto even = [](auto number, int unit) { return number % unit == 0; };
  return std::all_of(addresses.begin(), addresses.end(), [&](Address a) { return even(a, 16); }) &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t s) { return even(s, kWide<T>); });
}

// A warp copies a row, N elements a lane, or writes zeros where there is none.
template <class T, int N>
__device__ __forceinline__ void copy_row(const T* source, int64_t stride, T* target, bool there, int width) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll 4
  for (int d = lane * N; d < width; d += kWarp * N) {
    Held<T, N> held{};
    if (there) held = load_held<T, N>(source, d, stride);
    store_held(target, d, 1, held);
  }
}

// Where `position` stands among the indices, given their inverse, of which what no index names is unwritten; or -1.
__device__ __forceinline__ int64_t place(const int64_t* indices, const int* inverse, int64_t position, int64_t k) {
  const int64_t j = inverse[position];
  return j >= 0 && j < k && indices[j] == position ? j : -1;
}

// Where `position` stands among `count` ascending positions that end in -1s; -1 if it doesn't.
template <class T>
__device__ int64_t find(const T* ascending, int64_t position, int64_t count) {
  int64_t low = 0, high = count;  // what is before low is smaller, what is from high on isn't
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    const T found = ascending[middle];
    if (found >= 0 && found < position) low = middle + 1; else high = middle;
  }
  return low < count && ascending[low] == position ? low : -1;
}

}  // namespace mor
