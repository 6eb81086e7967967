// Scatter-back and its gradients. With f the update of a kept row x, g its gate and dy the gradient of the new row y:
//
//             y                d_x           d_update  d_gates
//   kBlock    x + g * f        dy            g * dy    sum dy * f
//   kDelta    x + g * (f - x)  (1 - g) * dy  g * dy    sum dy * (f - x)
//   kPlain    g * f            0             g * dy    sum dy * f
//
// A warp a row, which asks for all of it (a part of a long one) before it uses any. What passes over the whole stream
// goes by position: its row is under way while its slot is looked up in the inverse of the indices. What touches kept
// rows alone goes by slot. An index outside the sequence counts as -1.
#include "common.cuh"

namespace mor {
namespace {

constexpr int kWarps = 4;  // of a block: few, since it makes place for another when its last row is done
constexpr int kThreads = kWarps * kWarp;
// of a multiprocessor; the code for an A100 would spill with 8
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 7;
#else
constexpr int kBlocks = 8;
#endif
constexpr int kUnroll = 4;  // packs of a row that a lane asks for at once: all, up to a width of 1024 in bf16

struct Strides {
  int64_t b, n, d;
};

// elements that travel together in rows of both dtypes
template <class T, class F>
constexpr int kTogether = kWide<T> < kWide<F> ? kWide<T> : kWide<F>;

// What a lane has of a row from column `first` on; zeros past the end of the row.
template <class T, int N>
using Part = Held<T, N>[kUnroll];

template <class T, int N>
__device__ __forceinline__ void load_part(Part<T, N>& part, const T* row, int64_t stride, int first, int width) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int d = first + (u * kWarp + int(threadIdx.x) % kWarp) * N;
    part[u] = {};
    if (d < width) part[u] = load_held<T, N>(row, d, stride);
  }
}

template <class T, int N>
__device__ __forceinline__ void store_part(const Part<T, N>& part, T* row, int64_t stride, int first, int width) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int d = first + (u * kWarp + int(threadIdx.x) % kWarp) * N;
    if (d < width) store_held<T, N>(row, d, stride, part[u]);
  }
}

// out[n] = the new row where n has a slot, else x[n]. Without an inverse it goes by slot, and rows without one stay as
// they are; out may then be x.
template <class T, class F, int N>
__global__ void __launch_bounds__(kThreads, kBlocks) scatter_back_kernel(
    const T* x, const F* update, const int64_t* indices, const int* inverse, const float* gates, T* out, int length,
    int k, Strides of_x, Strides of_update, Strides of_out, int width, int residual) {
  const int rows = inverse ? length : k;
  const unsigned blocks = ceil_div(rows, kWarps);  // of a sequence
  const int64_t b = blockIdx.x / blocks;
  const int row = blockIdx.x % blocks * kWarps + threadIdx.x / kWarp;
  if (row >= rows) return;
  indices += b * k;
  int64_t n = row, j = row;
  bool kept = !inverse;
  float g = 1.0f;
  if (kept) {
    n = indices[j];
    if (gates) g = gates[b * k + j];
    if (n < 0 || n >= length) return;
  }
  x += b * of_x.b + n * of_x.n;
  out += b * of_out.b + n * of_out.n;
  int first = 0;
  do {
    Part<T, N> y = {};
    if (residual != kPlain) load_part<T, N>(y, x, of_x.d, first, width);
    if (inverse && first == 0) {
      await_previous();
      j = place(indices, inverse + b * length, n, k);
      kept = j >= 0;
      if (kept && gates) g = gates[b * k + j];
    }
    if (residual == kPlain && !kept) load_part<T, N>(y, x, of_x.d, first, width);
    if (kept) {
      Part<F, N> f;
      load_part<F, N>(f, update + b * of_update.b + j * of_update.n, of_update.d, first, width);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float old[N], change[N];
        to_floats(y[u], old);
        to_floats(f[u], change);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float added = fmaf(g, residual == kDelta ? change[i] - old[i] : change[i], old[i]);
          old[i] = residual == kPlain ? g * change[i] : added;
        }
        y[u] = from_floats<T>(old);
      }
    }
    store_part<T, N>(y, out, of_out.d, first, width);
    first += kUnroll * kWarp * N;
  } while (first < width);
}

// Zeros in d_update and d_gates where a slot has no position: a lane looks at a slot.
template <class F, int N>
__device__ __forceinline__ void zero_slots_of_none(const int64_t* indices, F* d_update, float* d_gates, int length,
                                                   int k, int width, int64_t b, int first) {
  const int lane = threadIdx.x % kWarp;
  const int64_t n = first + lane < k ? indices[b * k + first + lane] : 0;
  const bool none = first + lane < k && (n < 0 || n >= length);
  if (none && d_gates) d_gates[b * k + first + lane] = 0.0f;
  for (unsigned left = __ballot_sync(kAll, none); left; left &= left - 1) {
    F* row = d_update + (b * k + first + __ffs(left) - 1) * width;
    for (int d = lane * N; d < width; d += kWarp * N) store_held<F, N>(row, d, 1, {});
  }
}

// The gradients; of kBlock by slot and without d_x, which is d_out itself. Otherwise the first blocks write what
// belongs to slots of index -1, the others go by position.
template <class T, class F, int N>
__global__ void __launch_bounds__(kThreads, 6) scatter_back_backward_kernel(
    const T* d_out, const T* x, const F* update, const int64_t* indices, const int* inverse, const float* gates, T* d_x,
    F* d_update, float* d_gates, int batch, int length, int k, Strides of_d_out, Strides of_x,
    Strides of_update, int width, int residual) {
  const int warp = threadIdx.x / kWarp;
  const bool by_slot = residual == kBlock;
  unsigned block = blockIdx.x;
  if (!by_slot) {
    const unsigned blocks = ceil_div(k, kThreads), before = batch * blocks;
    if (block < before) {
      await_previous();
      const int first = block % blocks * kThreads + warp * kWarp;
      zero_slots_of_none<F, N>(indices, d_update, d_gates, length, k, width, block / blocks, first);
      return;
    }
    block -= before;
  }
  const int rows = by_slot ? k : length;
  const unsigned blocks = ceil_div(rows, kWarps);
  const int64_t b = block / blocks;
  const int row = block % blocks * kWarps + warp;
  if (row >= rows) return;
  int64_t n = row, j = row;
  bool kept = false;
  float g = 1.0f;
  if (by_slot) {
    n = indices[b * k + j];
    if (gates) g = gates[b * k + j];
    kept = n >= 0 && n < length;
    if (!kept) n = 0, g = 0.0f;
  }
  d_out += b * of_d_out.b + n * of_d_out.n;
  float total = 0.0f;
  int first = 0;
  do {
    Part<T, N> dy = {};
    if (!by_slot || kept) load_part<T, N>(dy, d_out, of_d_out.d, first, width);
    if (!by_slot && first == 0) {
      await_previous();
      j = place(indices + b * k, inverse + b * length, n, k);
      kept = j >= 0;
      if (kept && gates) g = gates[b * k + j];
    }
    if (kept && gates) {
      Part<F, N> f;
      load_part<F, N>(f, update + b * of_update.b + j * of_update.n, of_update.d, first, width);
      Part<T, N> old = {};
      if (residual == kDelta) load_part<T, N>(old, x + b * of_x.b + n * of_x.n, of_x.d, first, width);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float value[N], change[N], less[N];
        to_floats(dy[u], value);
        to_floats(f[u], change);
        to_floats(old[u], less);
#pragma unroll
        for (int i = 0; i < N; ++i) total += value[i] * (change[i] - less[i]);
      }
    }
    if (kept || by_slot) {
      Part<F, N> d_f;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float value[N], scaled[N];
        to_floats(dy[u], value);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          scaled[i] = g * value[i];
          value[i] = residual == kDelta ? (1.0f - g) * value[i] : 0.0f;
        }
        d_f[u] = from_floats<F>(scaled);
        dy[u] = from_floats<T>(value);
      }
      store_part<F, N>(d_f, d_update + (b * k + j) * width, 1, first, width);
    }
    if (!by_slot) store_part<T, N>(dy, d_x + (b * length + n) * width, 1, first, width);
    first += kUnroll * kWarp * N;
  } while (first < width);
  if (gates && (kept || by_slot)) {
    total = warp_sum(total);
    if (threadIdx.x % kWarp == 0) d_gates[b * k + j] = total;
  }
}

}  // namespace

void scatter_back(Address x, Address update, Address indices, Address inverse, Address gates, Address out,
                  int batch, int length, int k, int64_t x_b, int64_t x_n, int64_t x_d, int64_t f_b, int64_t f_k,
                  int64_t f_d, int width, int residual, int dtype, int update_dtype, Address stream) {
  const Strides of_x{x_b, x_n, x_d}, of_update{f_b, f_k, f_d};
  const Strides of_out = inverse ? Strides{int64_t(length) * width, width, 1} : of_x;
  const int64_t blocks = int64_t(batch) * ceil_div(inverse ? length : k, kWarps);
  with_float(dtype, [&](auto t) {
    with_float(update_dtype, [&](auto f) {
      using T = decltype(t);
      using F = decltype(f);
      const bool wide = x_d == 1 && f_d == 1 && aligned<T>({x, out}, {x_b, x_n, width}) &&
                        aligned<F>({update}, {f_b, f_k});
      auto kernel = wide ? scatter_back_kernel<T, F, kTogether<T, F>> : scatter_back_kernel<T, F, 1>;
      // with slots, what comes before is the inversion, which has nothing to do with x
      launch(kernel, blocks, kThreads, 0, inverse && k, stream, pointer<T>(x), pointer<F>(update),
             pointer<int64_t>(indices), pointer<int>(inverse), pointer<float>(gates), pointer<T>(out), length, k, of_x,
             of_update, of_out, width, residual);
    });
  });
}

void scatter_back_backward(Address d_out, Address x, Address update, Address indices, Address inverse, Address gates,
                           Address d_x, Address d_update, Address d_gates, int batch, int length, int k, int64_t y_b,
                           int64_t y_n, int64_t y_d, int64_t x_b, int64_t x_n, int64_t x_d, int64_t f_b, int64_t f_k,
                           int64_t f_d, int width, int residual, int dtype, int update_dtype, Address stream) {
  const Strides of_d_out{y_b, y_n, y_d}, of_x{x_b, x_n, x_d}, of_update{f_b, f_k, f_d};
  const bool by_slot = residual == kBlock;
  const int64_t blocks = int64_t(batch) * (by_slot ? ceil_div(k, kWarps)
                                          : ceil_div(k, kThreads) + ceil_div(length, kWarps));
  with_float(dtype, [&](auto t) {
    with_float(update_dtype, [&](auto f) {
      using T = decltype(t);
      using F = decltype(f);
      const bool wide = y_d == 1 && (!x || x_d == 1) && (!update || f_d == 1) &&
                        aligned<T>({d_out, x, d_x}, {y_b, y_n, x_b, x_n, width}) &&
                        aligned<F>({update, d_update}, {f_b, f_k, width});
      auto kernel = wide ? scatter_back_backward_kernel<T, F, kTogether<T, F>> : scatter_back_backward_kernel<T, F, 1>;
      launch(kernel, blocks, kThreads, 0, !by_slot && k, stream, pointer<T>(d_out), pointer<T>(x), pointer<F>(update),
             pointer<int64_t>(indices), pointer<int>(inverse), pointer<float>(gates), pointer<T>(d_x),
             pointer<F>(d_update), pointer<float>(d_gates), batch, length, k, of_d_out, of_x, of_update, width,
             residual);
    });
  });
}

}  // namespace mor
