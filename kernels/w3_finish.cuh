// What follows the last step of a row block: sums over warps, then over thread blocks, then bias, rounding, output.
#pragma once
#include "w3_multiply.cuh"
#include "w3_feed.cuh"

W3_DEVICE u32 not_empty(float value) {
  const u32 bits = __float_as_uint(value);
  return bits == kEmpty ? 0x7FFFFFFFu : bits;
}

// Adds the bias, rounds once and writes one quad of fragment elements: rows g and g + 8, tokens 2 t and 2 t + 1.
W3_DEVICE void store_outputs(const Params& p, int row_tile, int token_warp, int quad, int lane, const float (&sum)[4]) {
  const int first_row = row_tile * 64 + lane / 4 + 16 * (quad / kTokenTiles);
  const int first_token = 8 * (token_warp * kTokenTiles + quad % kTokenTiles) + 2 * (lane % 4);
  u16* const y = p.y + static_cast<i64>(first_token) * p.rows + first_row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (first_row + 8 * half >= p.rows) continue;
    float bias = 0;
    if (p.bias) {
      const u32 bits = p.bias[first_row + 8 * half];
      bias = kBf16 ? __uint_as_float(bits << 16) : half_to_float(bits);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float value = sum[2 * half + e] + bias;
      if (first_token + e < p.tokens)
        y[static_cast<i64>(e) * p.rows + 8 * half] = static_cast<u16>(kBf16 ? floats_to_bfloat2(value, 0) : floats_to_half2(value, 0));
    }
  }
}

// Sums over the split warps of a row tile and its tokens, in order of warp; quad split_warp + m * kSplitWarps goes to sum[m].
W3_DEVICE void sum_warps(Accumulators& acc, u32 exchange, int warp, int row_warp, int split_warp, int token_warp, int lane,
                         float (&sum)[kMine][4]) {
  if constexpr (kBeside)  // lanes t and t + 2 hold the planes of the same tokens
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc.value[q][0][e] += __shfl_xor_sync(0xFFFFFFFFu, acc.value[q][0][e], 2);
  if constexpr (kSplitWarps == 1) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[q][e] = acc.value[q / kTokenTiles][q % kTokenTiles][e];
  } else {
    // warp k of a row tile adds up accumulators k, k + kSplitWarps, ... of all its warps, in order of warp
    const int id = 1 + row_warp * kTokenWarps + token_warp;
    named_barrier(id, 32 * kSplitWarps);  // the last row block's sums have been read
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float* v = acc.value[q / kTokenTiles][q % kTokenTiles];
      store_shared_floats(exchange + ((warp * kQuads + q) * 32 + lane) * 16, {v[0], v[1], v[2], v[3]});
    }
    named_barrier(id, 32 * kSplitWarps);
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int q = split_warp + m * kSplitWarps;
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][e] = 0;
      if (q < kQuads)
#pragma unroll
        for (int k = 0; k < kSplitWarps; ++k) {
          const int other = (token_warp * kSplitWarps + k) * kRowWarps + row_warp;
          const Float4 v = load_shared_float4(exchange + ((other * kQuads + q) * 32 + lane) * 16);
          sum[m][0] += v.x;
          sum[m][1] += v.y;
          sum[m][2] += v.z;
          sum[m][3] += v.w;
        }
    }
  }
}

// Everything that follows the last step of a row block: sums over warps, then over thread blocks, then the output.
W3_DEVICE void finish(const Params& p, const Walk& walk, int row_block, Accumulators& acc, u32 exchange, int warp,
                      int row_warp, int split_warp, int token_warp, int lane) {
  // addresses are worked out here, and not kept in registers from row block to row block
  asm volatile("" : "+r"(lane));
  if constexpr (!kRowMaps || kSplitWarps > 1) asm volatile("" : "+r"(row_warp), "+r"(split_warp), "+r"(token_warp));
  float sum[kMine][4];
  sum_warps(acc, exchange, warp, row_warp, split_warp, token_warp, lane, sum);
  const int row_tile = row_block * kRowWarps + row_warp;
  if (row_tile >= p.row_tiles) return;
  auto partial_of = [&](int block, int q) {
    const int sums = (block * kRowWarps + row_warp) * kTokenWarps + token_warp;
    return p.partials + (sums * kQuads * 512 + q * 512 + lane * 16);
  };
  // tokens of an accumulator that nobody asked for are not exchanged
  auto wanted = [&](int q) { return q < kQuads && 8 * (token_warp * kTokenTiles + q % kTokenTiles) < p.tokens; };

  if (walk.end_of(row_block) < p.steps) {  // another block owns the end of these rows
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int q = split_warp + m * kSplitWarps;
      if (wanted(q))
        store_relaxed(partial_of(blockIdx.x, q),
                      {not_empty(sum[m][0]), not_empty(sum[m][1]), not_empty(sum[m][2]), not_empty(sum[m][3])});
    }
    return;
  }
  if (walk.begin_of(row_block) > 0) {
    // Sums of several blocks are asked for at once: one after the other, each would cost the way to the L2 cache and back. Every lane
    // waits for what it adds and puts the pattern back itself, so it does not matter which lanes are answered first.
    constexpr bool kRoom = kTradeRegisters && !kRowMaps && kScaleSets == 1 && kStagedX != kFromGlobal && (kStagedX != kOwn || kTokenTiles == 1);
    constexpr int kInFlight = kRoom ? 8 : kTrades || !kFed ? 4 : 1;
    constexpr int kQuadsTogether = kMine < kInFlight ? kMine : kInFlight, kBlocksTogether = kRoom ? kInFlight / kQuadsTogether : 1;
    constexpr int kBlockBytes = kRowWarps * kTokenWarps * kQuads * 512;
    int begin = block_of_unit(row_block * p.steps, p);
    char* at = partial_of(begin, split_warp);
#pragma unroll 1
    for (; begin < static_cast<int>(blockIdx.x); begin += kBlocksTogether, at += kBlocksTogether * kBlockBytes) {
#pragma unroll
      for (int first = 0; first < kMine; first += kQuadsTogether) {
        Vec4 got[kBlocksTogether * kQuadsTogether];
        bool all;
        do {  // repeated until the writers are there
          all = true;
#pragma unroll
          for (int i = 0; i < kBlocksTogether * kQuadsTogether; ++i) {
            const int b = i / kQuadsTogether, m = first + i % kQuadsTogether;
            if (begin + b < static_cast<int>(blockIdx.x) && wanted(split_warp + m * kSplitWarps))
              got[i] = load_relaxed(at + b * kBlockBytes + m * kSplitWarps * 512);
          }
#pragma unroll
          for (int i = 0; i < kBlocksTogether * kQuadsTogether; ++i) {
            const int b = i / kQuadsTogether, m = first + i % kQuadsTogether;
            if (begin + b < static_cast<int>(blockIdx.x) && wanted(split_warp + m * kSplitWarps))
              all = all && got[i].x != kEmpty && got[i].y != kEmpty && got[i].z != kEmpty && got[i].w != kEmpty;
          }
        } while (!all);
#pragma unroll
        for (int i = 0; i < kBlocksTogether * kQuadsTogether; ++i) {  // in order of block
          const int b = i / kQuadsTogether, m = first + i % kQuadsTogether;
          if (begin + b < static_cast<int>(blockIdx.x) && wanted(split_warp + m * kSplitWarps)) {
            sum[m][0] += __uint_as_float(got[i].x);
            sum[m][1] += __uint_as_float(got[i].y);
            sum[m][2] += __uint_as_float(got[i].z);
            sum[m][3] += __uint_as_float(got[i].w);
            store_relaxed(at + b * kBlockBytes + m * kSplitWarps * 512, {kEmpty, kEmpty, kEmpty, kEmpty});
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const int q = split_warp + m * kSplitWarps;
    if (wanted(q)) store_outputs(p, row_tile, token_warp, q, lane, sum[m]);
  }
}

#if __CUDA_ARCH__ >= 900
// The same in a cluster, whose blocks all have sums of the row block: each sends what it has to the block that adds it up and writes it,
// straight into that one's shared memory. `parity` alternates from row block to row block.
W3_DEVICE void finish_cluster(const Params& p, int row_block, Accumulators& acc, const SharedMap& map, int warp, int row_warp,
                              int split_warp, int token_warp, int lane, bool first, bool last, u32 parity) {
  asm volatile("" : "+r"(lane), "+r"(row_warp), "+r"(split_warp), "+r"(token_warp));
  float sum[kMine][4];
  sum_warps(acc, map.exchange, warp, row_warp, split_warp, token_warp, lane, sum);
  const int row_tile = row_block * kRowWarps + row_warp, rank = blockIdx.x % kCluster;
  auto wanted = [&](int q) { return row_tile < p.row_tiles && q < kQuads && 8 * (token_warp * kTokenTiles + q % kTokenTiles) < p.tokens; };
  bool sends = false;
#pragma unroll
  for (int m = 0; m < kMine; ++m) sends = sends || ((warp * kMine + m) % kCluster != rank && wanted(split_warp + m * kSplitWarps));
  // until everybody has read the last row block's; nobody waits for a warp that sends nothing, so it could come too late here
  if (sends && !first) barrier_wait(map.sums_read, parity ^ 1);
  u32 expected = 0;
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const int item = warp * kMine + m, owner = item % kCluster;
    if (!wanted(split_warp + m * kSplitWarps)) continue;
    if (owner == rank) {
      expected += (kCluster - 1) * 512;
    } else {  // the others come in order of rank, after the owner's
      const int place = (rank + kCluster - 1 - owner) % kCluster * kOwnItems + item / kCluster;
      store_async(in_block(map.sums + place * 512 + lane * 16, owner), {sum[m][0], sum[m][1], sum[m][2], sum[m][3]},
                  in_block(map.sums_full, owner));
    }
  }
  if (elect_one()) barrier_expect(map.sums_full, expected);
  barrier_wait(map.sums_full, parity);
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const int item = warp * kMine + m, q = split_warp + m * kSplitWarps;
    if (item % kCluster != rank || !wanted(q)) continue;
    float total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int block = 0; block < kCluster; ++block) {  // in order of block
      const int place = (block + kCluster - 1 - rank) % kCluster * kOwnItems + item / kCluster;
      const Float4 part = block == rank ? Float4{sum[m][0], sum[m][1], sum[m][2], sum[m][3]} : load_shared_float4(map.sums + place * 512 + lane * 16);
      total[0] += part.x;
      total[1] += part.y;
      total[2] += part.z;
      total[3] += part.w;
    }
    store_outputs(p, row_tile, token_warp, q, lane, total);
  }
  __syncwarp();
  if (!last && lane < kCluster && lane != rank) cluster_arrive(in_block(map.sums_read, lane));
}
#endif
