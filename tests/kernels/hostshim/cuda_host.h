// CUDA's names on the CPU: what a kernel source needs to compile with g++. Stands in for the inline assembly of
// kernels/csrc/common.cuh, function by function. For tests only.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>  // NVIDIA's own host implementations of the conversions
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "runtime.h"

#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif

#define threadIdx (shim::thread_index())
#define blockIdx (shim::block_index())
#define blockDim (shim::block_dim())
#define gridDim (shim::grid_dim())
#define DYNAMIC_SHARED(name) unsigned char* name = shim::dynamic_shared()

#define __syncthreads() shim::block_barrier(__FILE__, __LINE__)
#define __syncwarp() shim::warp_collective(shim::Op::warp_barrier, 0xffffffffu, {}, __FILE__, __LINE__)
#define __shfl_sync(mask, value, lane) shim::shuffle(mask, value, (lane) & 31, __FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, bits) shim::shuffle(mask, value, shim::lane() ^ (bits), __FILE__, __LINE__)
#define __any_sync(mask, predicate) (shim::ballot(mask, predicate, __FILE__, __LINE__) != 0)
#define __ballot_sync(mask, predicate) shim::ballot(mask, predicate, __FILE__, __LINE__)

#define ldmatrix_x4(fragment, row) shim::ldmatrix(fragment, row, false, __FILE__, __LINE__)
#define ldmatrix_x4_transposed(fragment, row) shim::ldmatrix(fragment, row, true, __FILE__, __LINE__)

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_write_range(void*, unsigned long);
#endif

namespace shim {

template <typename T>
T shuffle(uint32_t mask, T value, int source, const char* file, int line) {
  T result;
  Operands operands;
  operands.in = &value;
  operands.out = &result;
  operands.selector = source;
  operands.bytes = sizeof(T);
  warp_collective(Op::shuffle, mask, operands, file, line);
  return result;
}

inline uint32_t ballot(uint32_t mask, bool predicate, const char* file, int line) {
  uint32_t result = 0;
  Operands operands;
  operands.out = &result;
  operands.selector = predicate;
  warp_collective(Op::vote, mask, operands, file, line);
  return result;
}

inline void ldmatrix(uint32_t (&fragment)[4], const void* row, bool transposed, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(row) & 15) fail("ldmatrix row is not 16-byte aligned", file, line);
  alignas(16) unsigned char bytes[16];
  std::memcpy(bytes, row, 16);  // read here, by the lane that owns the row, so that sanitizers see it
  Operands operands;
  operands.in = bytes;
  operands.out = fragment;
  operands.selector = transposed;
  warp_collective(Op::ldmatrix, 0xffffffffu, operands, file, line);
}

inline void land(const Copy& copy) {
  if (copy.source)
    std::memcpy(copy.target, copy.source, 16);
  else
    std::memset(copy.target, 0, 16);
}

template <typename Params>
struct Call {
  void (*kernel)(Params);
  const void* params;
};

template <typename Params>
int launch(const Launch& where, void (*kernel)(Params), const void* params) {
  const Call<Params> call{kernel, params};
  auto enter = [](const void* argument) {
    const auto* call = static_cast<const Call<Params>*>(argument);
    Params copy;  // as on the device: every thread sees its own
    std::memcpy(&copy, call->params, sizeof copy);
    call->kernel(copy);
  };
  return run(where, enter, &call);
}

}  // namespace shim

template <typename T>
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  shim::Operands operands;
  operands.in = a;
  operands.out = d;
  operands.selector = std::is_same<T, __nv_bfloat16>::value;
  operands.b0 = b0;
  operands.b1 = b1;
  shim::warp_collective(shim::Op::mma, 0xffffffffu, operands, "mma", 0);
}

inline void cp_async_16(void* target, const void* source, bool in_range) {
  const auto odd = (reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source)) & 15;
  if (odd) shim::fail("cp.async address is not 16-byte aligned", "cp.async", 0);
#if defined(__SANITIZE_THREAD__)
  __tsan_write_range(target, 16);  // for a race, the copy writes from its issue on
#endif
  const shim::Copy copy{target, in_range ? source : nullptr};
  if (shim::lands_early())
    shim::land(copy);
  else
    shim::copy_issue(copy);
}
inline void cp_async_commit() { shim::copy_commit(); }
template <int GROUPS_KEPT>
inline void cp_async_wait() {
  shim::Copy copy;
  while (shim::copy_take(GROUPS_KEPT, &copy)) shim::land(copy);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
template <typename T>
inline T atomicAdd(T* at, T value) {
  static_assert(std::is_integral<T>::value, "sums of floats would depend on the order of threads");
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

inline float fast_exp2(float x) { return exp2f(x); }
inline float fast_divide(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <typename T>
inline T min(T a, T b) { return a < b ? a : b; }
template <typename T>
inline T max(T a, T b) { return a > b ? a : b; }
