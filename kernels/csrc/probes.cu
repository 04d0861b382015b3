// Kernels of a few lines around what common.cuh hides: inline assembly, conversions, and the arithmetic that sampling
// counts on. They serve no model; the check on a card (tests/gpu_check) compares what they write with the same computed
// in numpy. One warp each.
#include "common.cuh"
#include "params.cuh"

// a [32][4], b [32][2] u32, c [32][4] float -> out [32][4] float: a lane's registers of an mma
template <typename T>
__global__ void __launch_bounds__(32) probe_mma(const ProbeParams p) {
  const int lane = threadIdx.x;
  u32 a[4];
  float d[4];
  for (int i = 0; i < 4; i++) {
    a[i] = static_cast<const u32*>(p.a)[lane * 4 + i];
    d[i] = static_cast<const float*>(p.c)[lane * 4 + i];
  }
  const u32* b = static_cast<const u32*>(p.b) + lane * 2;
  mma_16816<T>(d, a, b[0], b[1]);
  for (int i = 0; i < 4; i++) static_cast<float*>(p.out)[lane * 4 + i] = d[i];
}

// a [32 rows][8] u16 -> out [2][32][4] u32: the registers of ldmatrix, then of its transposed form
__global__ void __launch_bounds__(32) probe_ldmatrix(const ProbeParams p) {
  DYNAMIC_SHARED(shared);
  u16* rows = reinterpret_cast<u16*>(shared);
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; i++) rows[lane * 8 + i] = static_cast<const u16*>(p.a)[lane * 8 + i];
  __syncwarp();
  u32 plain[4], transposed[4];
  ldmatrix_x4(plain, rows + lane * 8);
  ldmatrix_x4_transposed(transposed, rows + lane * 8);
  for (int i = 0; i < 4; i++) {
    static_cast<u32*>(p.out)[lane * 4 + i] = plain[i];
    static_cast<u32*>(p.out)[128 + lane * 4 + i] = transposed[i];
  }
}

// a [3][32][4] u32, b [32] int -> out [3][32][4] u32: three groups of copies; lanes where b is 0 get zeros
__global__ void __launch_bounds__(32) probe_cp_async(const ProbeParams p) {
  DYNAMIC_SHARED(shared);
  u32* landed = reinterpret_cast<u32*>(shared);
  const int lane = threadIdx.x;
  const bool in_range = static_cast<const int*>(p.b)[lane];
  for (int i = 0; i < 12; i++) landed[i / 4 * 128 + lane * 4 + i % 4] = 0xdeadbeefu;
  __syncwarp();
  for (int group = 0; group < 3; group++) {
    cp_async_16(landed + group * 128 + lane * 4, static_cast<const u32*>(p.a) + group * 128 + lane * 4, in_range);
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncwarp();
  const int other = 31 - lane;  // a copy of another lane, which the barrier lets this one see
  for (int i = 0; i < 8; i++) {
    static_cast<u32*>(p.out)[i / 4 * 128 + other * 4 + i % 4] = landed[i / 4 * 128 + other * 4 + i % 4];
  }
  cp_async_wait<0>();
  __syncwarp();
  for (int i = 0; i < 4; i++) static_cast<u32*>(p.out)[256 + other * 4 + i] = landed[256 + other * 4 + i];
}

// a, b [count] float -> out [5][count] float: 2^a, a / b, the largest and the sum of a over a row's four lanes, and a as
// a score of scale 0.5 and cap 3
__global__ void __launch_bounds__(32) probe_floats(const ProbeParams p) {
  const float* a = static_cast<const float*>(p.a);
  float* out = static_cast<float*>(p.out);
  const ScoreMap score(0.5f, 3.f);
  for (int i = threadIdx.x; i < p.count; i += 32) {  // count is a multiple of 32: all lanes meet in the shuffles
    out[i] = fast_exp2(a[i]);
    out[p.count + i] = fast_divide(a[i], static_cast<const float*>(p.b)[i]);
    out[2 * p.count + i] = row_max(a[i]);
    out[3 * p.count + i] = row_sum(a[i]);
    out[4 * p.count + i] = score(a[i]);
  }
}

// a, b [count] float -> out [count][2] u32: T of a and b as a pair, then T of a alone (its bits)
template <typename T>
__global__ void __launch_bounds__(32) probe_pair(const ProbeParams p) {
  for (int i = threadIdx.x; i < p.count; i += 32) {
    const float a = static_cast<const float*>(p.a)[i], b = static_cast<const float*>(p.b)[i];
    const T alone = From<T>::of(a);
    static_cast<u32*>(p.out)[2 * i] = From<T>::pair(a, b);
    static_cast<u32*>(p.out)[2 * i + 1] = *reinterpret_cast<const u16*>(&alone);
  }
}

// a [count] u16, pairs of fp8 -> out [count] u32, pairs of T
template <typename T>
__global__ void __launch_bounds__(32) probe_fp8_pair(const ProbeParams p) {
  for (int i = threadIdx.x; i < p.count; i += 32) {
    static_cast<u32*>(p.out)[i] = From<T>::fp8_pair(static_cast<const u16*>(p.a)[i]);
  }
}

// a [count] float -> out [count] u32: the fp8 of a
__global__ void __launch_bounds__(32) probe_fp8(const ProbeParams p) {
  for (int i = threadIdx.x; i < p.count; i += 32) {
    const __nv_fp8_e4m3 made = From<__nv_fp8_e4m3>::of(static_cast<const float*>(p.a)[i]);
    static_cast<u32*>(p.out)[i] = *reinterpret_cast<const unsigned char*>(&made);
  }
}

// a, b, c [count] double -> out [4][count] u64: the bits of fma(a, b, c), rint(a), a / b; and high words of products
__global__ void __launch_bounds__(32) probe_doubles(const ProbeParams p) {
  const double *a = static_cast<const double*>(p.a), *b = static_cast<const double*>(p.b);
  const double* c = static_cast<const double*>(p.c);
  double* out = static_cast<double*>(p.out);
  for (int i = threadIdx.x; i < p.count; i += 32) {
    out[i] = fma(a[i], b[i], c[i]);
    out[p.count + i] = rint(a[i]);
    out[2 * p.count + i] = a[i] / b[i];
    const auto *u = static_cast<const unsigned long long*>(p.a), *v = static_cast<const unsigned long long*>(p.b);
    static_cast<unsigned long long*>(p.out)[3 * p.count + i] = __umul64hi(u[i], v[i]);
  }
}

// a [count] u32 -> out [4] u32: a's values added to one word of shared memory by all lanes; what __any_sync, __ballot_sync
// and __ffs say of a's first 32 (their lowest bits)
__global__ void __launch_bounds__(32) probe_warp(const ProbeParams p) {
  DYNAMIC_SHARED(shared);
  u32* sum = reinterpret_cast<u32*>(shared);
  if (threadIdx.x == 0) *sum = 0;
  __syncthreads();
  const u32* a = static_cast<const u32*>(p.a);
  for (int i = threadIdx.x; i < p.count; i += 32) atomicAdd(sum, a[i]);
  __syncthreads();
  u32* out = static_cast<u32*>(p.out);
  const u32 bits = __ballot_sync(ALL_LANES, a[threadIdx.x] & 1);
  const bool any = __any_sync(ALL_LANES, a[threadIdx.x] & 1);
  if (threadIdx.x == 0) {
    out[0] = *sum;
    out[1] = bits;
    out[2] = any;
    out[3] = __ffs(static_cast<int>(bits));
  }
}
