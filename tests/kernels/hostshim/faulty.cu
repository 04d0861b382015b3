// Small kernels, each with one fault of a kind the shim must find, or (`sound`) with none.
#include "common.cuh"
#include "params.cuh"

// 64 threads pass values to their neighbours through shared memory.
enum Barrier { WITH_BARRIER, WITHOUT_BARRIER, SHUFFLE_INSTEAD };
template <int BARRIER>
__global__ void neighbours(const DecodeParams p) {
  DYNAMIC_SHARED(shared);
  float* values = reinterpret_cast<float*>(shared);
  float* out = p.partial_out;
  values[threadIdx.x] = threadIdx.x;
  float one = 1;
  if (BARRIER == WITH_BARRIER) __syncthreads();
  if (BARRIER == SHUFFLE_INSTEAD) one = __shfl_xor_sync(ALL_LANES, one, 1);
  out[threadIdx.x] = values[(threadIdx.x + 1) % 64] * one;
}

__global__ void half_of_them_wait(const DecodeParams p) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  p.partial_out[threadIdx.x] = 0;
}

__global__ void one_lane_leaves(const DecodeParams p) {
  if (threadIdx.x == 5) return;
  p.partial_out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, 1.f, 1);
}

__global__ void half_mask(const DecodeParams p) {
  p.partial_out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.f, 1);
}

__global__ void past_the_buffer(const DecodeParams p) { p.partial_out[threadIdx.x + 1] = 0; }

__global__ void past_shared_memory(const DecodeParams p) {
  DYNAMIC_SHARED(shared);
  float* values = reinterpret_cast<float*>(shared);
  values[threadIdx.x + 1] = threadIdx.x;
  __syncthreads();
  p.partial_out[threadIdx.x] = values[threadIdx.x + 1];
}

__global__ void never_written(const DecodeParams p) {
  DYNAMIC_SHARED(shared);
  p.partial_out[threadIdx.x] = reinterpret_cast<float*>(shared)[threadIdx.x];
}

// Each thread copies 16 bytes asynchronously and reads them.
template <bool WAITS>
__global__ void copies(const DecodeParams p) {
  DYNAMIC_SHARED(shared);
  float* values = reinterpret_cast<float*>(shared);
  cp_async_16(values + threadIdx.x * 4, p.partial_lse + threadIdx.x * 4, true);
  cp_async_commit();
  if (WAITS) cp_async_wait<0>();
  p.partial_out[threadIdx.x] = values[threadIdx.x * 4];
}

__global__ void odd_copy(const DecodeParams p) {
  DYNAMIC_SHARED(shared);
  cp_async_16(shared, p.partial_lse + 1, true);
  p.partial_out[threadIdx.x] = 0;
}

__global__ void overflows(const DecodeParams p) {
  p.partial_out[threadIdx.x] = static_cast<float>(p.heads * (p.heads + static_cast<int>(threadIdx.x)));
}
