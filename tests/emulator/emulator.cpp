#include <random>

#ifdef MOR_RACES
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#else
static void* __tsan_get_current_fiber() { return nullptr; }
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

dim3 gridDim, blockDim;

namespace emulator {

std::vector<Fiber> fibers;
int current, threads, blocks;
alignas(128) char memory[kMostBlocks][kSharedBytes];
size_t shared_bytes;
Barrier of_warps[kMostThreads / kWarp], of_blocks[kMostBlocks], of_cluster;
bool any_of_block[kMostBlocks];

namespace {
jmp_buf scheduler;
std::function<void()> kernel;
long progress;
void* launcher;        // as ThreadSanitizer sees it
char before, after;    // a cluster
constexpr unsigned kUnordered = 1;  // a switch that says nothing of who comes before whom

void pause() {
  __tsan_switch_to_fiber(launcher, kUnordered);
  if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  __tsan_switch_to_fiber(fiber.seen_as, kUnordered);
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

void begin() {
  __tsan_acquire(&before);
  kernel();
  __tsan_release(&after);
  if (!fibers[current].open.empty()) fail("a thread ended with copies that belong to no group");
  fibers[current].done = true;
  ++progress;
  pause();
}
}  // namespace

void arrive(Barrier& barrier, int count) {
  const long generation = barrier.generation;
  char* order = &barrier.order[generation % 2];
  __tsan_release(order);
  if (++barrier.arrived == count) {
    barrier.arrived = 0, ++barrier.generation, ++progress;
  } else {
    while (barrier.generation == generation) pause();
  }
  __tsan_acquire(order);
}

void run(dim3 grid, int cluster, dim3 block, size_t bytes, const std::function<void()>& body) {
  static std::mt19937 random(1);
  kernel = body, gridDim = grid, blockDim = block, threads = block.x, blocks = cluster, shared_bytes = bytes;
  if (threads % kWarp || threads > 1024 || bytes > kSharedBytes || !grid.x || !grid.y) fail("bad launch");
  if (cluster > kMostBlocks || grid.x % cluster || threads * cluster > kMostThreads) fail("bad clusters");
  const int all = threads * cluster;
  if (int(fibers.size()) < all) fibers.resize(all);
  launcher = __tsan_get_current_fiber();
  for (Fiber& fiber : fibers)
    if (!fiber.seen_as) fiber.seen_as = __tsan_create_fiber(0);
  std::vector<int> order(all);
  for (int i = 0; i < all; ++i) order[i] = i;
  for (unsigned number = 0; number < grid.x * grid.y; number += cluster) {
    for (int rank = 0; rank < cluster; ++rank) std::memset(memory[rank], 0xff, bytes);
    for (int i = 0; i < all; ++i) {
      Fiber& fiber = fibers[i];
      const unsigned block = number + i / threads;
      fiber.stack.resize(1 << 16);
      fiber.begun = fiber.done = false, fiber.groups.clear(), fiber.open.clear();
      fiber.index = dim3(i % threads), fiber.block = dim3(block % grid.x, block / grid.x);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, begin, 0);
    }
    __tsan_release(&before);
    for (int left = all, idle = 0; left;) {
      const long before = progress;
      if (random() % 4 == 0) std::shuffle(order.begin(), order.end(), random);
      for (int i : order) {
        if (fibers[i].done) continue;
        current = i;
        resume(fibers[i]);
        left -= fibers[i].done;
      }
      idle = progress == before ? idle + 1 : 0;
      if (idle > 4) fail("deadlock: not all threads reach a barrier");
    }
    __tsan_acquire(&after);
  }
}

}  // namespace emulator

// And the rest of what it calls.
cudaError_t cudaGetDevice(int* index) { return *index = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  return *value = which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulator::kSharedBytes : 2, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = 12030, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the emulator"; }
