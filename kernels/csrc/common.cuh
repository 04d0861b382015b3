// What all kernels share: element conversions, and every piece of inline assembly behind a function of its own.
// Compiles with NVRTC and nvcc, and with g++ where TRIPTYCH_HOST_SHIM is defined (tests/kernels/hostshim).
#pragma once
#ifdef TRIPTYCH_HOST_SHIM
#include "cuda_host.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float MASKED = -1e30f;  // not -infinity: -inf - -inf is NaN
constexpr float LOG2_E = 1.4426950408889634f;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- elements ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }

template <typename T>
struct From;
template <>
struct From<float> {
  static __device__ __forceinline__ float of(float x) { return x; }
};
template <>
struct From<__half> {
  static __device__ __forceinline__ __half of(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const u32*>(&both);
  }
  static __device__ __forceinline__ u32 fp8_pair(u16 bits) {
    const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3);
    return static_cast<u32>(both.x) | static_cast<u32>(both.y) << 16;
  }
};
template <>
struct From<__nv_bfloat16> {
  static __device__ __forceinline__ __nv_bfloat16 of(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&both);
  }
  static __device__ __forceinline__ u32 fp8_pair(u16 bits) {
    const __half2 both = __nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3);
    return pair(__low2float(both), __high2float(both));
  }
};
template <>
struct From<__nv_fp8_e4m3> {
  static __device__ __forceinline__ __nv_fp8_e4m3 of(float x) { return __nv_fp8_e4m3(x); }  // saturates
};

// ---- scores ------------------------------------------------------------------------------------------------------

// A dot product becomes a score in units of log2(e). cap * tanh(x / cap) = cap - 2 cap / (1 + e^(2x / cap)).
struct ScoreMap {
  float scale, cap, twice_over_cap;
  __device__ __forceinline__ ScoreMap(float scale_, float cap_)
      : scale(cap_ > 0 ? scale_ : scale_ * LOG2_E), cap(cap_ * LOG2_E), twice_over_cap(cap_ > 0 ? 2 * LOG2_E / cap_ : 0) {}
  __device__ __forceinline__ float operator()(float dot) const;
  // Of many at once: one branch on the cap, which all of a launch take alike.
  template <int N>
  __device__ __forceinline__ void apply(float (&dots)[N][4]) const;
};

// ---- assembly ----------------------------------------------------------------------------------------------------

#ifndef TRIPTYCH_HOST_SHIM
__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 16-bit elements; lane 8m + r passes the address of row r (16 bytes) of matrix m.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d[16][8] += a[16][16] b[16][8] in float32.
template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma_16816<__half>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory; zeros where not `in_range`, and `source` is not read then.
__device__ __forceinline__ void cp_async_16(void* target, const void* source, bool in_range) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(target)), "l"(source), "r"(in_range ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS_KEPT>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_KEPT) : "memory");
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_divide(float x, float y) { return __fdividef(x, y); }
#endif

__device__ __forceinline__ float ScoreMap::operator()(float dot) const {
  const float score = dot * scale;
  if (cap == 0) return score;
  return cap - fast_divide(2 * cap, 1 + fast_exp2(score * twice_over_cap));
}

template <int N>
__device__ __forceinline__ void ScoreMap::apply(float (&dots)[N][4]) const {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) dots[i / 4][i % 4] *= scale;
  if (cap == 0) return;
#pragma unroll
  for (int i = 0; i < 4 * N; i++) {
    dots[i / 4][i % 4] = cap - fast_divide(2 * cap, 1 + fast_exp2(dots[i / 4][i % 4] * twice_over_cap));
  }
}

// Largest value of, and sum over, the four lanes that share a row of an mma accumulator.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
