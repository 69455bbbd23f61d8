// Sums -> y. A warp's sums are 16 rows of W by kTokens tokens, and in y the rows of W run fastest: through shared memory the 64 rows of a
// warpgroup become 128 neighbouring bytes of a token.
//
// Where two warpgroups have sums of the same rows, each finishes every other chunk of tokens and gives the other one what it has of the
// rest, in float32 through shared memory.
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

constexpr int kChunkSums = kChunk / 2;  // of a lane

// What a lane of a warpgroup does in every chunk.
struct Finisher {
  const Params& p;
  const int group, thread;
  const int token, first_row;  // of the tile, and of the warpgroup
  float bias[2];
  u32 store_at;

  W3_DEVICE Finisher(const Params& p, const Tile& tile, int group, int thread)
      : p(p), group(group), thread(thread), token(tile.token), first_row((tile.row_tile + (kSplit ? 0 : group)) * 64) {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) bias[half] = bias_of(p, first_row + 16 * warp + g + 8 * half);
    // lane 8 i + m stores token m of the 8, or of the next 8 where i > 1, rows 0..7 or 8..15. 16-byte columns change places with the token.
    const int m = lane % 8;
    store_at = (8 * (lane / 16) + m) * 128 + (((2 * warp + lane / 8 % 2) ^ m) * 16);
  }

  // sums[4 n + 2 half + e]: row g + 8 half of the warp's 16, token 8 n + 2 t + e of the chunk.
  W3_DEVICE void write(int chunk, u32 buffer, const float (&sums)[kChunkSums]) const {
#pragma unroll
    for (int pair = 0; pair < kChunk / 16; ++pair) {
      u32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (2 * pair + i / 2) + 2 * (i % 2);
        const float first = sums[at] + bias[i % 2], second = sums[at + 1] + bias[i % 2];
        packed[i] = kBf16 ? floats_to_bfloat2(first, second) : floats_to_half2(first, second);
      }
      store_transposed(buffer + pair * 16 * 128 + store_at, packed[0], packed[1], packed[2], packed[3]);
    }
    named_barrier(1 + group, 128);
    const int part = thread % 8, row = first_row + 8 * part;
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const int in_chunk = 16 * i + thread / 8, to_token = token + chunk * kChunk + in_chunk;
      const Vec4 v = load_shared(buffer + in_chunk * 128 + ((part ^ in_chunk % 8) * 16));
      u16* const to = p.y + static_cast<i64>(to_token) * p.rows + row;
      if (to_token >= p.tokens) {
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
};

// Writes what a warpgroup has. `turn` counts chunks over all tiles: two buffers in turn need one barrier for each chunk, since whoever
// is past the barrier of a chunk has read the one before.
W3_DEVICE void finish(const Params& p, const Tile& tile, u32 buffers, int group, int thread, int& turn, const float (&sums)[kSums]) {
  const Finisher finisher(p, tile, group, thread);
#pragma unroll
  for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
    if (tile.token + chunk * kChunk >= p.tokens) break;
    float mine[kChunkSums];
#pragma unroll
    for (int i = 0; i < kChunkSums; ++i) mine[i] = sums[chunk * kChunkSums + i];
    finisher.write(chunk, buffers + (2 * group + turn % 2) * kChunkBytes, mine);
    ++turn;
  }
}

// The same where the warpgroups share their rows: of chunks 2 j and 2 j + 1 group 0 finishes the first, group 1 the second.
W3_DEVICE void finish_shared(const Params& p, const Tile& tile, u32 buffers, int group, int thread, const float (&sums)[kSums]) {
  static_assert(2 * kChunkBytes == 128 * kChunkSums * 4, "a warpgroup's two buffers hold what it gives away of a chunk");
  const Finisher finisher(p, tile, group, thread);
  const u32 own = buffers + group * 2 * kChunkBytes, theirs = buffers + (1 - group) * 2 * kChunkBytes;
#pragma unroll
  for (int chunk = 0; chunk < kTokens / kChunk; chunk += 2) {
    if (tile.token + chunk * kChunk >= p.tokens) break;
    float mine[kChunkSums], given[kChunkSums];
#pragma unroll
    for (int i = 0; i < kChunkSums; ++i) {
      const float first = sums[chunk * kChunkSums + i], second = sums[(chunk + 1) * kChunkSums + i];
      mine[i] = group ? second : first;
      given[i] = group ? first : second;
    }
    named_barrier(1 + group, 128);  // the warpgroup has read its last chunk
#pragma unroll
    for (int i = 0; i < kChunkSums / 4; ++i)
      store_shared_floats(own + i * 128 * 16 + thread * 16, {given[4 * i], given[4 * i + 1], given[4 * i + 2], given[4 * i + 3]});
    named_barrier(1 + kGroups, 128 * kGroups);  // both have given
#pragma unroll
    for (int i = 0; i < kChunkSums / 4; ++i) {
      const Vec4 v = load_shared(theirs + i * 128 * 16 + thread * 16);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) mine[4 * i + e] += __uint_as_float(words[e]);
    }
    named_barrier(1 + kGroups, 128 * kGroups);  // both have taken
    finisher.write(chunk + group, own, mine);
  }
}
#endif
