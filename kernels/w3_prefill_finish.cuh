// Sums -> y. A warp's sums are 16 rows of W by kTokens tokens, and in y the rows of W run fastest: through shared memory the 64 rows of a
// warpgroup become 128 neighbouring bytes of a token.
#pragma once
#include "w3_prefill_feed.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
// Four 8 x 8 matrices of 16-bit numbers, transposed on the way: lane 8 i + m says where row m of matrix i goes, and gives of matrix i, in
// register i, the numbers m' = 2 t, 2 t + 1 of what becomes column g.
W3_DEVICE void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

W3_DEVICE float bias_of(const Params& p, int row) {
  if (p.bias == nullptr || row >= p.rows) return 0;
  return kBf16 ? __uint_as_float(static_cast<u32>(p.bias[row]) << 16) : half_to_float(p.bias[row]);
}

// Writes what a warpgroup has. `turn` counts chunks over all tiles: two buffers in turn need one barrier for each chunk, since whoever
// is past the barrier of a chunk has read the one before.
//   sums[4 n + 2 half + e]: row g + 8 half of the warp's 16, token 8 n + 2 t + e
W3_DEVICE void finish(const Params& p, const Tile& tile, u32 buffers, int group, int thread, int& turn, const float (&sums)[kSums]) {
  const int warp = thread / 32, lane = thread % 32, g = lane / 4;
  const int first_row = (tile.row_tile + group) * 64;
  const float bias[2] = {bias_of(p, first_row + 16 * warp + g), bias_of(p, first_row + 16 * warp + g + 8)};
  // lane 8 i + m stores token m of the 8, or of the next 8 where i > 1, rows 0..7 or 8..15. 16-byte columns change places with the token.
  const int m = lane % 8;
  const u32 store_at = (8 * (lane / 16) + m) * 128 + (((2 * warp + lane / 8 % 2) ^ m) * 16);
  const int part = thread % 8, row = first_row + 8 * part;
#pragma unroll
  for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
    if (tile.token + chunk * kChunk >= p.tokens) break;
    const u32 buffer = buffers + turn % 2 * kChunkBytes;
    ++turn;
#pragma unroll
    for (int pair = 0; pair < kChunk / 16; ++pair) {
      u32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (chunk * (kChunk / 8) + 2 * pair + i / 2) + 2 * (i % 2);
        const float first = sums[at] + bias[i % 2], second = sums[at + 1] + bias[i % 2];
        packed[i] = kBf16 ? floats_to_bfloat2(first, second) : floats_to_half2(first, second);
      }
      store_transposed(buffer + pair * 16 * 128 + store_at, packed[0], packed[1], packed[2], packed[3]);
    }
    named_barrier(1 + group, 128);
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const int in_chunk = 16 * i + thread / 8, token = tile.token + chunk * kChunk + in_chunk;
      const Vec4 v = load_shared(buffer + in_chunk * 128 + ((part ^ in_chunk % 8) * 16));
      u16* const to = p.y + static_cast<i64>(token) * p.rows + row;
      if (token >= p.tokens) {
        // nobody's
      } else if (p.y_aligned && row + 8 <= p.rows) {
        *reinterpret_cast<uint4*>(to) = make_uint4(v.x, v.y, v.z, v.w);
      } else {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (row + e < p.rows) to[e] = static_cast<u16>(words[e / 2] >> (16 * (e % 2)));
      }
    }
    __syncwarp();
  }
}
#endif
