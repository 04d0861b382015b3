// Runs the threads of a CUDA grid as fibers of one OS thread, a block at a time. A fiber runs until it needs others:
// a barrier, a shuffle, an mma. Which one is next is the launch's order. Never compiled with -fsanitize: it tells the
// sanitizers about its switches (SHIM_ASAN, SHIM_TSAN) and must not be watched itself.
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "stacks.h"
#include "state.h"
#include "warp.h"

namespace shim {

Dim thread_index() { return me().index; }
Dim block_index() { return S.block; }
Dim block_dim() { return S.block_size; }
Dim grid_dim() { return S.grid; }
int lane() { return me().lane; }
unsigned char* dynamic_shared() { return S.shared; }

// ---- whose turn it is --------------------------------------------------------------------------------------------

static void switch_to(int to, bool for_good) {
  Context* save = S.current >= 0 ? &me().context : &S.host;
  Context load = to >= 0 ? S.threads[to].context : S.host;
#ifdef SHIM_ASAN
  void** fake = S.current >= 0 ? &me().fake_stack : &S.host_fake_stack;
  const void* stack = to >= 0 ? S.threads[to].stack : S.host_stack;
  __sanitizer_start_switch_fiber(for_good ? nullptr : fake, stack, to >= 0 ? STACK_BYTES : S.host_stack_bytes);
#endif
#ifdef SHIM_TSAN
  __tsan_switch_to_fiber(to >= 0 ? S.threads[to].tsan : S.host_tsan, 1);  // 1: a switch orders nothing
#endif
  (void)for_good;
  S.current = to;
  switch_context(save, load);
#ifdef SHIM_ASAN
  __sanitizer_finish_switch_fiber(*fake, nullptr, nullptr);
#endif
}

static void make_ready(int thread) { S.ready[S.next_ready++ % QUEUE] = thread; }

static void make_all_ready(int* threads, int count) {
  if (S.order == reverse) {
    for (int i = 0; i < count / 2; i++) std::swap(threads[i], threads[count - 1 - i]);
  }
  for (int i = 0; i < count; i++) {
    S.threads[threads[i]].op = Op::none;
    make_ready(threads[i]);
  }
}

static int take_ready() {
  if (S.next_ready == S.first_ready) return -1;
  if (S.order == random) {
    const unsigned chosen = S.first_ready + next_random() % (S.next_ready - S.first_ready);
    std::swap(S.ready[chosen % QUEUE], S.ready[S.first_ready % QUEUE]);
  }
  return S.ready[S.first_ready++ % QUEUE];
}

static void let_others_run(bool for_good) {
  const int next = take_ready();
  if (next == S.current && !for_good) return;
  switch_to(next, for_good);  // the host, when nobody can run
}

void fail(const char* what, const char* file, int line) {
  S.failed = true;
  snprintf(S.error, sizeof S.error, "%s at %s:%d, block (%u, %u, %u), thread %d", what, file, line, S.block.x,
           S.block.y, S.block.z, S.current);
  switch_to(-1, true);
  abort();
}

static void open_barrier_when_all_are_there() {
  if (S.alive == 0 || S.at_barrier != S.alive) return;
  int waiting[MOST_THREADS], count = 0;
  for (int i = 0; i < S.count; i++) {
    if (!S.threads[i].done) waiting[count++] = i;
  }
  S.at_barrier = 0;
  S.barrier_file = nullptr;
  make_all_ready(waiting, count);
}

void block_barrier(const char* file, int line) {
  if (S.barrier_file && S.barrier_line != line) fail("threads wait at two different __syncthreads", file, line);
  S.barrier_file = file;
  S.barrier_line = line;
  me().op = Op::block_barrier;
  me().file = file;
  me().line = line;
  release(&S.barrier);
  S.at_barrier++;
  open_barrier_when_all_are_there();
  let_others_run(false);
  acquire(&S.barrier);
}

// ---- meetings of a warp's lanes -------------------------------------------------------------------------------------

static Meeting& meeting_of(Warp& warp, Op op, uint32_t mask, const char* file, int line) {
  Meeting* found = nullptr;
  for (Meeting& m : warp.meetings) {
    if (!m.arrived || !(m.mask & mask)) continue;
    if (m.mask != mask || m.op != op || m.line != line || m.file != file) {
      fail("lanes of a warp meet in different operations, masks or places", file, line);
    }
    found = &m;
  }
  if (found) return *found;
  if (mask & warp.exited) fail("a mask names a lane that has left or never was", file, line);
  for (Meeting& m : warp.meetings) {
    if (m.arrived) continue;
    found = &m;
    break;
  }
  found->mask = mask;
  found->op = op;
  found->file = file;
  found->line = line;
  return *found;
}

void warp_collective(Op op, uint32_t mask, const Operands& operands, const char* file, int line) {
  Thread& self = me();
  if (!(mask >> self.lane & 1)) fail("the calling lane is not in its mask", file, line);
  self.operands = operands;
  self.op = op;
  self.file = file;
  self.line = line;
  Warp& warp = S.warps[self.warp];
  if (op == Op::warp_barrier) release(&warp.barrier);  // the only warp-wide operation that orders memory
  Meeting& meeting = meeting_of(warp, op, mask, file, line);
  meeting.arrived |= 1u << self.lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    perform(op, mask, self.warp);
    self.op = Op::none;
    int others[WARP], count = 0;
    for (int i = 0; i < WARP; i++) {
      if ((mask >> i & 1) && i != self.lane) others[count++] = self.warp * WARP + i;
    }
    make_all_ready(others, count);
    if (S.order != forward) {
      make_ready(S.current);
      let_others_run(false);
    }
  } else {
    let_others_run(false);
  }
  if (op == Op::warp_barrier) acquire(&warp.barrier);
}

// ---- asynchronous copies -----------------------------------------------------------------------------------------

bool lands_early() { return S.order == random && (next_random() & 1); }

void copy_issue(const Copy& copy) {
  Thread& self = me();
  if (self.next_copy - self.first_copy >= COPIES) fail("too many cp.async in flight", "cp.async", 0);
  self.copies[self.next_copy % COPIES] = copy;
  self.copy_group[self.next_copy++ % COPIES] = self.groups;
}

void copy_commit() { me().groups++; }

bool copy_take(int groups_kept, Copy* copy) {
  Thread& self = me();
  if (self.first_copy == self.next_copy) return false;
  if (self.copy_group[self.first_copy % COPIES] >= self.groups - groups_kept) return false;
  *copy = self.copies[self.first_copy++ % COPIES];
  return true;
}

// ---- blocks and grids --------------------------------------------------------------------------------------------

static void thread_main() {
#ifdef SHIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  S.entry(S.argument);
  release(&S.end);  // orders what a kernel wrote before the host's reads, not before other blocks
  Thread& self = me();
  self.done = true;
  S.alive--;
  Warp& warp = S.warps[self.warp];
  warp.exited |= 1u << self.lane;
  for (Meeting& m : warp.meetings) {
    if (m.arrived && (m.mask >> self.lane & 1)) fail("a lane left while others wait for it", m.file, m.line);
  }
  open_barrier_when_all_are_there();
  let_others_run(true);
  abort();
}

static void start_thread(int i) {
  Thread& t = S.threads[i];
  t.done = false;
  t.op = Op::none;
  t.lane = i % WARP;
  t.warp = i / WARP;
  t.first_copy = t.next_copy = 0;
  t.groups = 0;
  t.fake_stack = nullptr;
  t.index = {i % S.block_size.x, i / S.block_size.x % S.block_size.y, i / (S.block_size.x * S.block_size.y)};
#ifdef SHIM_TSAN  // new for every block, so that blocks are unordered among one another and no stack seems shared
  munmap(t.stack, STACK_BYTES);
  t.stack = new_stack();
  t.tsan = __tsan_create_fiber(0);
#endif
  make_context(&t.context, t.stack, thread_main);
}

static void run_block() {
  S.first_ready = S.next_ready = 0;
  S.at_barrier = 0;
  S.barrier_file = nullptr;
  S.alive = S.count;
  for (int w = 0; w * WARP < S.count; w++) {
    for (Meeting& m : S.warps[w].meetings) m.arrived = 0;
    const int lanes = S.count - w * WARP;
    S.warps[w].exited = lanes < WARP ? ~0u << lanes : 0;
  }
  int all[MOST_THREADS];
  for (int i = 0; i < S.count; i++) {
    start_thread(i);
    all[i] = i;
  }
  make_all_ready(all, S.count);
  switch_to(take_ready(), false);
#ifdef SHIM_TSAN
  for (int i = 0; i < S.count; i++) __tsan_destroy_fiber(S.threads[i].tsan);
#endif
  for (int i = 0; i < S.count && !S.failed; i++) {
    const Thread& t = S.threads[i];
    if (t.done) continue;
    S.failed = true;
    snprintf(S.error, sizeof S.error, "deadlock: thread %d waits at %s:%d for operation %d, block (%u, %u, %u)", i,
             t.file, t.line, static_cast<int>(t.op), S.block.x, S.block.y, S.block.z);
  }
}

// Shared memory holds NaN in every type (0xff) until it is written, and ends where the launch says.
static void run_block_with_shared(unsigned bytes) {
#ifdef SHIM_TSAN  // fresh addresses for each block
  const size_t mapped = (bytes + 8191) / 4096 * 4096;
  S.shared = reinterpret_cast<unsigned char*>(
      syscall(SYS_mmap, nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (unsigned i = 0; i < bytes; i++) const_cast<volatile unsigned char*>(S.shared)[i] = 0xff;
  run_block();
#else
  void* shared = nullptr;
  if (posix_memalign(&shared, 1024, bytes ? bytes : 1)) abort();
  S.shared = static_cast<unsigned char*>(shared);
  memset(S.shared, 0xff, bytes);
  run_block();
  free(shared);
#endif
}

static bool prepare(const Launch& launch) {
  const uint64_t threads = static_cast<uint64_t>(launch.block.x) * launch.block.y * launch.block.z;
  S.failed = false;
  S.error[0] = 0;
  if (threads == 0 || threads > MOST_THREADS || launch.shared_bytes > MOST_SHARED_BYTES) {
    snprintf(S.error, sizeof S.error, "a block of %lu threads with %u bytes of shared memory: at most %d and %u",
             static_cast<unsigned long>(threads), launch.shared_bytes, MOST_THREADS, MOST_SHARED_BYTES);
    return false;
  }
  if (!S.threads) {
    S.threads = new Thread[MOST_THREADS];
    fill_half_values();
  }
  S.count = static_cast<int>(threads);
  for (; S.made < S.count; S.made++) S.threads[S.made].stack = new_stack();
  S.grid = launch.grid;
  S.block_size = launch.block;
  S.order = launch.order;
  S.random = launch.seed * 2654435761u + 88172645463325252ull;
  return true;
}

int run(const Launch& launch, void (*entry)(const void*), const void* argument) {
  if (!prepare(launch)) return 1;
  S.entry = entry;
  S.argument = argument;
#ifdef SHIM_TSAN
  S.host_tsan = __tsan_get_current_fiber();
#endif
  const uint64_t blocks = static_cast<uint64_t>(S.grid.x) * S.grid.y * S.grid.z;
  for (uint64_t i = 0; i < blocks && !S.failed; i++) {
    const uint64_t b = S.order == reverse ? blocks - 1 - i : i;
    S.block = {static_cast<unsigned>(b % S.grid.x), static_cast<unsigned>(b / S.grid.x % S.grid.y),
               static_cast<unsigned>(b / (static_cast<uint64_t>(S.grid.x) * S.grid.y))};
    run_block_with_shared(launch.shared_bytes);
  }
  acquire(&S.end);
  return S.failed ? 1 : 0;
}

}  // namespace shim

extern "C" const char* shim_error() { return shim::S.error; }
