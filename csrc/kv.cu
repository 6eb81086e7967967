// Ragged paged keys and values: append, lookup and what their gradients need, each one pass over what is written. A
// thread writes a few elements that lie side by side. Caches of 8 bits hold e4m3 numbers; times the scale of the head
// they are the values.
#include <cuda_fp8.h>

#include "rotary.cuh"

namespace mor {
namespace {

constexpr int kThreads = 256, kAppendThreads = 128;
constexpr int kTokens = 4;     // of a block that looks up: one for each of its warps, of which there may be more
constexpr int kManyHeads = 4;  // of a thread that appends, if there are many tokens

// As PyTorch rounds: what is larger than 448 becomes 448, NaN stays.
__device__ __forceinline__ uint8_t to_e4m3(float x) {
  const uint8_t code = __nv_cvt_float_to_fp8(fminf(fmaxf(x, -448.0f), 448.0f), __NV_SATFINITE, __NV_E4M3);
  return isnan(x) ? (signbit(x) ? 0xff : 0x7f) : code;
}

__device__ __forceinline__ void store_any(void* to, int dtype, int64_t i, float x) {
  if (dtype == kF32) static_cast<float*>(to)[i] = x;
  else if (dtype == kBF16) static_cast<bf16*>(to)[i] = from_float<bf16>(x);
  else if (dtype == kF16) static_cast<fp16*>(to)[i] = from_float<fp16>(x);
  else static_cast<uint8_t*>(to)[i] = to_e4m3(x);
}

struct Source {
  const void* x;
  int64_t n, h, d;  // strides
};

struct Cache {
  void* x;
  const float* scales;
  int64_t page, slot, h, d;
};

struct Append {
  Source q, k, v;
  Cache k_cache, v_cache;
  void* out_q;
  const int64_t* slots;
  const void* positions;
  int64_t slots_there;
  Divisor page_size;
  Work<kAppendThreads> work;
  int q_heads, heads, width, positions_dtype, dtype, cache_dtype;
  double log2_step;
};

// Of some heads of a token N elements and the N that they turn with. Rows and caches of T, or of T and e4m3, if N > 1.
template <class T, bool kFp8, int N, int kHeads>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(const __grid_constant__ Append p) {
  __shared__ Frequencies frequencies;
  take_over();
  const Task task(p.work);
  const int half = (p.width + 1) / 2, q_shares = ceil_div(p.q_heads, kHeads), shares = ceil_div(p.heads, kHeads);
  const int share = task.share, i = task.piece * N;
  const int64_t token = task.token;
  const bool there = task.there;
  const bool is_q = share < q_shares, is_v = share >= q_shares + shares;
  const Source& source = is_q ? p.q : is_v ? p.v : p.k;
  const Cache& cache = is_v ? p.v_cache : p.k_cache;
  const int count = is_q ? p.q_heads : p.heads;
  const int first = (is_q ? share : is_v ? share - q_shares - shares : share - q_shares) * kHeads;
  const int64_t slot = is_q || !there ? 0 : p.slots[token];
  const bool turns = p.positions && !is_v && there;
  const int64_t position = turns ? load_position(p.positions, p.positions_dtype, token) : 0;
  const int64_t from = token * source.n + first * source.h;
  const bool pair = i + half < p.width;  // but for the middle of an odd width
  Held<T, N> low[kHeads], high[kHeads];
  if constexpr (N > 1) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (there && first + h < count) {
        const T* x = static_cast<const T*>(source.x) + from + h * source.h;
        low[h] = load_held<T, N>(x, i, 1), high[h] = load_held<T, N>(x, i + half, 1);
      }
  }
  if (p.positions) frequencies.fill(half, p.log2_step);  // while the loads are under way
  if (!there) return;
  float cos[N], sin[N];
  if (turns) angles(frequencies, p.log2_step, i, position, cos, sin);
  if (!is_q && (slot < 0 || slot >= p.slots_there)) return;
  const int64_t page = p.page_size(slot);
  const int64_t to = is_q ? (token * p.q_heads + first) * p.width
                          : page * cache.page + (slot - page * p.page_size.divisor) * cache.slot + first * cache.h;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h >= count) break;
    float a[N], b[N];
    if constexpr (N > 1) {
      to_floats<T>(low[h], a), to_floats<T>(high[h], b);
    } else {
      a[0] = load_any(source.x, p.dtype, from + h * source.h + i * source.d);
      b[0] = pair ? load_any(source.x, p.dtype, from + h * source.h + (i + half) * source.d) : 0.0f;
    }
    if (turns) turn_pairs(cos, sin, a, b);
    if (!is_q && cache.scales) {
      const float scale = cache.scales[first + h];
#pragma unroll
      for (int e = 0; e < N; ++e) a[e] = __fdiv_rn(a[e], scale), b[e] = __fdiv_rn(b[e], scale);
    }
    if constexpr (N == 1) {
      void* x = is_q ? p.out_q : cache.x;
      const int dtype = is_q ? p.dtype : p.cache_dtype;
      const int64_t at = to + h * (is_q ? int64_t(p.width) : cache.h), d = is_q ? 1 : cache.d;
      store_any(x, dtype, at + i * d, a[0]);
      if (pair) store_any(x, dtype, at + (i + half) * d, b[0]);
    } else if (kFp8 && !is_q) {
      Pack<uint8_t, N> codes, paired;
#pragma unroll
      for (int e = 0; e < N; ++e) codes.at[e] = to_e4m3(a[e]), paired.at[e] = to_e4m3(b[e]);
      uint8_t* x = static_cast<uint8_t*>(cache.x) + to + h * cache.h + i;
      *reinterpret_cast<Pack<uint8_t, N>*>(x) = codes;
      *reinterpret_cast<Pack<uint8_t, N>*>(x + half) = paired;
    } else {
      T* x = static_cast<T*>(is_q ? p.out_q : cache.x) + to + h * (is_q ? int64_t(p.width) : cache.h);
      store_held(x, i, 1, from_floats<T>(a));
      store_held(x, i + half, 1, from_floats<T>(b));
    }
  }
}

// out[m] = new[j] where slots[j] = m, old[m] elsewhere; zeros for new ones where there are none.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) merge_kernel(
    const void* k, const void* v, const T* k_old, const T* v_old, const int64_t* slots, const int* inverse, T* k_out,
    T* v_out, int64_t n, int64_t length, int width, int new_dtype) {
  take_over();
  const int pieces = width / N;
  const int64_t id = int64_t(blockIdx.x) * kThreads + threadIdx.x, m = id / pieces;
  if (m >= length) return;
  const int d = id % pieces * N;
  const int64_t j = place(slots, inverse, m, n), at = m * width;
  if (j < 0) {
    const auto k_row = load_held<T, N>(k_old + at, d, 1), v_row = load_held<T, N>(v_old + at, d, 1);
    store_held(k_out + at, d, 1, k_row);
    store_held(v_out + at, d, 1, v_row);
    return;
  }
  float k_new[N]{}, v_new[N]{};
#pragma unroll
  for (int e = 0; e < N; ++e)
    if (k) k_new[e] = load_any(k, new_dtype, j * width + d + e), v_new[e] = load_any(v, new_dtype, j * width + d + e);
  store_held(k_out + at, d, 1, from_floats<T>(k_new));
  store_held(v_out + at, d, 1, from_floats<T>(v_new));
}

struct Lookup {
  const void *k, *v;
  const int *page_table, *cu_seqlens;
  void *k_out, *v_out;
  int64_t total, rows, max_pages, pages, k_page, k_slot, v_page, v_slot;  // strides in units of U
  Divisor page_size, units;
};

// out[t] = cache[page, offset] of the t-th token of all rows, zeros past the last; U is what travels at once.
template <class U>
__global__ void __launch_bounds__(kThreads) lookup_kernel(const __grid_constant__ Lookup p) {
  __shared__ int64_t page_of[kTokens];  // -1 for none
  __shared__ int offset_of[kTokens];
  take_over();
  const int64_t first = int64_t(blockIdx.x) * kTokens;
  const int lane = threadIdx.x % kWarp, nth = threadIdx.x / kWarp;
  if (nth < kTokens) {
    const int64_t t = first + nth;
    // the last row that begins at most at t: a warp looks at 32 of them at once
    int64_t row = 0, stride = 1;
    while (stride * kWarp <= p.rows) stride *= kWarp;
    for (; stride; stride /= kWarp) {
      const int64_t probe = row + lane * stride;
      row += (__popc(__ballot_sync(kAll, probe <= p.rows && p.cu_seqlens[min(probe, p.rows)] <= t)) - 1) * stride;
    }
    int64_t page = -1;
    int offset = 0;
    if (t < p.total && row < p.rows) {
      const int index = int(t - p.cu_seqlens[row]), nth_page = p.page_size(index);
      if (nth_page < p.max_pages) page = p.page_table[row * p.max_pages + nth_page];
      offset = index - nth_page * p.page_size.divisor;
    }
    if (lane == 0) page_of[nth] = page < p.pages ? page : -1, offset_of[nth] = offset;
  }
  __syncthreads();
  const int units = p.units.divisor, here = int(min(int64_t(kTokens), p.total - first)) * units;
  const U *k = static_cast<const U*>(p.k), *v = static_cast<const U*>(p.v);
  U *k_out = static_cast<U*>(p.k_out) + first * units, *v_out = static_cast<U*>(p.v_out) + first * units;
#pragma unroll 4
  for (int at = threadIdx.x; at < here; at += blockDim.x) {
    const int token = p.units(at), unit = at - token * units;
    const int64_t page = page_of[token], offset = offset_of[token];
    U k_unit{}, v_unit{};
    if (page >= 0) {
      k_unit = k[page * p.k_page + offset * p.k_slot + unit];
      v_unit = v[page * p.v_page + offset * p.v_slot + unit];
    }
    __stcs(k_out + at, k_unit);
    __stcs(v_out + at, v_unit);
  }
}

// d_cache[page, offset]: the sum over the entries of the page table that name the page, in their order; those of page i
// are from first[i] on.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) lookup_backward_kernel(
    const T* d_k, const T* d_v, const int64_t* entries, const int64_t* first, const int* cu_seqlens, T* k_out, T* v_out,
    int64_t slots, int64_t max_pages, int page_size, int width) {
  take_over();
  const int pieces = width / N;
  const int64_t id = int64_t(blockIdx.x) * kThreads + threadIdx.x, slot = id / pieces;
  if (slot >= slots) return;
  const int d = id % pieces * N;
  const int64_t page = slot / page_size, offset = slot % page_size;
  float k_sum[N]{}, v_sum[N]{};
  for (int64_t at = first[page]; at < first[page + 1]; ++at) {
    const int64_t row = entries[at] / max_pages, index = entries[at] % max_pages * page_size + offset;
    const int64_t t = cu_seqlens[row] + index;
    if (t >= cu_seqlens[row + 1]) continue;
    float k[N], v[N];
    to_floats<T>(load_held<T, N>(d_k + t * width, d, 1), k);
    to_floats<T>(load_held<T, N>(d_v + t * width, d, 1), v);
#pragma unroll
    for (int e = 0; e < N; ++e) k_sum[e] += k[e], v_sum[e] += v[e];
  }
  store_held(k_out + slot * width, d, 1, from_floats<T>(k_sum));
  store_held(v_out + slot * width, d, 1, from_floats<T>(v_sum));
}

int64_t blocks_of(int64_t threads, int each) { return ceil_div<int64_t>(threads, each); }

}  // namespace

void kv_append(Address q, Address k, Address v, Address slots, Address positions, Address out_q, Address k_cache,
               Address v_cache, Address k_scale, Address v_scale, double theta, int64_t tokens, int64_t slots_there,
               int q_heads, int heads, int width, int page_size, std::array<int64_t, 9> from,
               std::array<int64_t, 8> to, int positions_dtype, int dtype, int cache_dtype, Address stream) {
  const int half = (width + 1) / 2;
  Append p{{pointer<void>(q), from[0], from[1], from[2]}, {pointer<void>(k), from[3], from[4], from[5]},
           {pointer<void>(v), from[6], from[7], from[8]},
           {pointer<void>(k_cache), pointer<float>(k_scale), to[0], to[1], to[2], to[3]},
           {pointer<void>(v_cache), pointer<float>(v_scale), to[4], to[5], to[6], to[7]},
           pointer<void>(out_q), pointer<int64_t>(slots), pointer<void>(positions), slots_there, Divisor(page_size),
           {tokens, 1, 1}, q_heads, heads, width, positions_dtype, dtype, cache_dtype, log2_step(theta, half)};
  const auto run = [&](auto kernel, int each, int of_thread) {
    p.work = {tokens, ceil_div(q_heads, of_thread) + 2 * ceil_div(heads, of_thread), half / each};
    launch(kernel, p.work.grid(), kAppendThreads, 0, true, stream, p);
  };
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool side_by_side = (!q || from[2] == 1) && from[5] == 1 && from[8] == 1 && to[3] == 1 && to[7] == 1;
    const bool wide = side_by_side && width % 2 == 0 && (cache_dtype == dtype || cache_dtype == kE4M3) &&
                      aligned<T>({q, k, v, out_q, k_cache, v_cache},
                                 {from[0], from[1], from[3], from[4], from[6], from[7], to[0], to[1], to[2], to[4],
                                  to[5], to[6], half});
    constexpr int kPack = kWide<T>;
    // angles are worked out for several heads at once, if that leaves enough threads
    const bool many = tokens * (q_heads + 2 * heads) * (half / kPack) > int64_t(device().multiprocessors) * 4096;
    const bool fp8 = cache_dtype == kE4M3;
    if (!wide) run(append_kernel<float, false, 1, 1>, 1, 1);
    else if (fp8) run(append_kernel<T, true, kPack, 1>, kPack, 1);
    else if (many) run(append_kernel<T, false, kPack, kManyHeads>, kPack, kManyHeads);
    else run(append_kernel<T, false, kPack, 1>, kPack, 1);
  });
}

void kv_merge(Address k, Address v, Address k_old, Address v_old, Address slots, Address inverse, Address k_out,
              Address v_out, int64_t n, int64_t length, int width, int new_dtype, int dtype, Address stream) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool wide = aligned<T>({k_old, v_old, k_out, v_out}, {width});
    auto kernel = wide ? merge_kernel<T, kWide<T>> : merge_kernel<T, 1>;
    launch(kernel, blocks_of(length * (wide ? width / kWide<T> : width), kThreads), kThreads, 0, true, stream,
           pointer<void>(k), pointer<void>(v), pointer<T>(k_old), pointer<T>(v_old), pointer<int64_t>(slots),
           pointer<int>(inverse), pointer<T>(k_out), pointer<T>(v_out), n, length, width, new_dtype);
  });
}

void kv_lookup(Address k, Address v, Address page_table, Address cu_seqlens, Address k_out, Address v_out, int64_t
               total, int64_t rows, int64_t max_pages, int64_t pages, int64_t k_page, int64_t k_slot, int64_t v_page,
               int64_t v_slot, int page_size, int width, int item_size, Address stream) {
  const auto run = [&](auto unit) {
    using U = decltype(unit);
    const auto units = [&](int64_t elements) { return elements * item_size / int64_t(sizeof(U)); };
    const Lookup p{pointer<void>(k), pointer<void>(v), pointer<int>(page_table), pointer<int>(cu_seqlens),
                   pointer<void>(k_out), pointer<void>(v_out), total, rows, max_pages, pages, units(k_page),
                   units(k_slot), units(v_page), units(v_slot), Divisor(page_size), Divisor(units(width))};
    const int threads = std::clamp(ceil_div(kTokens * p.units.divisor, kWarp), kTokens, kThreads / kWarp) * kWarp;
    launch(lookup_kernel<U>, blocks_of(total, kTokens), threads, 0, true, stream, p);
  };
  const bool wide = (k | v | k_out | v_out | (k_page | k_slot | v_page | v_slot | width) * item_size) % 16 == 0;
  if (wide) run(int4{});
  else if (item_size == 4) run(int{});
  else if (item_size == 2) run(short{});
  else run(static_cast<signed char>(0));
}

void kv_lookup_backward(Address d_k, Address d_v, Address entries, Address first, Address cu_seqlens, Address k_out,
                        Address v_out, int64_t slots, int64_t max_pages, int page_size, int width, int dtype,
                        Address stream) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool wide = aligned<T>({d_k, d_v, k_out, v_out}, {width});
    auto kernel = wide ? lookup_backward_kernel<T, kWide<T>> : lookup_backward_kernel<T, 1>;
    launch(kernel, blocks_of(slots * (wide ? width / kWide<T> : width), kThreads), kThreads, 0, true, stream,
           pointer<T>(d_k), pointer<T>(d_v), pointer<int64_t>(entries), pointer<int64_t>(first),
           pointer<int>(cu_seqlens), pointer<T>(k_out), pointer<T>(v_out), slots, max_pages, page_size, width);
  });
}

}  // namespace mor
