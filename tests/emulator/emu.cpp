#include "emu.h"
namespace emu {
alignas(128) char shared_[1 << 18];
std::vector<Fiber> fibers; ucontext_t main_context; int current, threads; long progress; bool eager = getenv("EMU_EAGER") != nullptr;
Barrier warp_barriers[32], block_barrier; char exchange[32][32][64]; int kind[32][32];
static std::function<void()> body_;
static std::mt19937 rng(1);
static void entry() { body_(); fibers[current].done = true; ++progress; swapcontext(&fibers[current].context, &main_context); }
void run_grid(int grid, int n, int shared, std::function<void()> body) {
  body_ = body; threads = n; gridDim = dim3(grid); blockDim = dim3(n);
  if (int(fibers.size()) < n) { fibers.resize(n); for (auto& f : fibers) f.stack.resize(1 << 16); }
  for (int b = 0; b < grid; ++b) {
    blockIdx = dim3(b, 0, 0);
    if (shared > (1 << 18)) abort();
    memset(shared_, 0xff, sizeof(shared_));
    for (int i = 0; i < n; ++i) {
      Fiber& f = fibers[i]; f.done = false; f.tid = dim3(i, 0, 0); f.groups.clear(); f.open.clear();
      getcontext(&f.context); f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = nullptr;
      makecontext(&f.context, entry, 0);
    }
    int left = n; long seen = progress; int idle = 0;
    std::vector<int> order(n); for (int i = 0; i < n; ++i) order[i] = i;
    while (left) {
      if (rng() % 4 == 0) std::shuffle(order.begin(), order.end(), rng);
      for (int i : order) if (!fibers[i].done) { current = i; swapcontext(&main_context, &fibers[i].context); if (fibers[i].done) { --left; if (!fibers[i].open.empty()) { fprintf(stderr, "open copies\n"); abort(); } } }
      if (progress == seen) { if (++idle > 4) { fprintf(stderr, "deadlock\n"); abort(); } } else idle = 0, seen = progress;
    }
  }
}
}
dim3 blockIdx, gridDim, blockDim;
