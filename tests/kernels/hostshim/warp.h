// What warp-wide operations do once all their lanes are there. Part of runtime.cpp.
#pragma once
#include <cstring>

#include "state.h"

namespace shim {

static void do_shuffle(Thread* lanes, uint32_t mask) {
  unsigned char values[WARP][16];
  for (int i = 0; i < WARP; i++) {
    if (!(mask >> i & 1)) continue;
    const int source = lanes[i].operands.selector;
    if (!(mask >> source & 1)) fail("a shuffle reads a lane outside its mask", lanes[i].file, lanes[i].line);
    copy_unwatched(values[i], lanes[source].operands.in, lanes[i].operands.bytes);
  }
  for (int i = 0; i < WARP; i++) {
    if (mask >> i & 1) copy_unwatched(lanes[i].operands.out, values[i], lanes[i].operands.bytes);
  }
}

static void do_vote(Thread* lanes, uint32_t mask) {
  uint32_t votes = 0;
  for (int i = 0; i < WARP; i++) votes |= (mask >> i & 1) && lanes[i].operands.selector ? 1u << i : 0;
  for (int i = 0; i < WARP; i++) {
    if (mask >> i & 1) *static_cast<uint32_t*>(lanes[i].operands.out) = votes;
  }
}

// Four 8x8 matrices of 16-bit elements; lane 8m + r names row r of matrix m. PTX ISA, "ldmatrix".
static void do_ldmatrix(Thread* lanes) {
  auto element = [&](int matrix, int row, int column) {
    return static_cast<const uint16_t*>(lanes[matrix * 8 + row].operands.in)[column];
  };
  for (int i = 0; i < WARP; i++) {
    auto* fragment = static_cast<uint32_t*>(lanes[i].operands.out);
    const int row = i / 4, column = i % 4 * 2;
    for (int m = 0; m < 4; m++) {
      const bool transposed = lanes[i].operands.selector;
      const uint32_t low = transposed ? element(m, column, row) : element(m, row, column);
      const uint32_t high = transposed ? element(m, column + 1, row) : element(m, row, column + 1);
      fragment[m] = low | high << 16;
    }
  }
}

static float value_of(uint16_t bits, bool bfloat16) {
  if (!bfloat16) return S.half_values[bits];
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// D[16][8] += A[16][16] B[16][8] with float32 sums; who holds what: PTX ISA, "mma.m16n8k16", 16-bit floating point.
static void do_mma(Thread* lanes) {
  float a[16][16], b[16][8], d[16][8] = {};
  for (int i = 0; i < WARP; i++) {
    const Operands& o = lanes[i].operands;
    const bool bfloat16 = o.selector;
    const auto* fragment = static_cast<const uint32_t*>(o.in);
    const int row = i / 4, k = i % 4 * 2;
    for (int half = 0; half < 2; half++) {
      for (int j = 0; j < 4; j++) {
        a[row + 8 * (j & 1)][k + 8 * (j >> 1) + half] = value_of(fragment[j] >> 16 * half, bfloat16);
      }
      b[k + half][row] = value_of(o.b0 >> 16 * half, bfloat16);
      b[k + 8 + half][row] = value_of(o.b1 >> 16 * half, bfloat16);
    }
  }
  for (int row = 0; row < 16; row++) {
    for (int k = 0; k < 16; k++) {
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int i = 0; i < WARP; i++) {
    auto* out = static_cast<float*>(lanes[i].operands.out);
    for (int j = 0; j < 4; j++) out[j] += d[i / 4 + 8 * (j >> 1)][i % 4 * 2 + (j & 1)];
  }
}

static void perform(Op op, uint32_t mask, int warp) {
  Thread* lanes = &S.threads[warp * WARP];
  if (op == Op::shuffle) do_shuffle(lanes, mask);
  if (op == Op::vote) do_vote(lanes, mask);
  if (op == Op::ldmatrix) do_ldmatrix(lanes);
  if (op == Op::mma) do_mma(lanes);
}

static void fill_half_values() {  // IEEE 754 binary16
  for (int bits = 0; bits < 1 << 16; bits++) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = static_cast<float>(fraction) / (1 << 24);  // subnormal
    if (exponent) {
      const uint32_t wide = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
      memcpy(&value, &wide, 4);
    }
    uint32_t wide;
    memcpy(&wide, &value, 4);
    wide |= sign;
    memcpy(&S.half_values[bits], &wide, 4);
  }
}

}  // namespace shim
