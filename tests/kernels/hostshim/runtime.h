// The interface between a kernel compiled for the CPU (instrumented by sanitizers) and the scheduler of its threads
// (runtime.cpp, not instrumented). Kernels see cuda_host.h instead, which spells it the way CUDA does.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shim {

struct Dim {
  unsigned x, y, z;
};

// How threads take turns. Results must not depend on it.
enum Order : int { forward = 0, reverse = 1, random = 2 };

struct Launch {
  Dim grid, block;
  unsigned shared_bytes;
  int order;
  uint64_t seed;  // of the random order
};

enum class Op : int { none, block_barrier, warp_barrier, shuffle, vote, ldmatrix, mma };

// What a lane brings to a warp-wide operation; which fields mean something depends on the operation.
struct Operands {
  const void* in = nullptr;  // shuffle: the lane's value; ldmatrix: its row of 16 bytes; mma: A fragment, uint32[4]
  void* out = nullptr;       // shuffle, vote: the result; ldmatrix: uint32[4]; mma: accumulator, float[4]
  int selector = 0;          // shuffle: source lane; vote: predicate; ldmatrix: transposed; mma: bfloat16
  int bytes = 0;             // shuffle: size of the value
  uint32_t b0 = 0, b1 = 0;   // mma: B fragment
};

// An asynchronous copy of 16 bytes, zeros where `source` is null.
struct Copy {
  void* target;
  const void* source;
};

// Constant within a thread, so the compiler may keep them across calls that switch threads.
Dim thread_index() __attribute__((const));
Dim block_index() __attribute__((const));
Dim block_dim() __attribute__((const));
Dim grid_dim() __attribute__((const));
int lane() __attribute__((const));
unsigned char* dynamic_shared() __attribute__((const));

void block_barrier(const char* file, int line);
void warp_collective(Op op, uint32_t mask, const Operands& operands, const char* file, int line);
[[noreturn]] void fail(const char* what, const char* file, int line);

void copy_issue(const Copy& copy);             // lands when waited for, or at random before
void copy_commit();                            // closes a group
bool copy_take(int groups_kept, Copy* copy);   // the oldest one not in the newest `groups_kept` groups
bool lands_early();                            // in random order, half of the copies

// Runs `entry(argument)` once a thread of the grid. 0, or 1 with a text in shim_error().
int run(const Launch& launch, void (*entry)(const void*), const void* argument);

}  // namespace shim

extern "C" const char* shim_error();
