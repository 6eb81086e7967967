// The next token of each lane, in one launch and without a sort: a block a lane. What is chosen is described in
// ops/sample/eager.py; this is the same function.
//
// A logit's bits, so turned that they rank as it does, are its key; its weight is a whole number and depends on the key
// alone, so sums of weights are exact in any order. What is wanted (the k-th likeliest token, the one that crosses
// top_p, the one that is drawn) is the first at which a sum over the tokens, likeliest first, reaches a bound: a
// histogram of sums by the keys' upper 10 bits tells these, one by the next 10 bits among the keys that share them tells
// more, and so on. Tokens of one key follow one another by their ids. Exponentials are of float64, which is slow, so
// keys of 16 bits are counted first, and those that occur, a few thousand of a vocabulary, are weighed once each.
#include <cfloat>

#include "instructions.cuh"

namespace mor {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kDigit = 10, kBins = 1 << kDigit;
static_assert(kBins == kThreads && kWarps == kWarp);
constexpr int kMostItems = 16384;  // keys that occur, if they are counted
constexpr int kItemBytes = kMostItems * sizeof(uint16_t);
constexpr double kOne = 4611686018427387904.0;  // probability 1 as a weight, 2^62
constexpr double kFaint = 100;                  // e^-kFaint of the likeliest doesn't change a float64 sum

struct Params {
  const void* logits;
  const double *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *position;
  int64_t* tokens;
  int64_t row, of[6];  // strides: of the logits, and of the settings in the launcher's order
  int vocabulary, room;  // bytes of the memory that the launch asks for
};

struct Settings {
  double temperature, top_p, min_p, uniform;
  int64_t top_k;
};

struct Shared {
  Settings of;  // kept here, as registers are scarce
  unsigned low[2][kBins], high[2][kBins];  // sums by the first digit, and by another; the likeliest tokens' first
  uint64_t totals[kWarps], before, total;
  double sums[kWarps];
  float best[kWarps];
  unsigned digit;
  int token;
};

__device__ __forceinline__ Shared& shared() {
  __shared__ Shared s;
  return s;
}

// Keys

template <class T>
constexpr int kBits = 8 * sizeof(T);
template <class T>
constexpr unsigned kSign = 1u << (kBits<T> - 1);
template <class T>
constexpr unsigned kInfinity = std::is_same_v<T, fp16> ? 0x7c00 : 0x7f800000u >> (32 - kBits<T>);
template <class T>
constexpr unsigned kLowest = (2 * kSign<T> - 1) ^ (kSign<T> | (kInfinity<T> - 1));  // of a number

// 0 for NaN and -inf, which are never chosen
template <class T>
__device__ __forceinline__ unsigned key_of(unsigned bits) {
  constexpr unsigned kSign = mor::kSign<T>;
  const unsigned magnitude = bits & (kSign - 1);
  if (bits == kSign) bits = 0;  // -0.0 ranks as 0.0
  const unsigned key = bits & kSign ? (2 * kSign - 1) ^ bits : kSign | bits;
  return magnitude > kInfinity<T> || key < kLowest<T> ? 0 : key;
}

template <class T>
__device__ __forceinline__ unsigned bits_of(float x) {
  if constexpr (sizeof(T) == 4) return __float_as_uint(x);
  const T rounded = from_float<T>(x);
  return reinterpret_cast<const uint16_t&>(rounded);
}

template <class T>
__device__ __forceinline__ double value_of(unsigned key) {
  const unsigned bits = key & kSign<T> ? key ^ kSign<T> : (2 * kSign<T> - 1) ^ key;
  if (bits == kInfinity<T>) return DBL_MAX / 4;
  if constexpr (std::is_same_v<T, fp16>) return __half2float(__ushort_as_half(bits));
  return __uint_as_float(bits << (32 - kBits<T>));
}

// A lane's logits, kWide<T> at a time. A warp has a stretch of them, of which a thread always reads the same ones.
template <class T>
struct Lane {
  static constexpr int kPack = kWide<T>;
  using Packed = Held<T, kPack>;
  const T* row;
  Packed* held;  // of shared memory, if they are there
  int vocabulary, begin, end;
  bool whole;  // the row can be read 16 bytes at a time

  __device__ Lane(const Params& p, int64_t lane)
      : row(static_cast<const T*>(p.logits) + lane * p.row), held(nullptr), vocabulary(p.vocabulary) {
    const int packs = ceil_div(vocabulary, kPack), stretch = ceil_div(packs, kThreads) * kWarp;
    begin = min(int(threadIdx.x / kWarp) * stretch, packs), end = min(begin + stretch, packs);
    whole = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  }

  __device__ __forceinline__ Packed load(int pack) const {
    Packed x{~0u, ~0u, ~0u, ~0u};  // NaN, where there is no logit
    if (pack >= end) return x;
    if (held) return held[pack];
    return whole && (pack + 1) * kPack <= vocabulary ? load_held<T, kPack>(row, pack * kPack, 1)
                                                     : load_each(row + pack * kPack, vocabulary - pack * kPack);
  }

  // What isn't inlined would else be most of the code, which is fetched anew for each block.
  static __device__ __noinline__ Packed load_each(const T* from, int count) {
    Packed x{~0u, ~0u, ~0u, ~0u};
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i >= count) break;
      if constexpr (sizeof(T) == 4) {
        x.words[i] = reinterpret_cast<const unsigned*>(from)[i];
      } else {
        const unsigned bits = reinterpret_cast<const uint16_t*>(from)[i];
        x.words[i / 2] = __byte_perm(x.words[i / 2], bits, i % 2 ? 0x5410 : 0x3254);
      }
    }
    return x;
  }

  // f(pack, its logits) for all of the thread's, in order; lanes of a warp call it together. kAtOnce are on their way.
  template <int kAtOnce, class F>
  __device__ __forceinline__ void each_pack(F f) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int first = begin + lane; first - lane < end; first += kAtOnce * kWarp) {
      Packed x[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) x[a] = load(first + a * kWarp);
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) f(first + a * kWarp, x[a]);
    }
  }

  static __device__ __forceinline__ unsigned key(const Packed& x, int i) {
    return key_of<T>(sizeof(T) == 4 ? x.words[i] : x.words[i / 2] >> i % 2 * 16 & 0xffff);
  }

  // f(key, how often it is met here)
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    each_pack<1>([&](int, Packed x) {
#pragma unroll 1
      for (int i = 0; i < kPack; ++i) {  // not unrolled, for the same reason
        f(key(x, 0), 1u);
        constexpr int kShift = kBits<T> % 32;
#pragma unroll
        for (int w = 0; w < 3; ++w) x.words[w] = kShift ? x.words[w] >> 16 | x.words[w + 1] << 16 : x.words[w + 1];
        x.words[3] >>= kShift;
      }
    });
  }
};

// Keys from `base` on, counted.
struct Counted {
  unsigned* words;
  uint16_t* items;  // those that occur, in order
  unsigned base;
  int count;
  bool wide;  // 32 bits each, not 16

  __device__ __forceinline__ unsigned at(unsigned bin) const {
    return wide ? words[bin] : words[bin / 2] >> bin % 2 * 16 & 0xffff;
  }

  // lanes of a warp are far from each other, so that they seldom add to the same sum
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    const int lane = threadIdx.x % kWarp, stretch = ceil_div(count, kWarp) | 1;
#pragma unroll 1
    for (int i = threadIdx.x / kWarp; i < stretch; i += kWarps) {
      if (lane * stretch + i >= count) break;
      const unsigned bin = items[lane * stretch + i];
      f(base + bin, at(bin));
    }
  }
};

// What all threads of a block do together

// The sum over the threads before this one, and over all.
template <class I>
__device__ I sum_before(Shared& s, I own, I& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto scan = [&](I x) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const I other = __shfl_up_sync(kAll, x, step);
      if (lane >= step) x += other;
    }
    return x;
  };
  const I upto = scan(own);
  __syncthreads();
  if (lane == kWarp - 1) s.totals[warp] = upto;
  __syncthreads();
  const I of_warps = scan(I(s.totals[lane]));
  total = __shfl_sync(kAll, of_warps, kWarp - 1);
  const I earlier = __shfl_sync(kAll, of_warps, max(warp - 1, 0));
  return upto - own + (warp ? earlier : 0);
}

__device__ __forceinline__ double sum_of(Shared& s, double own) {
  const auto fold = [](double x) {
#pragma unroll
    for (int step = kWarp / 2; step; step /= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
  };
  own = fold(own);
  if (threadIdx.x % kWarp == 0) s.sums[threadIdx.x / kWarp] = own;
  __syncthreads();
  return fold(s.sums[threadIdx.x % kWarp]);
}

__device__ __forceinline__ float largest_of(Shared& s, float own) {
  const auto fold = [](float x) {
#pragma unroll
    for (int step = kWarp / 2; step; step /= 2) x = max(x, __shfl_xor_sync(kAll, x, step));
    return x;
  };
  own = fold(own);
  if (threadIdx.x % kWarp == 0) s.best[threadIdx.x / kWarp] = own;
  __syncthreads();
  return fold(s.best[threadIdx.x % kWarp]);
}

// The lowest key of low..high for which `holds`, as it does for high and all between. Each warp finds it.
template <class F>
__device__ unsigned lowest(unsigned low, unsigned high, F holds) {
  const unsigned lane = threadIdx.x % kWarp;
  while (low < high) {
    const unsigned step = ceil_div(high - low, unsigned(kWarp));
    const unsigned which = __ballot_sync(kAll, holds(min(low + lane * step, high)));
    const int first = which ? __ffs(which) - 1 : kWarp;
    if (first < kWarp) high = min(low + first * step, high);
    if (first) low += (first - 1) * step + 1;
  }
  return low;
}

// Histograms of sums of 64 bits, in two halves: shared memory adds 32 bits at once.

__device__ __forceinline__ void clear(Shared& s, int which) {
  s.low[which][threadIdx.x] = s.high[which][threadIdx.x] = 0;
  __syncthreads();
}

__device__ __forceinline__ void add(Shared& s, int which, unsigned digit, uint64_t weight) {
  if (!weight) return;
  const unsigned bin = kBins - 1 - digit, low = unsigned(weight), before = atomicAdd(&s.low[which][bin], low);
  const unsigned high = unsigned(weight >> 32) + (before + low < low);
  if (high) atomicAdd(&s.high[which][bin], high);
}

// Whether the sum of the histogram, from the likeliest on, reaches `bound`. At which digit it does, the sum before that
// and the sum of all are then shared.
__device__ __noinline__ bool find(int which, uint64_t bound) {
  Shared& s = shared();
  __syncthreads();
  uint64_t total;
  const uint64_t own = uint64_t(s.high[which][threadIdx.x]) << 32 | s.low[which][threadIdx.x];
  const uint64_t mine = sum_before(s, own, total);
  if (mine < bound && bound <= mine + own) s.digit = kBins - 1 - threadIdx.x, s.before = mine;
  if (threadIdx.x == 0) s.total = total;
  __syncthreads();
  return bound <= total;
}

// The same of whole keys, of which histogram 0 has the first digit.
template <class T, class Items, class F>
__device__ bool descend(Shared& s, const Items& items, uint64_t bound, F weigh, unsigned& key, uint64_t& before) {
  int known = kBits<T> - kDigit;
  if (!find(0, bound)) return false;
  key = s.digit << known, before = s.before;
  while (known) {
    const int shift = max(known - kDigit, 0);
    clear(s, 1);
    items.each([&](unsigned other, unsigned count) {
      if ((other ^ key) >> known == 0) add(s, 1, other >> shift & (kBins - 1), count * weigh(other));
    });
    find(1, bound - before);
    key |= s.digit << shift, before += s.before, known = shift;
  }
  return true;
}

template <class T, class Items, class F>
__device__ void first_digits(Shared& s, const Items& items, F weigh) {
  clear(s, 0);
  items.each([&](unsigned key, unsigned count) { add(s, 0, key >> (kBits<T> - kDigit), count * weigh(key)); });
}

// A draw

__device__ __forceinline__ uint64_t splitmix64(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

__device__ __forceinline__ double uniform(uint64_t seed, uint64_t position) {
  constexpr uint64_t kGamma = 0x9e3779b97f4a7c15;
  return double(int64_t(splitmix64(splitmix64(seed + kGamma) + (position + 1) * kGamma) >> 11)) * 0x1p-53;
}

// The least sum that as a float64 is no less than top_p.
__device__ __forceinline__ uint64_t bound_of(double top_p) {
  const double mass = top_p * kOne;
  if (mass <= 0x1p53) return uint64_t(ceil(mass));
  const uint64_t exact = uint64_t(mass), half = (exact - uint64_t(nextafter(mass, 0.0))) / 2;
  return exact - half + (uint64_t(double(exact - half)) < exact);  // half way is rounded to even digits
}

template <class T>
__device__ __forceinline__ double score_of(unsigned key, double top, double temperature) {
  return (value_of<T>(key) - top) / temperature;
}

template <class T>
__device__ __noinline__ double exponential_of(unsigned key, double top, double temperature) {
  return exp(score_of<T>(key, top, temperature));
}

template <class T>
__device__ __noinline__ double probability_of(unsigned key, double top, double temperature, double sum) {
  return exp(score_of<T>(key, top, temperature)) / sum;
}

// The key that is drawn, and of how many tokens of that key it is the first behind. No key under `faint` counts.
template <class T, class Items>
__device__ unsigned draw(Shared& s, const Items& items, unsigned best, unsigned faint, int& rank) {
  const Settings& of = s.of;
  const double top = value_of<T>(best);
  unsigned least = faint, key;
  uint64_t before;
  if (of.top_k > 0) {
    const auto one = [&](unsigned other) { return uint64_t(other >= faint); };
    first_digits<T>(s, items, one);
    if (descend<T>(s, items, of.top_k, one, key, before)) {
      const double of_last = score_of<T>(key, top, of.temperature);  // other logits may have the same
      least = lowest(faint, key, [&](unsigned other) { return score_of<T>(other, top, of.temperature) >= of_last; });
    }
  }
  double sum = 0;
  items.each([&](unsigned other, unsigned count) {
    if (other >= least) sum += count * exponential_of<T>(other, top, of.temperature);
  });
  sum = sum_of(s, sum);
  const auto probability = [&](unsigned other) { return probability_of<T>(other, top, of.temperature, sum); };
  if (of.min_p > 0) {
    const double limit = of.min_p * probability(best);
    least = lowest(least, best, [&](unsigned other) { return probability(other) >= limit; });
  }
  const auto weigh = [&](unsigned other) { return other >= least ? uint64_t(probability(other) * kOne) : 0; };
  first_digits<T>(s, items, weigh);

  find(0, ~uint64_t(0));
  uint64_t total = s.total;
  for (bool cut = of.top_p < 1;; cut = false) {  // first what top_p leaves, then the token
    const uint64_t bound = cut ? bound_of(of.top_p) : min(uint64_t(of.uniform * double(total)), total - 1) + 1;
    const bool found = descend<T>(s, items, bound, weigh, key, before);
    if (cut && !found) continue;
    const uint64_t each = weigh(key), tokens = ceil_div(bound - before, each);
    if (cut) {
      total = before + tokens * each;
    } else {
      rank = int(tokens) - 1;
      return key;
    }
  }
}

// Counts the keys base..last of 16 bits, and lists those that occur; false if there is no room for either.
template <class T>
__device__ bool count_keys(Shared& s, const Params& p, const Lane<T>& row, unsigned last, Counted& counted) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, bins = last + 1 - counted.base;
  counted.wide = p.vocabulary > 0xffff;
  counted.items = launched_memory<uint16_t>();
  counted.words = launched_memory<unsigned>() + kItemBytes / sizeof(unsigned);
  const int words = counted.wide ? bins : ceil_div(bins, 2);
  if (kItemBytes + int64_t(words) * int(sizeof(unsigned)) > p.room) return false;
#pragma unroll 1
  for (int word = threadIdx.x; word < words; word += kThreads) counted.words[word] = 0;
  __syncthreads();
  row.template each_pack<2>([&](int, const auto& x) {
#pragma unroll
    for (int i = 0; i < Lane<T>::kPack; ++i) {
      const unsigned key = Lane<T>::key(x, i), bin = key - counted.base;
      if (key < counted.base) continue;
      atomicAdd(&counted.words[counted.wide ? bin : bin / 2], counted.wide ? 1u : 1u << bin % 2 * 16);
    }
  });
  __syncthreads();
  const int stretch = ceil_div(bins, kThreads) * kWarp;
  const int begin = min(warp * stretch, bins), end = min(begin + stretch, bins);
  int own = 0;
#pragma unroll 2
  for (int bin = begin + lane; bin < end; bin += kWarp) own += counted.at(bin) > 0;
  int at = __shfl_sync(kAll, sum_before(s, own, counted.count), 0);
  if (counted.count > kMostItems) return false;
#pragma unroll 2
  for (int first = begin; first < end; first += kWarp) {
    const int bin = first + lane;
    const bool occurs = bin < end && counted.at(bin) > 0;
    const unsigned all = __ballot_sync(kAll, occurs);
    if (occurs) counted.items[at + __popc(all & ((1u << lane) - 1))] = uint16_t(bin);
    at += __popc(all);
  }
  __syncthreads();
  return true;
}

// The id of the token that has `rank` others of its key before it goes to `token`.
template <class T>
__device__ void locate(Shared& s, const Lane<T>& row, unsigned key, int rank, int64_t* token) {
  const int lane = threadIdx.x % kWarp;
  const auto matches = [&](const auto& x) {
    unsigned which = 0;
#pragma unroll
    for (int i = 0; i < Lane<T>::kPack; ++i) which |= unsigned(Lane<T>::key(x, i) == key) << i;
    return which;
  };
  int own = 0, total;
  row.template each_pack<2>([&](int, const auto& x) { own += __popc(matches(x)); });
  int left = rank - __shfl_sync(kAll, sum_before(s, own, total), 0);
  own = __reduce_add_sync(kAll, own);
  if (left < 0 || left >= own) return;
  row.template each_pack<1>([&](int pack, const auto& x) {
    unsigned which = matches(x);
    int upto = __popc(which);
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAll, upto, step);
      if (lane >= step) upto += other;
    }
    int mine = left - (upto - __popc(which));
    if (mine >= 0 && left < upto) {
#pragma unroll 1
      for (; mine; --mine) which &= which - 1;
      *token = int64_t(pack) * Lane<T>::kPack + __ffs(which) - 1;
    }
    left -= __shfl_sync(kAll, upto, kWarp - 1);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const __grid_constant__ Params p) {
  Shared& s = shared();
  take_over();
  using Row = Lane<T>;
  const int64_t lane = blockIdx.x, position = p.position[lane * p.of[5]];
  if (position < 0) {
    if (threadIdx.x == 0) p.tokens[lane] = -1;
    return;
  }
  Row row(p, lane);
  const double temperature = p.temperature[lane * p.of[0]], top_p = p.top_p[lane * p.of[2]];
  const double min_p = p.min_p[lane * p.of[3]];
  const bool hot = temperature > 0 && top_p > 0 && min_p <= 1;  // or else no token is kept but the likeliest
  if (threadIdx.x == 0) {
    const int64_t top_k = p.top_k[lane * p.of[1]], seed = p.seed[lane * p.of[4]];
    s.of = {temperature, top_p, min_p, uniform(seed, position), top_k}, s.token = INT32_MAX;
  }
  auto* copy = launched_memory<typename Row::Packed>();
  const bool copied = sizeof(T) == 4 && hot && int64_t(ceil_div(p.vocabulary, Row::kPack)) * 16 <= p.room;
  float own = -INFINITY;
  int at = 0;  // the pack with the first of the thread's likeliest
  row.template each_pack<4>([&](int pack, const auto& x) {
    float logits[Row::kPack], likeliest = -INFINITY;
    to_floats<T, Row::kPack>(x, logits);
#pragma unroll
    for (float logit : logits) likeliest = max(likeliest, logit);  // not NaN, since that comes second
    if (likeliest > own) own = likeliest, at = pack;
    if (copied && pack < row.end) copy[pack] = x;  // for none but this thread
  });
  const float best = largest_of(s, own);
  if (best == -INFINITY) {
    if (threadIdx.x == 0) p.tokens[lane] = -1;
    return;
  }
  if (!hot) {
    if (own == best) {
      float logits[Row::kPack];
      to_floats<T, Row::kPack>(row.load(at), logits);
      int first = 0;
#pragma unroll
      for (int i = Row::kPack - 1; i >= 0; --i)
        if (logits[i] == best) first = i;
      atomicMin(&s.token, at * Row::kPack + first);
    }
    __syncthreads();
    if (threadIdx.x == 0) p.tokens[lane] = s.token;
    return;
  }

  if (copied) row.held = copy;
  const unsigned highest = key_of<T>(bits_of<T>(best));
  // rounded, and so a key lower
  const unsigned faintest = key_of<T>(bits_of<T>(float(value_of<T>(highest) - kFaint * temperature)));
  const unsigned faint = min(max(faintest, kLowest<T> + 1) - 1, highest);
  unsigned key;
  int rank;
  bool counts = false;
  if constexpr (sizeof(T) == 2) {
    Counted counted;
    counted.base = faint;
    counts = count_keys(s, p, row, highest, counted);
    if (counts) key = draw<T>(s, counted, highest, faint, rank);
  }
  if (!counts) key = draw<T>(s, row, highest, faint, rank);
  locate(s, row, key, rank, p.tokens + lane);
}

}  // namespace

void sample(Address logits, Address temperature, Address top_k, Address top_p, Address min_p, Address seed,
            Address position, Address tokens, int64_t n, int vocabulary, int64_t row,
            std::array<int64_t, 6> of, int most, int dtype, Address stream) {
  int index, room;
  check(cudaGetDevice(&index), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, index), "sample");
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t wanted = sizeof(T) == 4 ? int64_t(vocabulary) * 4 + 12
                                          : kItemBytes + (int64_t(vocabulary > 0xffff ? 4 : 2) << 16);
    constexpr int kOwn = ceil_div(int(sizeof(Shared)), 128) * 128;  // launched_memory begins at a multiple of 128
    room = int(std::min<int64_t>({room - kOwn, wanted, most})) / 16 * 16;
    if (sizeof(T) == 4 && room < int64_t(vocabulary) * 4) room = 0;
    Params p{pointer<void>(logits), pointer<double>(temperature), pointer<double>(top_p), pointer<double>(min_p),
             pointer<int64_t>(top_k), pointer<int64_t>(seed), pointer<int64_t>(position), pointer<int64_t>(tokens), row};
    std::copy(of.begin(), of.end(), p.of);
    p.vocabulary = vocabulary, p.room = room;
    check(cudaFuncSetAttribute(sample_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, room), "sample");
    launch(sample_kernel<T>, n, kThreads, room, true, stream, p);
  });
}

}  // namespace mor
