// What the runtime knows while a grid runs. Part of runtime.cpp.
#pragma once
#include "runtime.h"
#include "stacks.h"

namespace shim {

constexpr int MOST_THREADS = 1024;
constexpr int WARP = 32;
constexpr unsigned MOST_SHARED_BYTES = 227 * 1024;
constexpr unsigned COPIES = 256;  // in flight a thread
constexpr unsigned QUEUE = 2048;

struct Thread {
  Context context = nullptr;
  char* stack = nullptr;
  void* tsan = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  Dim index = {0, 0, 0};
  int lane = 0, warp = 0;
  bool done = false;
  Op op = Op::none;  // what it waits for
  Operands operands;
  const char* file = "";
  int line = 0;
  Copy copies[COPIES];         // a ring
  int copy_group[COPIES];
  unsigned first_copy = 0, next_copy = 0;
  int groups = 0;              // closed so far
};

// Lanes that have come to one warp-wide operation.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  Op op = Op::none;
  const char* file = nullptr;
  int line = 0;
};

struct Warp {
  uint32_t exited = 0;
  Meeting meetings[WARP];
  char barrier = 0;  // its address names the barrier to ThreadSanitizer
};

struct State {
  Thread* threads = nullptr;
  int made = 0, count = 0, alive = 0, at_barrier = 0;
  int current = -1;  // -1: the host
  Warp warps[MOST_THREADS / WARP];
  int ready[QUEUE];
  unsigned first_ready = 0, next_ready = 0;
  Dim block = {0, 0, 0}, grid = {0, 0, 0}, block_size = {0, 0, 0};
  unsigned char* shared = nullptr;
  const char* barrier_file = nullptr;
  int barrier_line = 0;
  int order = forward;
  uint64_t random = 1;
  Context host = nullptr;
  void* host_tsan = nullptr;
  void* host_fake_stack = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
  void (*entry)(const void*) = nullptr;
  const void* argument = nullptr;
  bool failed = false;
  char error[512] = {0};
  char barrier = 0, end = 0;
  float half_values[1 << 16];
} S;

static Thread& me() { return S.threads[S.current]; }

static uint32_t next_random() {  // xorshift64 (Marsaglia 2003)
  S.random ^= S.random << 13;
  S.random ^= S.random >> 7;
  S.random ^= S.random << 17;
  return static_cast<uint32_t>(S.random >> 32);
}

// libc's memcpy is watched by the sanitizers; this is not.
static void copy_unwatched(void* target, const void* source, int bytes) {
  for (int i = 0; i < bytes; i++) {
    static_cast<volatile unsigned char*>(target)[i] = static_cast<const unsigned char*>(source)[i];
  }
}

}  // namespace shim
