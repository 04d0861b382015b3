// CUDA's execution space specifiers for a compiler that knows none of them. Stands where NVIDIA's headers look for their
// own file of this name, which comes with nvcc, not with the headers' package.
#pragma once
#define __host__
#define __device__
#define __global__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __no_return__ __attribute__((noreturn))
#define __launch_bounds__(...)
#define __specialization_static static
#define CUDARTAPI
#define CUDARTAPI_CDECL
