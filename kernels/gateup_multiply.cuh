// 128 columns of a row block, one scale block each way: weights and activations -> sums.
//
// A lane (g, t) reads 16 neighbouring columns of a row of weights with one instruction, and the same columns of a token. So the k order
// of the products is not that of memory, but the same for both operands. Tiles have 8 rows of the first half, in fragment rows 0 to
// 7, and the same 8 rows of the second half in fragment rows 8 to 15: a lane's accumulators hold gate and up of one output.
#pragma once
#include "gateup_walk.cuh"

struct Accumulators {
  float value[kTiles][kTokenTiles][4];  // [.][.][2 * half + token % 2]
};

// Row of a tile's half that lane quarter g takes. Two neighbours are 4 rows apart: eight lanes that are served together then read from
// different banks.
W3_DEVICE int tile_row(int g) {
  return g / 2 + g % 2 * 4;
}

// The B operands of 64 columns.
struct TokenOperands {
  u32 value[8];
};

// `at` is where the lane's token has its 16 columns; `there` whether it has them.
W3_DEVICE void load_operands(TokenOperands& b, u32 at, bool there) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Vec4 v = load_shared(at + i * 16);
    b.value[4 * i] = there ? v.x : 0;
    b.value[4 * i + 1] = there ? v.y : 0;
    b.value[4 * i + 2] = there ? v.z : 0;
    b.value[4 * i + 3] = there ? v.w : 0;
  }
}

// What the products of 128 columns are multiplied by: the weights' scale and, where activations were converted, theirs.
struct Scales {
  float value[kBf16 ? kTokenTiles : 1][4];

  // `of_rows`: of the two halves; `of_tokens`: address of those of the part's tokens.
  W3_DEVICE Scales(const float (&of_rows)[2], u32 of_tokens, int t) {
#pragma unroll
    for (int n = 0; n < (kBf16 ? kTokenTiles : 1); ++n) {
      float2 x = {1, 1};
      if constexpr (kBf16) x = load_shared_floats(of_tokens + 4 * (8 * n + 2 * t));  // beyond the last token anything
#pragma unroll
      for (int e = 0; e < 4; ++e) value[n][e] = kBf16 ? of_rows[e / 2] * (e % 2 ? x.y : x.x) : of_rows[e / 2];
    }
  }
  W3_DEVICE float of(int n, int e) const { return value[kBf16 ? n : 0][e]; }
};

// Adds the products of 128 columns, 64 at a time.
//   weights: the lane's row of the first tile, of the part's first column
//   x: of each token tile, the lane's token and columns; columns: how many there are
W3_DEVICE void multiply_part(u32 weights, const u32 (&x)[kTokenTiles], const Scales& scales, int columns, int lane, Accumulators& acc) {
  const int g = lane / 4, t = lane % 4;
  // the 16-byte columns of a row change places with its number; the second 64 columns are always the other half
  const u32 column = (t ^ tile_row(g)) * 16;
#pragma unroll GU_UNROLL
  for (int c = 0; c < 2; ++c) {
    const bool there = !kPartial || 16 * t + 64 * c < columns;  // 16 divides the columns
    TokenOperands b[kTokenTiles];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) load_operands(b[n], x[n] + 128 * c, there);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      u32 row[2][8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Vec4 v = load_shared(weights + tile * 8 * kBlock + half * kHalfBytes + (column ^ (64 * c)));
        e4m3_to_halves(v.x, row[half][0], row[half][1]);
        e4m3_to_halves(v.y, row[half][2], row[half][3]);
        e4m3_to_halves(v.z, row[half][4], row[half][5]);
        e4m3_to_halves(v.w, row[half][6], row[half][7]);
      }
      float sum[kTokenTiles][4];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = 0;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const u32 a[4] = {row[0][2 * s], row[1][2 * s], row[0][2 * s + 1], row[1][2 * s + 1]};
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) mma_f16(sum[n], a, b[n].value[2 * s], b[n].value[2 * s + 1]);
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc.value[tile][n][e] = fmaf(sum[n][e], scales.of(n, e), acc.value[tile][n][e]);
    }
  }
}
