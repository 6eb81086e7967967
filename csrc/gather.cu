// Rows of a stream by index, and the gradient: a warp a row of what is written, 16 bytes a lane where rows allow.
#include "common.cuh"

namespace mor {

constexpr int kWarps = 8;  // of a block

// rows[j] = x[indices[j]], zeros where there is none
template <class T, int N>
__global__ void __launch_bounds__(kWarps * kWarp) gather_kernel(
    const T* __restrict__ x, const int64_t* __restrict__ indices, T* __restrict__ rows, int64_t n, int64_t length,
    int64_t x_m, int64_t x_d, int width) {
  take_over();
  const int64_t j = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (j >= n) return;
  const int64_t index = indices[j];
  const bool there = index >= 0 && index < length;
  const T* source = x + index * x_m;
  T* target = rows + j * width;
  copy_row<T, N>(source, x_d, target, there, width);
}

// inverse[indices[j]] = j; what no index names stays as it was, see place()
__global__ void invert_kernel(const int64_t* __restrict__ indices, int* __restrict__ inverse, int64_t k, int64_t length,
                              int64_t batch) {
  let_next_begin();  // not launched early itself: what comes next may read what was there before this
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= batch * k) return;
  const int64_t index = indices[at];
  if (index >= 0 && index < length) inverse[at / k * length + index] = at % k;
}

void invert(Address indices, Address inverse, int64_t batch, int64_t k, int64_t length, Address stream) {
  if (batch * k == 0) return;
  launch(invert_kernel, ceil_div<int64_t>(batch * k, 256), 256, 0, false, stream, pointer<int64_t>(indices),
         pointer<int>(inverse), k, length, batch);
}

// d_x[m] = d_rows[j] where indices[j] = m, zeros where there is none
template <class T, int N>
__global__ void __launch_bounds__(kWarps * kWarp) gather_backward_kernel(
    const T* __restrict__ d_rows, const int64_t* __restrict__ indices, const int* __restrict__ inverse,
    T* __restrict__ d_x, int64_t n, int64_t length, int width) {
  take_over();
  const int64_t m = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (m >= length) return;
  const int64_t j = place(indices, inverse, m, n);
  copy_row<T, N>(d_rows + j * width, 1, d_x + m * width, j >= 0, width);
}

void gather(Address x, Address indices, Address rows, int64_t n, int64_t length, int64_t x_m, int64_t x_d, int width,
            int dtype, Address stream) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool wide = x_d == 1 && aligned<T>({x, rows}, {x_m, width});
    auto kernel = wide ? gather_kernel<T, kWide<T>> : gather_kernel<T, 1>;
    launch(kernel, ceil_div<int64_t>(n, kWarps), kWarps * kWarp, 0, true, stream, pointer<T>(x),
           pointer<int64_t>(indices), pointer<T>(rows), n, length, x_m, x_d, width);
  });
}

void gather_backward(Address d_rows, Address indices, Address inverse, Address d_x, int64_t n, int64_t length,
                     int width, int dtype, Address stream) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool wide = aligned<T>({d_rows, d_x}, {width});
    auto kernel = wide ? gather_backward_kernel<T, kWide<T>> : gather_backward_kernel<T, 1>;
    launch(kernel, ceil_div<int64_t>(length, kWarps), kWarps * kWarp, 0, true, stream, pointer<T>(d_rows),
           pointer<int64_t>(indices), pointer<int>(inverse), pointer<T>(d_x), n, length, width);
  });
}

}  // namespace mor
