// Routing forward in one launch: logit = x . w / temperature, the k largest logits of a sequence, and their rows.
//
// The work on a sequence is a number of items, a block each: rows to score, the choice, and slots to copy. A sequence's
// rows are copied `lag` sequences after they were scored, while they are still in the L2 cache. Scores and kept
// candidates are handed on as words of memory that are kEmpty until they are written: who needs one reads it until it
// is there, so that they need neither fences nor counters, which would cost as much as the rows. Blocks start in the
// order of their numbers, so nothing ever waits for what no block works on.
//
// The threshold of a choice: a histogram of the keys between the smallest and the largest tells in which bin it is, and
// the keys of that bin, which are few, are ranked. Where they aren't, it is found two bits at a time, by counting how
// many keys reach each of three numbers. What is above it is kept, and of what is at it as many as are wanted, from the
// lowest position on. Keys of a sequence with too many of them to hold are worked out each time.
#include "instructions.cuh"

namespace mor {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kKeys = 16384;          // of a sequence, in shared memory
constexpr int kBlocks = 4;            // of a multiprocessor
constexpr int kChunk = 4 * kThreads;  // keys
constexpr int kOwn = 8;               // of a thread, read at once
constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kFew = 1024;            // keys of a bin that can be ranked
constexpr int kUnroll = 4;             // 16-byte loads a lane and row
constexpr int kEmpty = -1;             // as fp32 a NaN that no logit is
constexpr int kNone = -2;              // for what isn't kept
constexpr int kNaN = 0x7fc00000;

struct Params {
  const void *x, *weight;
  const float* ready;
  const int64_t* candidates;
  const void* seqlens;
  const int64_t* recorded;
  void* rows;
  int64_t* indices;
  float* gates;
  int *words, *slots, *counts;  // bits of the logits; candidates kept
  int64_t x_b, x_n, x_d;
  int batch, length, scored, k, width, seqlens_dtype;
  int score_items, copy_items, lag;
  float alpha, temperature, largest;  // largest number of the dtype in which scores are ranked, 0 to rank logits
  int activation;
};

struct alignas(16) Shared {
  int counts[2][3][kWarps];  // every other time, so that one barrier a time is enough
  int histogram[kBins];
  unsigned least[kWarps], most[kWarps], few[kFew];
  int sums[kWarps], bin, before, found;
  unsigned threshold;
};

// A sequence: its candidates, where they aren't all positions, and the end of its tokens.
struct Sequence {
  const int64_t* candidates;
  int scored, end;

  __device__ Sequence(const Params& p, int b) : candidates(nullptr), scored(p.scored), end(p.length) {
    if (p.candidates) candidates = p.candidates + int64_t(b) * p.scored;
    if (p.seqlens) {
      const int64_t own = p.seqlens_dtype ? __ldg(static_cast<const int*>(p.seqlens) + b)
                                          : __ldg(static_cast<const int64_t*>(p.seqlens) + b);
      end = own < end ? int(max(own, int64_t(0))) : end;
    }
  }
  // position of candidate i, -1 for none
  __device__ int position(int i) const {
    int64_t at = i;
    if (i >= scored) return -1;
    if (candidates) at = __ldg(candidates + i);
    return at >= 0 && at < end ? int(at) : -1;
  }
};

__device__ __forceinline__ int look(const int* at) { return *static_cast<const volatile int*>(at); }

// The word, once it is written.
__device__ __forceinline__ int await(const int* at) {
  int word;
  while ((word = look(at)) == kEmpty) {}
  return word;
}

__device__ __forceinline__ void hand_on(int* word, float logit) {
  __stcg(word, isnan(logit) ? kNaN : __float_as_int(logit));
}

// What needs exponentials isn't inlined: the code of a choice runs seldom and is fetched each time.

__device__ __noinline__ float score_of(float logit, float alpha, int activation) {
  return alpha * activate(logit, activation);
}

__device__ __forceinline__ float gate_of(const Params& p, float logit) {
  return isnan(logit) ? 0.0f : bounded(score_of(logit, p.alpha, p.activation));
}

// A number that ranks as the logit does, or as its score rounded to T; 0 for what is never kept.
template <class T>
__device__ __forceinline__ unsigned key_of(const Params& p, float logit) {
  if (p.largest > 0) logit = bounded(to_float(from_float<T>(score_of(logit, p.alpha, p.activation))), p.largest);
  if (isnan(logit)) return 0;
  const unsigned bits = __float_as_uint(logit == 0 ? 0.0f : logit);  // -0.0 ranks as 0.0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The sums of three counts over the block; `turn` is another one each time.
__device__ __forceinline__ void sum_counts(Shared& s, int turn, int& a, int& b, int& c) {
  const int warp = threadIdx.x / kWarp;
  a = __reduce_add_sync(kAll, a), b = __reduce_add_sync(kAll, b), c = __reduce_add_sync(kAll, c);
  int(&counts)[3][kWarps] = s.counts[turn % 2];
  if (threadIdx.x % kWarp == 0) counts[0][warp] = a, counts[1][warp] = b, counts[2][warp] = c;
  __syncthreads();
  const auto sum = [](const int(&of)[kWarps]) {
    int total = 0;
#pragma unroll
    for (int other = 0; other < kWarps; other += 4) {
      const int4 four = *reinterpret_cast<const int4*>(of + other);
      total += four.x + four.y + four.z + four.w;
    }
    return total;
  };
  a = sum(counts[0]), b = sum(counts[1]), c = sum(counts[2]);
}

// The kept-th largest of the keys, of which so many are real, if few share its bin; else 0. The histogram is zeros;
// each_key(f) calls f with each key of the thread.
template <class F>
__device__ __forceinline__ unsigned threshold_by_bins(Shared& s, F each_key, int kept, unsigned least, unsigned most) {
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  least = __reduce_min_sync(kAll, least), most = __reduce_max_sync(kAll, most);
  if (lane == 0) s.least[warp] = least, s.most[warp] = most;
  if (t == 0) s.found = 0, s.threshold = 0;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kWarps; ++other) least = min(least, s.least[other]), most = max(most, s.most[other]);
  const int shift = max(32 - __clz(most - least) - kBinBits, 0);
  each_key([&](unsigned key) {
    if (key) atomicAdd(&s.histogram[(key - least) >> shift], 1);
  });
  __syncthreads();
  // bins from the highest down, 8 a thread: how many keys reach each
  int own[kBins / kThreads], total = 0;
#pragma unroll
  for (int o = 0; o < kBins / kThreads; ++o) total += own[o] = s.histogram[kBins - 1 - (t * (kBins / kThreads) + o)];
  int before = total;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAll, before, step);
    if (lane >= step) before += other;
  }
  if (lane == kWarp - 1) s.sums[warp] = before;
  before -= total;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kWarps; ++other) before += other < warp ? s.sums[other] : 0;
#pragma unroll
  for (int o = 0; o < kBins / kThreads; ++o) {
    if (before < kept && before + own[o] >= kept) s.bin = kBins - 1 - (t * (kBins / kThreads) + o), s.before = before;
    before += own[o];
  }
  __syncthreads();
  const unsigned bin = s.bin;
  const int few = s.histogram[bin], want = kept - s.before;
  if (few > kFew) return 0;
  each_key([&](unsigned key) {
    if (key && (key - least) >> shift == bin) s.few[atomicAdd(&s.found, 1)] = key;
  });
  __syncthreads();
  for (int own = t; own < few; own += kThreads) {
    int greater = 0, equal = 0;
    const unsigned key = s.few[own];
    for (int other = 0; other < few; ++other) greater += s.few[other] > key, equal += s.few[other] == key;
    if (greater < want && greater + equal >= want) atomicMax(&s.threshold, key);  // equal ones agree
  }
  __syncthreads();
  return s.threshold;
}

// The choice of a sequence; its keys are in shared memory, with zeros up to a multiple of 4 a thread, if kCached.
template <class T, bool kCached>
__device__ void choose(const Params& p, Shared& s, uint4* keys, int b) {
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  const Sequence sequence(p, b);
  const int* words = p.words + int64_t(b) * p.scored;
  const auto key_of_word = [&](int word) { return word == kNone ? 0u : key_of<T>(p, __int_as_float(word)); };
  int turn = 0, real = 0, none = 0;
  const int padded = ceil_div(p.scored, kChunk) * kChunk;
  unsigned least = 0xffffffffu, most = 0;
  for (int bin = t; bin < kBins; bin += kThreads) s.histogram[bin] = 0;
  for (int first = t; first < padded; first += kOwn * kThreads) {
    int word[kOwn];
#pragma unroll
    for (int o = 0; o < kOwn; ++o) word[o] = sequence.position(first + o * kThreads) < 0 ? kNone : kEmpty;
    for (bool missing = true; missing;) {  // all that are missing are asked for at once
#pragma unroll
      for (int o = 0; o < kOwn; ++o)
        if (word[o] == kEmpty) word[o] = look(words + first + o * kThreads);
      missing = false;
#pragma unroll
      for (int o = 0; o < kOwn; ++o) missing |= word[o] == kEmpty;
    }
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int i = first + o * kThreads;
      const unsigned key = key_of_word(word[o]);
      if (kCached && i < padded) reinterpret_cast<unsigned*>(keys)[i] = key;
      real += key != 0;
      if (key) least = min(least, key), most = max(most, key);
    }
  }
  sum_counts(s, turn++, real, none, none);
  const int kept = min(p.k, real);

  // those from `first` on, `step` apart and before `end`; of words, all are read before one is needed
  const auto read_keys = [&](unsigned (&own)[kOwn], int first, int step, int end) {
    if constexpr (kCached) {
#pragma unroll
      for (int o = 0; o < kOwn; ++o)
        own[o] = first + o * step < end ? reinterpret_cast<const unsigned*>(keys)[first + o * step] : 0u;
    } else {
      int word[kOwn];
#pragma unroll
      for (int o = 0; o < kOwn; ++o) {
        const int i = first + o * step;
        word[o] = i < end && sequence.position(i) >= 0 ? __ldcg(words + i) : kNone;
      }
#pragma unroll
      for (int o = 0; o < kOwn; ++o) own[o] = key_of_word(word[o]);
    }
  };
  const auto each_key = [&](auto f) {
    if constexpr (kCached) {
#pragma unroll 2
      for (int i = t; i < padded / 4; i += kThreads) {
        const uint4 four = keys[i];
        f(four.x), f(four.y), f(four.z), f(four.w);
      }
    } else {
      for (int first = t; first < p.scored; first += kOwn * kThreads) {
        unsigned own[kOwn];
        read_keys(own, first, kThreads, p.scored);
#pragma unroll
        for (unsigned key : own) f(key);
      }
    }
  };
  unsigned threshold = 0;
  if (kept && kept < real) threshold = threshold_by_bins(s, each_key, kept, least, most);
  // the largest number that `kept` keys reach, or one that exactly so many reach if found earlier
  int reached = threshold ? kept : real;  // by how many keys
  for (int shift = 30; shift >= 0 && kept && reached != kept; shift -= 2) {
    const unsigned one = threshold + (1u << shift), two = one + (1u << shift), three = two + (1u << shift);
    int reach_one = 0, reach_two = 0, reach_three = 0;
    each_key([&](unsigned key) {
      reach_one += key >= one, reach_two += key >= two, reach_three += key >= three;
    });
    sum_counts(s, turn++, reach_one, reach_two, reach_three);
    if (reach_one >= kept) threshold = one, reached = reach_one;
    if (reach_two >= kept) threshold = two, reached = reach_two;
    if (reach_three >= kept) threshold = three, reached = reach_three;
  }
  threshold = max(threshold, 1u);  // 0 is no key

  // each warp writes the kept of a stretch, from the slot on that those of stretches before it leave
  const int stretch = ceil_div(p.scored, kChunk) * kChunk / kWarps;
  const int begin = warp * stretch, end = kept ? min(begin + stretch, p.scored) : begin;
  int above = 0, tied = 0;
  unsigned own[kOwn];
  for (int first = begin + lane; first - lane < end; first += kOwn * kWarp) {
    read_keys(own, first, kWarp, end);
#pragma unroll
    for (unsigned key : own) above += key > threshold, tied += key == threshold;
  }
  above = __reduce_add_sync(kAll, above), tied = __reduce_add_sync(kAll, tied);
  int(&counts)[3][kWarps] = s.counts[turn % 2];
  if (lane == 0) counts[0][warp] = above, counts[1][warp] = tied;
  __syncthreads();
  int want = kept;  // of what is at the threshold
  above = tied = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    want -= counts[0][other];
    if (other < warp) above += counts[0][other], tied += counts[1][other];
  }
  int* slots = p.slots + int64_t(b) * p.k;
  const unsigned lower = (1u << lane) - 1;
  for (int first = begin + lane; first - lane < end; first += kOwn * kWarp) {
    read_keys(own, first, kWarp, end);
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const unsigned key = own[o];
      const unsigned all_above = __ballot_sync(kAll, key > threshold), all_tied = __ballot_sync(kAll, key == threshold);
      const int tie = tied + __popc(all_tied & lower);
      if (key > threshold || (key == threshold && tie < want))
        __stcg(slots + above + __popc(all_above & lower) + min(tie, want), first + o * kWarp);
      above += __popc(all_above), tied += __popc(all_tied);
    }
  }
  for (int j = kept + t; j < p.k; j += kThreads) __stcg(slots + j, kNone);
  if (t == 0) p.counts[b] = kept;
}

// A recorded choice; what is no candidate counts as none.
__device__ void repeat(const Params& p, Shared& s, int b) {
  const int64_t row = int64_t(b) * p.k;
  const Sequence sequence(p, b);
  int kept = 0, none = 0;
  for (int j = threadIdx.x; j < p.k; j += kThreads) {
    const int64_t index = p.recorded[row + j];
    int64_t i = index >= 0 && index < p.length ? index : -1;
    if (i >= 0 && p.candidates) i = find(sequence.candidates, index, p.scored);
    if (i >= 0 && sequence.position(int(i)) < 0) i = -1;
    __stcg(p.slots + row + j, i >= 0 ? int(i) : kNone);
    kept += i >= 0;
  }
  sum_counts(s, 0, kept, none, none);
  if (threadIdx.x == 0) p.counts[b] = kept;
}

// Ready logits, each by the thread that reads it first.
__device__ void take_ready(const Params& p, int b) {
  const Sequence sequence(p, b);
  for (int i = threadIdx.x; i < p.scored; i += kThreads) {
    const int64_t at = int64_t(b) * p.scored + i;
    hand_on(p.words + at, sequence.position(i) < 0 ? 0.0f : bounded(__fdiv_rn(p.ready[at], p.temperature)));
  }
}

// A warp scores a candidate.
template <class T, class W, bool kAligned>
__device__ void score(const Params& p, int b, int i) {
  if (i >= p.scored) return;
  const int lane = threadIdx.x % kWarp;
  const int position = Sequence(p, b).position(i);
  const T* x = static_cast<const T*>(p.x) + b * p.x_b + position * p.x_n;
  const W* w = static_cast<const W*>(p.weight);
  float sum = 0;
  if (position >= 0) {
    if constexpr (kAligned) {
      constexpr int kPack = kWide<T>;
      const int packs = p.width / kPack;
      const unsigned long long stay = to_stay();
      for (int start = lane; start < packs; start += kUnroll * kWarp) {
        int4 bits[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = start + u * kWarp;
          bits[u] = load(reinterpret_cast<const int4*>(x) + c, c < packs, stay);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = start + u * kWarp;
          if (c >= packs) break;
          const auto& values = reinterpret_cast<const Pack<T, kPack>&>(bits[u]);
          const auto weights = *reinterpret_cast<const Pack<W, kPack>*>(w + c * kPack);
#pragma unroll
          for (int e = 0; e < kPack; ++e) sum += to_float(values.at[e]) * to_float(weights.at[e]);
        }
      }
    } else {
      for (int d = lane; d < p.width; d += kWarp) sum += to_float(x[d * p.x_d]) * to_float(w[d]);
    }
  }
  sum = warp_sum(sum);
  const float logit = position < 0 ? 0.0f : bounded(__fdiv_rn(sum, p.temperature));
  if (lane == 0) hand_on(p.words + int64_t(b) * p.scored + i, logit);
}

// A warp fills a slot.
template <class T, bool kAligned>
__device__ void copy(const Params& p, int b, int j) {
  if (j >= p.k) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t at = int64_t(b) * p.k + j;
  const int i = await(p.slots + at);
  const int64_t position = i == kNone ? -1 : p.candidates ? __ldg(p.candidates + int64_t(b) * p.scored + i) : i;
  const T* x = static_cast<const T*>(p.x) + b * p.x_b + position * p.x_n;
  T* row = static_cast<T*>(p.rows) + at * p.width;
  if constexpr (kAligned) {
    const int packs = p.width / kWide<T>;
    const unsigned long long leave = to_leave();
    for (int start = lane; start < packs; start += kUnroll * kWarp) {
      int4 bits[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = start + u * kWarp;
        bits[u] = load(reinterpret_cast<const int4*>(x) + c, position >= 0 && c < packs, leave);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = start + u * kWarp;
        if (c < packs) store(reinterpret_cast<int4*>(row) + c, bits[u], leave);
      }
    }
  } else {
    copy_row<T, 1>(x, p.x_d, row, position >= 0, p.width);
  }
  if (lane == 0) {
    p.indices[at] = position;
    p.gates[at] = i == kNone ? 0.0f : gate_of(p, __int_as_float(await(p.words + int64_t(b) * p.scored + i)));
  }
}

__global__ void __launch_bounds__(kThreads) empty_kernel(int* words, int64_t n) {
  let_next_begin();
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) words[i] = kEmpty;
}

template <class T, class W, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks) route_kernel(const __grid_constant__ Params p) {
  __shared__ Shared s;
  uint4* keys = launched_memory<uint4>();
  await_previous();
  const int per_step = p.score_items + 1 + p.copy_items, warp = threadIdx.x / kWarp;
  const int step = blockIdx.x / per_step, item = blockIdx.x % per_step;
  if (item > p.score_items) {
    if (step >= p.lag) copy<T, kAligned>(p, step - p.lag, (item - p.score_items - 1) * kWarps + warp);
  } else if (step < p.batch) {
    if (item < p.score_items) {
      score<T, W, kAligned>(p, step, item * kWarps + warp);
    } else {
      if (p.ready) take_ready(p, step);
      if (p.recorded) repeat(p, s, step);
      else if (p.scored <= kKeys) choose<T, true>(p, s, keys, step);
      else choose<T, false>(p, s, keys, step);
    }
  }
}

}  // namespace

void route(Address x, Address weight, Address ready, Address candidates, Address seqlens, Address recorded,
           Address rows, Address indices, Address gates, Address words, Address counts,
           int batch, int length, int scored, int k, int width, int64_t x_b, int64_t x_n, int64_t x_d,
           int seqlens_dtype, int activation, double alpha, double temperature, double largest, int64_t in_flight,
           int dtype, int weight_dtype, Address stream) {
  Params p{};
  p.x = pointer<void>(x), p.weight = pointer<void>(weight), p.ready = pointer<float>(ready);
  p.candidates = pointer<int64_t>(candidates), p.seqlens = pointer<void>(seqlens);
  p.recorded = pointer<int64_t>(recorded), p.rows = pointer<void>(rows), p.indices = pointer<int64_t>(indices);
  p.gates = pointer<float>(gates), p.words = pointer<int>(words), p.slots = p.words + int64_t(batch) * scored;
  p.counts = pointer<int>(counts);
  p.x_b = x_b, p.x_n = x_n, p.x_d = x_d;
  p.batch = batch, p.length = length, p.scored = scored, p.k = k, p.width = width;
  p.seqlens_dtype = seqlens_dtype;
  p.alpha = alpha, p.temperature = temperature, p.largest = largest, p.activation = activation;
  p.score_items = ready ? 0 : ceil_div(scored, kWarps);
  p.copy_items = ceil_div(k, kWarps);
  const int keys = scored <= kKeys && !recorded ? ceil_div(scored, kChunk) * kChunk * int(sizeof(unsigned)) : 0;
  const int64_t empty = int64_t(batch) * (scored + k);
  launch(empty_kernel, std::min<int64_t>(ceil_div<int64_t>(empty, kThreads), 8 * device().multiprocessors), kThreads, 0,
         false, stream, p.words, empty);
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t each = std::max<int64_t>((int64_t(scored) + k) * width * sizeof(T), 1);
    p.lag = std::min<int64_t>(std::max<int64_t>(in_flight / each, 1), batch - 1);
    const bool wide = x_d == 1 && aligned<T>({x, rows, weight}, {x_b, x_n, width});
    const auto run = [&](auto kernel) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, keys), "route");
      const int64_t blocks = int64_t(batch + p.lag) * (p.score_items + 1 + p.copy_items);
      launch(kernel, blocks, kThreads, keys, true, stream, p);
    };
    if (weight_dtype == dtype || ready) run(wide ? route_kernel<T, T, true> : route_kernel<T, T, false>);
    else if (weight_dtype == kF32) run(wide ? route_kernel<T, float, true> : route_kernel<T, float, false>);
    else throw std::invalid_argument("weight: expected float32 or the dtype of x");
  });
}

}  // namespace mor
