// Gradients of routing. With position n of a sequence kept as slot j and candidate i (or neither),
//
//   s    = (d_logits[i] + d_gates[j] * alpha * G'(logits[i])) / temperature   gradient of x . w; 0 if no candidate
//   d_x  = d_rows[j] + s * w
//   d_w  = sum s * x                                                          over all positions of the batch
//
// One pass over the rows, in which some warps share a row and a thread keeps its columns of w and of the sum in
// registers. As many such groups as run at once take as many rows each, one after the other; a block adds its groups'
// sums up, a second kernel those of the blocks. So each sum has one order.
#include "common.cuh"

namespace mor {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 3;  // a multiprocessor
constexpr int kRows = 4;    // that a thread asks for at once

struct Params {
  const float *d_gates, *d_logits, *logits;
  const int64_t *candidates, *indices;
  const int *of_candidates, *of_indices;  // inverses
  const void *seqlens, *weight;
  float *partial, *d_ready;
  int64_t x_b, x_n, x_d;
  int batch, length, scored, k, width;
  int activation, seqlens_dtype, weight_dtype;
  float alpha, temperature;
};

// s of position n of sequence b; its slot or -1.
__device__ __forceinline__ float score_gradient(const Params& p, int64_t b, int n, bool writes, int64_t& slot) {
  const int64_t from = b * p.length, scores = b * p.scored;
  slot = place(p.indices + b * p.k, p.of_indices + from, n, p.k);
  bool real = p.candidates || n < p.scored;  // no candidates may mean that there are none
  if (p.seqlens) {
    const auto* narrow = static_cast<const int*>(p.seqlens);
    real &= n < (p.seqlens_dtype ? narrow[b] : static_cast<const int64_t*>(p.seqlens)[b]);
  }
  int64_t i = n;
  if (p.candidates) {
    i = real ? place(p.candidates + scores, p.of_candidates + from, n, p.scored) : -1;
    real = i >= 0;
  }
  float gradient = 0.0f;
  if (real) {
    gradient = p.d_logits[scores + i];
    if (slot >= 0) {
      const float value = activate(p.logits[scores + i], p.activation);
      float slope = 1.0f;
      if (p.activation == kSigmoid) slope = value * (1.0f - value);
      if (p.activation == kTanh) slope = 1.0f - value * value;
      if (value == value) gradient += p.d_gates[b * p.k + slot] * p.alpha * slope;
    }
    gradient /= p.temperature;
  }
  if (writes && p.d_ready && i >= 0) p.d_ready[scores + i] = gradient;
  return gradient;
}

// A block has groups of `lanes` threads, and its columns from blockIdx.y * lanes * N on.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kBlocks) route_backward_kernel(
    const T* __restrict__ d_rows, const T* __restrict__ x, T* __restrict__ d_x, int lanes, const Params p) {
  __shared__ float sums[kThreads * N];
  let_next_begin();
  await_previous();
  const int lane = threadIdx.x % kWarp;
  const int groups = blockDim.x / lanes, group = threadIdx.x / lanes, own = threadIdx.x % lanes * N;
  const int columns = lanes * N, d = blockIdx.y * columns + own;
  const bool inside = d < p.width;
  float w[N] = {}, sum[N] = {};
  const auto load_w = [&](auto* from) {
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = to_float(from[d + i]);
  };
  if (p.weight && inside) {
    if (p.weight_dtype == kF32) load_w(static_cast<const float*>(p.weight));
    if (p.weight_dtype == kBF16) load_w(static_cast<const bf16*>(p.weight));
    if (p.weight_dtype == kF16) load_w(static_cast<const fp16*>(p.weight));
  }
  const int64_t rows = int64_t(p.batch) * p.length, worker = int64_t(blockIdx.x) * groups + group;
  const int64_t workers = int64_t(gridDim.x) * groups, end = rows * (worker + 1) / workers;
  for (int64_t first = rows * worker / workers; first < end; first += kWarp) {
    // a lane looks up a row
    const int count = end - first < kWarp ? end - first : kWarp;
    int64_t from_x = 0, from_d_rows = -1;
    float own_gradient = 0.0f;
    if (lane < count) {
      const int64_t b = (first + lane) / p.length;
      const int n = first + lane - b * p.length;
      int64_t slot;
      own_gradient = score_gradient(p, b, n, blockIdx.y == 0 && own < kWarp * N, slot);
      from_x = b * p.x_b + n * p.x_n;
      if (slot >= 0) from_d_rows = (b * p.k + slot) * p.width;
    }
    for (int start = 0; start < count; start += kRows) {
      Held<T, N> value[kRows], row[kRows];
      float gradient[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        gradient[r] = __shfl_sync(kAll, own_gradient, start + r);
        const int64_t source = __shfl_sync(kAll, from_d_rows, start + r);
        const int64_t source_x = __shfl_sync(kAll, from_x, start + r);
        value[r] = row[r] = {};
        if (inside && source >= 0) value[r] = load_held<T, N>(d_rows + source, d, 1);
        if (inside && p.weight && gradient[r] != 0.0f) row[r] = load_held<T, N>(x + source_x, d, p.x_d);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float from[N], to[N];
        to_floats(row[r], from);
        to_floats(value[r], to);
        if (p.weight) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum[i] += gradient[r] * from[i];
            to[i] += gradient[r] * w[i];
          }
        }
        if (inside && start + r < count) {
          store_held<T, N>(d_x + (first + start + r) * p.width, d, 1, from_floats<T>(to));
        }
      }
    }
  }
  if (!p.weight) return;
#pragma unroll
  for (int i = 0; i < N; ++i) sums[group * columns + own + i] = sum[i];
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += blockDim.x) {
    float total = 0.0f;
    for (int g = 0; g < groups; ++g) total += sums[g * columns + column];
    const int at = blockIdx.y * columns + column;
    if (at < p.width) p.partial[int64_t(blockIdx.x) * p.width + at] = total;
  }
}

// A warp a row of partial sums, a lane a column.
template <class T>
__global__ void __launch_bounds__(kWarp * kWarp) sum_partials_kernel(const float* partial, T* d_weight, int blocks,
                                                                   int width) {
  __shared__ float sums[kWarp][kWarp + 1];
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t d = int64_t(blockIdx.x) * kWarp + lane;
  await_previous();
  float total = 0.0f;
  for (int first = warp; first < blocks; first += kUnroll * kWarp) {
    float part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int row = first + u * kWarp;
      part[u] = row < blocks && d < width ? partial[int64_t(row) * width + d] : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) total += part[u];
  }
  sums[warp][lane] = total;
  __syncthreads();
  total = warp_sum(sums[lane][warp]);
  const int64_t column = int64_t(blockIdx.x) * kWarp + warp;
  if (lane == 0 && column < width) d_weight[column] = from_float<T>(total);
}

}  // namespace

int route_backward_blocks(int64_t rows) {
  return std::min<int64_t>(int64_t(kBlocks) * device().multiprocessors, ceil_div<int64_t>(rows, kWarp));
}

void route_backward(Address d_rows, Address d_gates, Address d_logits, Address x, Address weight, Address logits,
                    Address candidates, Address of_candidates, Address seqlens, Address indices, Address of_indices,
                    Address d_x, Address d_weight, Address d_ready, Address partial, int blocks, int batch, int length,
                    int scored, int k, int width, int64_t x_b, int64_t x_n, int64_t x_d, int seqlens_dtype,
                    int activation, double alpha, double temperature, int dtype, int weight_dtype, Address stream) {
  Params p{};
  p.d_gates = pointer<float>(d_gates), p.d_logits = pointer<float>(d_logits), p.logits = pointer<float>(logits);
  p.candidates = pointer<int64_t>(candidates), p.indices = pointer<int64_t>(indices);
  p.of_candidates = pointer<int>(of_candidates), p.of_indices = pointer<int>(of_indices);
  p.seqlens = pointer<void>(seqlens), p.weight = pointer<void>(weight);
  p.partial = pointer<float>(partial), p.d_ready = pointer<float>(d_ready);
  p.x_b = x_b, p.x_n = x_n, p.x_d = x_d;
  p.batch = batch, p.length = length, p.scored = scored, p.k = k, p.width = width;
  p.activation = activation, p.seqlens_dtype = seqlens_dtype, p.weight_dtype = weight_dtype;
  p.alpha = alpha, p.temperature = temperature;
  if (blocks) {
    with_float(dtype, [&](auto t) {
      using T = decltype(t);
      const bool wide = x_d == 1 && aligned<T>({d_rows, x, d_x}, {x_b, x_n, width});
      const int threads = std::max(ceil_div(width, wide ? kWide<T> : 1), 1);  // for all columns
      const int parts = ceil_div(threads, kThreads), lanes = ceil_div(ceil_div(threads, parts), kWarp) * kWarp;
      launch(wide ? route_backward_kernel<T, kWide<T>> : route_backward_kernel<T, 1>, dim3(blocks, parts),
             kThreads / lanes * lanes, 0, true, stream, pointer<T>(d_rows), pointer<T>(x), pointer<T>(d_x), lanes, p);
    });
  }
  if (weight && width) {
    with_float(weight_dtype, [&](auto t) {
      using T = decltype(t);
      launch(sum_partials_kernel<T>, ceil_div(width, kWarp), kWarp * kWarp, 0, true, stream, pointer<float>(partial),
             pointer<T>(d_weight), blocks, width);
    });
  }
}

}  // namespace mor
